"""Names of tensors in published files of weights, and the parameters of a model that each tensor holds."""

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

# The output matrix [V, M]. Files of models whose output is the embedding may have it as a copy.
HEAD = "lm_head.weight"


class Tensor(NamedTuple):
    """Contents of a tensor.

    Attributes:
        parts: names of the parameters that it concatenates along their last axis.
        transposed: whether the file has the transpose: a matrix as [size_out, size_in], as in PyTorch's `Linear`.
    """

    parts: tuple[str, ...]
    transposed: bool = False


Rows = Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Names of a published model's tensors.

    Attributes:
        prefix: prefix of all names except the head's. Files of the model without its head leave it out.
        layers: prefix of the names of a layer, before its number.
        outside: tensors outside the layers.
        layer: tensors of a layer, by their names within it, with the names of parameters within a block.
        ignored: names, without the prefix, of tensors that are not weights.
    """

    prefix: str
    layers: str
    outside: Rows
    layer: Rows
    ignored: re.Pattern[str]

    def tensors(self, parameters: Iterable[str], *, prefix: str | None = None) -> dict[str, Tensor]:
        """Returns the tensors that hold the parameters. A parameter that is not in the layout keeps its name.

        Args:
            parameters: names of a model's parameters.
            prefix: prefix of the names. If None, the layout's.
        """
        parameters = list(parameters)
        prefix = self.prefix if prefix is None else prefix
        layers = dict.fromkeys(name.split(".")[1] for name in parameters if name.startswith("blocks."))
        table = {HEAD: Tensor(("unembedding",))}
        table |= {prefix + name: tensor for name, tensor in self.outside.items()}
        for layer in layers:
            for name, tensor in self.layer.items():
                parts = tuple(f"blocks.{layer}.{part}" for part in tensor.parts)
                table[f"{prefix}{self.layers}{layer}.{name}"] = tensor._replace(parts=parts)
        table = {name: tensor for name, tensor in table.items() if set(tensor.parts) <= set(parameters)}
        covered = {part for tensor in table.values() for part in tensor.parts}
        return table | own(name for name in parameters if name not in covered)

    def is_ignored(self, name: str) -> bool:
        """Returns whether a tensor is not a weight."""
        return self.ignored.fullmatch(name.removeprefix(self.prefix)) is not None


def own(parameters: Iterable[str]) -> dict[str, Tensor]:
    """Returns the tensors of this package's own files: each is a parameter of the same name."""
    return {name: Tensor((name,)) for name in parameters}


def choose(stored: Collection[str], parameters: Iterable[str]) -> tuple[dict[str, Tensor], Layout | None]:
    """Returns the tensors that a file should have, in the layout that shares the most names with it.

    Args:
        stored: names of the tensors in the file.
        parameters: names of the model's parameters.

    Returns:
        The tensors by name, and the layout, which is None for this package's own files.
    """
    parameters = list(parameters)
    candidates: list[tuple[dict[str, Tensor], Layout | None]] = [(own(parameters), None)]
    for layout in (GPT2, LLAMA, STARCODER2):
        for prefix in (layout.prefix, ""):
            candidates.append((layout.tensors(parameters, prefix=prefix), layout))
    return max(candidates, key=lambda candidate: len(candidate[0].keys() & set(stored)))


def _modules(weight: str, modules: Mapping[str, tuple[str, ...]], *, transposed: bool = False) -> Rows:
    """Returns the weight and the bias of modules, each of which concatenates modules of a block."""
    rows: dict[str, Tensor] = {}
    for name, parts in modules.items():
        rows[f"{name}.weight"] = Tensor(tuple(f"{part}.{weight}" for part in parts), transposed)
        rows[f"{name}.bias"] = Tensor(tuple(f"{part}.bias" for part in parts))
    return rows


GPT2 = Layout(
    prefix="transformer.",
    layers="h.",
    outside={
        "wte.weight": Tensor(("embedding",)),
        "wpe.weight": Tensor(("position_embedding",)),
        **_modules("scale", {"ln_f": ("final_norm",)}),
    },
    layer={
        **_modules("scale", {"ln_1": ("attention_norm",), "ln_2": ("mlp_norm",)}),
        **_modules(
            "kernel",
            {
                "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
                "attn.c_proj": ("attention.out",),
                "mlp.c_fc": ("mlp.up",),
                "mlp.c_proj": ("mlp.down",),
            },
        ),
    },
    # Causal masks, which some files store as weights.
    ignored=re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),
)
"""GPT-2 (Radford et al. 2019), whose matrices are [size_in, size_out]."""

_ATTENTION = {
    "self_attn.q_proj": ("attention.query",),
    "self_attn.k_proj": ("attention.key",),
    "self_attn.v_proj": ("attention.value",),
    "self_attn.o_proj": ("attention.out",),
    "self_attn.g_proj": ("attention.decay",),
}
_GATE_BIAS = {"self_attn.g_proj.bias": Tensor(("attention.decay_bias",))}
_GATED_MLP = {"mlp.gate_proj": ("mlp.gate",), "mlp.up_proj": ("mlp.up",), "mlp.down_proj": ("mlp.down",)}
_MLP = {"mlp.c_fc": ("mlp.up",), "mlp.c_proj": ("mlp.down",)}
_HEAD_NORMS = {"self_attn.q_norm": ("attention.query_norm",), "self_attn.k_norm": ("attention.key_norm",)}
_LAYER_NORMS = {"input_layernorm": ("attention_norm",), "post_attention_layernorm": ("mlp_norm",)}

LLAMA = Layout(
    prefix="model.",
    layers="layers.",
    outside={"embed_tokens.weight": Tensor(("embedding",)), **_modules("scale", {"norm": ("final_norm",)})},
    layer={
        **_modules("scale", _LAYER_NORMS | _HEAD_NORMS),
        **_modules("kernel", _ATTENTION | _GATED_MLP, transposed=True),
        **_GATE_BIAS,
    },
    # Rotation rates, which old files store as weights.
    ignored=re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
)
"""Llama and the models with its names: Mistral, Qwen2, Qwen3 with norms of queries and keys, Brumby with gates."""

STARCODER2 = dataclasses.replace(
    LLAMA,
    layer={
        **_modules("scale", _LAYER_NORMS),
        **_modules("kernel", _ATTENTION | _MLP, transposed=True),
        **_GATE_BIAS,
    },
)
"""StarCoder2, and PowerCoder with gates."""
