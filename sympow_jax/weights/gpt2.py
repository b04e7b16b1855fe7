"""Layout of GPT-2's published weights (Radford et al. 2019) and of its `config.json` on Hugging Face."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from sympow_jax import config

__all__ = ["OUTPUT", "Layout", "is_config", "is_ignored", "is_layout", "layout", "settings"]

# For each tensor of a file, the parameters that it concatenates along the last axis.
Layout = Mapping[str, tuple[str, ...]]

_PREFIX = "transformer."
# The unembedding matrix, which some files have as a copy of the embedding.
OUTPUT = "lm_head.weight"
# Causal masks, which some files store as weights.
_MASKS = re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)")

_OUTSIDE: Layout = {
    "wte.weight": ("embedding",),
    "wpe.weight": ("position_embedding",),
    "ln_f.weight": ("final_norm.scale",),
    "ln_f.bias": ("final_norm.bias",),
}
# Tensors of layer i, below `h.i.`, and parameters below `blocks.i.`. Matrices are [size_in, size_out] in both.
_LAYER: Layout = {
    "ln_1.weight": ("attention_norm.scale",),
    "ln_1.bias": ("attention_norm.bias",),
    "attn.c_attn.weight": ("attention.query.kernel", "attention.key.kernel", "attention.value.kernel"),
    "attn.c_attn.bias": ("attention.query.bias", "attention.key.bias", "attention.value.bias"),
    "attn.c_proj.weight": ("attention.out.kernel",),
    "attn.c_proj.bias": ("attention.out.bias",),
    "ln_2.weight": ("mlp_norm.scale",),
    "ln_2.bias": ("mlp_norm.bias",),
    "mlp.c_fc.weight": ("mlp.up.kernel",),
    "mlp.c_fc.bias": ("mlp.up.bias",),
    "mlp.c_proj.weight": ("mlp.down.kernel",),
    "mlp.c_proj.bias": ("mlp.down.bias",),
}

_SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}
# Options of GPT-2 for which the model here supports a single value.
_FIXED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
# Placeholder for data.paths, since `config.json` names no data. `data.prepare` writes such files.
_TOKENS = "data/train.bin"
_BATCH_ROWS = 8


def is_layout(names: Iterable[str]) -> bool:
    """Returns whether tensor names are GPT-2's, with or without the prefix `transformer.`."""
    return any(name.removeprefix(_PREFIX) == "wte.weight" for name in names)


def is_ignored(name: str) -> bool:
    """Returns whether a tensor is not a weight, but a causal mask or a copy of the embedding."""
    return name == OUTPUT or _MASKS.fullmatch(name) is not None


def layout(names: Iterable[str], parameters: Iterable[str]) -> Layout:
    """Returns the parameters that each tensor of a GPT-2 file holds.

    Parameters that GPT-2 does not have keep their names.

    Args:
        names: names of the tensors in the file.
        parameters: names of the model's parameters.
    """
    parameters = list(parameters)
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in names) else ""
    layers = dict.fromkeys(name.split(".")[1] for name in parameters if name.startswith("blocks."))
    table = dict(_OUTSIDE) | {
        f"h.{layer}.{name}": tuple(f"blocks.{layer}.{part}" for part in parts)
        for layer in layers
        for name, parts in _LAYER.items()
    }
    here = {prefix + name: parts for name, parts in table.items() if set(parts) <= set(parameters)}
    covered = {part for parts in here.values() for part in parts}
    return here | {name: (name,) for name in parameters if name not in covered}


def is_config(values: Mapping[str, Any]) -> bool:
    """Returns whether the values are the contents of a `config.json` of GPT-2."""
    return values.get("model_type") == "gpt2" or "n_embd" in values


def settings(values: Mapping[str, Any]) -> config.Config:
    """Returns settings of a run for the model that GPT-2's `config.json` describes, in float32.

    The run reads tokens with the model's full context length. The file does not say from where or how to train, so
    these settings are defaults.

    Raises:
        ValueError: sizes are missing, or options are not supported. The error lists all of them.
    """
    problems = [f"{name} is {values.get(name)!r}" for name in _SIZES if not _is_size(values.get(name))]
    problems += [
        f"{name} is {values[name]!r}, not {value!r}"
        for name, value in _FIXED.items()
        if values.get(name, value) != value
    ]
    activation = values.get("activation_function", "gelu_new")
    if activation not in _ACTIVATIONS:
        problems.append(f"activation_function is {activation!r}, not one of {', '.join(_ACTIVATIONS)}")
    if problems:
        raise ValueError(f"this GPT-2 is not one that can be had here: {'; '.join(problems)}")
    vocab_size, length, width, layers, heads = (values[name] for name in _SIZES)
    return config.Config(
        model=config.ModelConfig(
            vocab_size=vocab_size,
            layers=layers,
            width=width,
            heads=heads,
            mlp_width=values.get("n_inner"),
            activation=_ACTIVATIONS[activation],
            norm_epsilon=values.get("layer_norm_epsilon", 1e-5),
            embedding_norm=False,
            biases=True,
            dtype="float32",
            attention=config.preset("gpt2", max_document_length=length),
        ),
        data=config.DataConfig(
            source="tokens",
            paths=(_TOKENS,),
            token_dtype="uint16" if vocab_size <= 1 << 16 else "uint32",
            document_separator=values.get("eos_token_id"),
            context_length=length,
            batch_tokens=_BATCH_ROWS * length,
        ),
    )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and value > 0
