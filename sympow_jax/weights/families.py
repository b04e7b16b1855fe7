"""Families of published transformers: settings from a `config.json` of Hugging Face, and back."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from sympow_jax import config, spelling
from sympow_jax.config import effects, fields, serialize
from sympow_jax.process import hosts
from sympow_jax.weights import layouts

Values = Mapping[str, Any]

# Keys of the sizes in most families, by field of `config.ModelConfig`.
_SIZES = {
    "vocab_size": "vocab_size",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_width": "intermediate_size",
}
_GELU_TANH = {"gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}
_ROPE_DEFAULT = 10_000.0
LLAMA3 = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}
"""Keys of Llama 3's scaling, by field of `config.RopeConfig`."""
# Values of layer_types.
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Keys that version 5 of `transformers` prefers to those that are written.
_REPLACED = ("rope_parameters", "layer_types", "dtype")
# Placeholder for data.paths, since `config.json` names no data. `data.prepare` writes such files.
TOKENS = "data/train.bin"
_BATCH_ROWS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Published transformers with the same code in the package `transformers`, and their keys in `config.json`.

    Attributes:
        model_type: name of the family in `config.json`.
        architecture: class of its language model.
        layout: names of its tensors.
        sizes: keys of the sizes, by field of `config.ModelConfig`.
        length: key of the longest context.
        epsilon: key of the number that norms add.
        activation: key of the activation.
        activations: values of that key and the activations here. Of several values for one, the first is written.
        norm: the field `norm` of the model.
        rope: whether positions are rotations. If not, they are learned and absolute, as in GPT-2.
        biases: whether all projections have biases, or the key that says so.
        qkv_biases: whether the projections to queries, keys and values have biases.
        qk_norm: whether queries and keys are normalized.
        window: whether `sliding_window` is the number of tokens that a query attends to.
        power: whether attention is gated power attention with p = 2. Gates have a bias if all projections do.
        defaults: values of keys that a `config.json` may leave out.
        fixed: values of keys that support no other.
    """

    model_type: str
    architecture: str
    layout: layouts.Layout = layouts.LLAMA
    sizes: Mapping[str, str] = dataclasses.field(default_factory=lambda: _SIZES)
    length: str = "max_position_embeddings"
    epsilon: str = "rms_norm_eps"
    activation: str = "hidden_act"
    activations: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"silu": "swiglu"})
    norm: str = "rms"
    rope: bool = True
    biases: bool | str = False
    qkv_biases: bool = False
    qk_norm: bool = False
    window: bool = False
    power: bool = False
    defaults: Values
    fixed: Values = dataclasses.field(default_factory=dict)

    def model(self, values: Values) -> config.ModelConfig:
        """Returns the model that a `config.json` describes, in float32.

        Raises:
            ValueError: values are not supported. The error lists those of keys that change the function.
        """
        values = dict(self.defaults) | dict(values)
        fixed = {"quantization_config": None, "partial_rotary_factor": 1.0} | dict(self.fixed)
        problems = [
            f"{name} is {spelling.shown(values[name])}, not {value!r}"
            for name, value in fixed.items()
            if values.get(name, value) != value
        ]
        activation = values[self.activation]
        if activation not in self.activations:
            problems.append(
                f"{self.activation} is {spelling.shown(activation)}, not one of {', '.join(self.activations)}"
            )
        rope = _read_rope(values, problems) if self.rope else {}
        window = _read_window(values, problems) if self.window else None
        if problems:
            raise ValueError(f"this {self.model_type} is not supported: {'; '.join(problems)}")
        biases = values[self.biases] if isinstance(self.biases, str) else self.biases
        sizes: dict[str, Any] = {field: values.get(key) for field, key in self.sizes.items()}
        options: dict[str, Any] = {} if self.rope else {"max_document_length": values[self.length]}
        options |= {} if window is None else {"window": window}
        softmax = "softmax" if window is None else "sliding_window"
        return config.ModelConfig(
            **sizes,
            activation=self.activations[activation],
            norm=self.norm,
            norm_epsilon=values[self.epsilon],
            embedding_norm=False,
            biases=biases,
            tied_head=values["tie_word_embeddings"],
            dtype="float32",
            attention=config.AttentionConfig(
                kernel="power" if self.power else softmax,
                decay="learned" if self.power else "none",
                decay_bias=0.0 if self.power and biases else None,
                position="rope" if self.rope else "learned_absolute",
                rope=config.RopeConfig(**rope),
                qk_norm=self.qk_norm,
                qkv_biases=self.qkv_biases,
                **options,
            ),
        )

    def values(self, model: config.ModelConfig) -> dict[str, Any]:
        """Returns the keys of `config.json` that describe a model, which must be one of this family."""
        settings = serialize.flatten(model)
        sizes = {key: settings[field] for field, key in self.sizes.items()}
        activations = {value: name for name, value in reversed(list(self.activations.items()))}
        values: dict[str, Any] = {
            **self.fixed,
            "model_type": self.model_type,
            "architectures": [self.architecture],
            **sizes,
            self.epsilon: model.norm_epsilon,
            # If no name fits, `differences` says so.
            self.activation: activations.get(model.activation, next(iter(self.activations))),
            "tie_word_embeddings": model.tied_head,
        }
        if isinstance(self.biases, str):
            values[self.biases] = model.biases
        if self.window:
            # All layers have the window, or none.
            slides = model.attention.kernel == "sliding_window"
            window = {
                "sliding_window": model.attention.window if slides else None,
                "use_sliding_window": slides,
                "max_window_layers": 0 if slides else model.layers,
            }
            values |= {key: value for key, value in window.items() if key in self.defaults}
        if self.rope:
            # Keys that versions 4 and 5 of `transformers` read.
            rope, scaling = model.attention.rope, None
            if rope.scaling == "llama3":
                scaling = {"rope_type": "llama3"} | {
                    key: getattr(rope, field) for field, key in LLAMA3.items()
                }
            return values | {"rope_theta": rope.base or _ROPE_DEFAULT, "rope_scaling": scaling}
        return values | {self.length: model.attention.max_document_length}

    def differences(self, model: config.ModelConfig) -> list[str]:
        """Returns how a model differs from the one of this family that is the most like it; empty if it does not.

        Raises:
            ValueError: a model of this family cannot have these sizes.
        """
        own = function(self.model({self.length: 1} | self.values(model)))
        wanted = function(model)
        return [
            f"{path} is {wanted.get(path)!r} and not {own.get(path)!r}"
            for path in sorted(own.keys() | wanted.keys())
            if own.get(path) != wanted.get(path)
        ]


_LLAMA_DEFAULTS = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
_QWEN_DEFAULTS = _LLAMA_DEFAULTS | {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_STARCODER2_DEFAULTS = {
    "tie_word_embeddings": True,
    "norm_epsilon": 1e-5,
    "hidden_act": "gelu_pytorch_tanh",
    "use_bias": True,
    "sliding_window": None,
}
_STARCODER2: dict[str, Any] = {
    "layout": layouts.STARCODER2,
    "epsilon": "norm_epsilon",
    "activations": _GELU_TANH,
    "norm": "layer",
    "biases": "use_bias",
    "defaults": _STARCODER2_DEFAULTS,
}

_ROWS = (
    Family(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        layout=layouts.GPT2,
        sizes={
            "vocab_size": "vocab_size",
            "layers": "n_layer",
            "width": "n_embd",
            "heads": "n_head",
            "mlp_width": "n_inner",
        },
        length="n_positions",
        epsilon="layer_norm_epsilon",
        activation="activation_function",
        activations={"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"},
        norm="layer",
        rope=False,
        biases=True,
        defaults={
            "tie_word_embeddings": True,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
        },
        fixed={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    ),
    Family(
        model_type="llama",
        architecture="LlamaForCausalLM",
        defaults=_LLAMA_DEFAULTS,
        fixed={"attention_bias": False, "mlp_bias": False},
    ),
    Family(
        model_type="mistral",
        architecture="MistralForCausalLM",
        window=True,
        defaults=_LLAMA_DEFAULTS | {"sliding_window": 4096},
    ),
    Family(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        qkv_biases=True,
        window=True,
        defaults=_QWEN_DEFAULTS,
    ),
    Family(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        qk_norm=True,
        window=True,
        defaults=_QWEN_DEFAULTS | {"head_dim": 128},
        fixed={"attention_bias": False},
    ),
    Family(model_type="starcoder2", architecture="Starcoder2ForCausalLM", window=True, **_STARCODER2),
    Family(
        model_type="brumby",
        architecture="BrumbyForCausalLM",
        qk_norm=True,
        power=True,
        defaults=_QWEN_DEFAULTS | {"head_dim": 128},
        fixed={"attention_bias": False, "use_exp": False, "p": 2},
    ),
    Family(model_type="powercoder", architecture="PowerCoderForCausalLM", power=True, **_STARCODER2),
)
FAMILIES: Mapping[str, Family] = {row.model_type: row for row in _ROWS}
"""Families by `model_type`."""


def is_config(values: Values) -> bool:
    """Returns whether the values are the contents of a `config.json` of Hugging Face, and not of settings."""
    return "model_type" in values or "n_embd" in values


def settings(values: Values) -> config.Config:
    """Returns settings of a run for the model that a `config.json` describes, in float32.

    The run reads tokens with the model's full context length. The file does not say from where or how to train, so
    these settings are defaults.

    Raises:
        ValueError: the family is unknown, or values are missing, of the wrong type or not supported.
    """
    # The first files of GPT-2 do not name it.
    name = values.get("model_type", "gpt2")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"model_type is {spelling.shown(name)}; it must be one of {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    ends = values.get("eos_token_id")
    # Models that chat have several ends, of which the first ends a document.
    ids = [end for end in (ends if isinstance(ends, list) else [ends]) if end is not None]
    try:
        model, length = family.model(values), values[family.length]
        end = next((end for end in ids if 0 <= end < model.vocab_size), None)
        data = config.DataConfig(
            source="tokens",
            paths=(TOKENS,),
            token_dtype="uint16" if model.vocab_size <= 1 << 16 else "uint32",
            document_separator=end,
            context_length=length,
            batch_tokens=_BATCH_ROWS * length,
        )
    except (AttributeError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"a value of this {name} is missing or of the wrong type: {error}") from error
    if ids and end is None:
        # Some files have the default of a class for other vocabularies, such as PowerCoder's.
        hosts.say(
            f"warning: eos_token_id {spelling.shown(ends)} is outside the vocabulary of {model.vocab_size}; read as "
            f"none",
            error=True,
        )
    return config.Config(model=model, data=data)


def find(settings: config.Config) -> Family:
    """Returns the family that describes a model.

    Raises:
        ValueError: no family does. The error says how the model differs from the nearest.
    """
    if not settings.task.is_language_model or settings.model.patch_size is not None:
        raise ValueError(f"task.name is {settings.task.name!r}; Hugging Face's layouts are for next_token")
    nearest: tuple[str, list[str]] | None = None
    for family in FAMILIES.values():
        try:
            differences = family.differences(settings.model.without_pattern)
        except ValueError:
            continue
        if not differences:
            return family
        if nearest is None or len(differences) < len(nearest[1]):
            nearest = family.model_type, differences
    reason = f"; the nearest is {nearest[0]}, but {', '.join(nearest[1])}" if nearest else ""
    raise ValueError(
        f"none of Hugging Face's layouts describes this model{reason}; write it in the format sympow instead"
    )


def values(settings: config.Config, original: Values) -> tuple[Family, dict[str, Any]]:
    """Returns the family of a model and the contents of its `config.json`.

    Args:
        settings: settings of the run.
        original: contents of the `config.json` that the model comes from, or none. Keys that do not describe the model
            stay, such as ids of tokens, and so does a longer context.

    Raises:
        ValueError: as `find`.
    """
    family, model = find(settings), settings.model.without_pattern
    contents = {key: value for key, value in original.items() if key not in _REPLACED}
    before, length = contents.get(family.length), settings.data.context_length
    contents[family.length] = max(before, length) if isinstance(before, int) else length
    contents |= family.values(model)
    end, ends = settings.data.document_separator, contents.get("eos_token_id")
    if end is not None and not (isinstance(ends, list) and end in ends):
        contents["eos_token_id"] = end
    return family, contents


def _read_rope(values: Values, problems: list[str]) -> dict[str, Any]:
    """Returns fields of `RopeConfig` from the keys of versions 4 or 5 of `transformers`; adds to the problems."""
    both = [values[key] for key in ("rope_parameters", "rope_scaling") if values.get(key)]
    nested = both[0] if both else {}
    if len(both) == 2 and both[0] != both[1]:
        problems.append("rope_parameters and rope_scaling differ; leave one of them out")
    if any(isinstance(value, dict) for value in nested.values()):
        problems.append(f"rope_parameters is {spelling.shown(nested)}, not the same rates for all layers")
    if (rotated := nested.get("partial_rotary_factor", 1.0)) != 1.0:
        problems.append(f"partial_rotary_factor is {spelling.shown(rotated)}, not 1.0")
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind not in ("default", "llama3"):
        problems.append(f"rope_type is {spelling.shown(kind)}, not default or llama3")
    base: Any = nested.get("rope_theta", values.get("rope_theta", _ROPE_DEFAULT))
    scaling = {field: nested.get(key) for field, key in LLAMA3.items()} | {"scaling": kind}
    if isinstance(base, bool) or not isinstance(base, (int, float)):
        problems.append(f"rope_theta is {spelling.shown(base)}, not a number")
        base = _ROPE_DEFAULT
    return {"base": float(base), "layout": "halves"} | (scaling if kind == "llama3" else {})


def _read_window(values: Values, problems: list[str]) -> int | None:
    """Returns the number of tokens that a query attends to, itself included, if not all; adds to the problems."""
    if not isinstance(used := values.get("use_sliding_window", True), bool):
        problems.append(f"use_sliding_window is {spelling.shown(used)}, not true or false")
    window = values.get("sliding_window") if used else None
    kinds = set(values.get("layer_types") or ())
    if not kinds and window is not None:
        # Layers before `max_window_layers` have no window.
        first, layers = values.get("max_window_layers") or 0, values["num_hidden_layers"]
        kinds = {_FULL} if first >= layers else {_FULL, _SLIDING} if first else {_SLIDING}
    if unknown := sorted(map(str, kinds - {_SLIDING, _FULL})):
        problems.append(f"layer_types has {spelling.listed(unknown)}, not {_FULL} or {_SLIDING}")
    elif len(kinds) > 1:
        problems.append(
            "some layers have a sliding window and some have none (layer_types or max_window_layers)"
        )
    elif _SLIDING in kinds and window is None:
        problems.append("sliding_window is None, not the number of tokens of layer_types")
    return window if _SLIDING in kinds else None


def function(model: config.ModelConfig) -> dict[str, Any]:
    """Returns the fields, by dotted path, that decide the parameters of a model and their function."""
    attention = model.attention
    # Without the settings of how a model is computed, in which an encoder may differ from the one that it starts from.
    flat = serialize.flatten(model, fields.Occasion.INITIAL_ENCODER, prefix="model.")
    unread = effects.unread(attention)
    flat = {path: x for path, x in flat.items() if path.removeprefix("model.attention.") not in unread}
    # Only its presence matters to a model that has its parameters.
    has_bias = attention.decay_kind.is_projected and attention.decay_bias is not None
    has_bias |= attention.decay == "learned_alibi"
    flat["model.attention.decay_bias"] = has_bias
    if attention.decay == "learned_alibi":
        flat["model.attention.decay"] = "learned"
    return flat
