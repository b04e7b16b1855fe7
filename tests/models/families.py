"""Tiny models of the published families, and their forward pass in NumPy, written out from each family's own facts."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sympow_jax import config, models

WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 16, 4, 2, 8, 32
SMALL = {
    "vocab_size": VOCABULARY,
    "width": WIDTH,
    "heads": HEADS,
    "kv_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "mlp_width": 24,
    "dtype": "float32",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Facts of a family, apart from the sizes."""

    size: str
    base: float
    factor: float = 1.0  # of Llama 3's scaling
    epsilon: float = 1e-6
    rms: bool = True
    gated: bool = True
    biases: tuple[str, ...] = ()
    qk_norm: bool = False
    tied: bool = True
    power: tuple[bool, ...] = (False,)  # of each layer
    window: int | None = None  # in the tiny model


QKV = ("attention.query", "attention.key", "attention.value")
FAMILIES: Mapping[str, Family] = {
    "llama3": Family(size="llama3_8b", base=5e5, epsilon=1e-5, tied=False),
    "llama32": Family(size="llama32_1b", base=5e5, epsilon=1e-5, factor=32.0),
    "qwen2": Family(size="qwen2_500m", base=1e6, biases=QKV),
    "qwen3": Family(size="qwen3_14b", base=1e6, qk_norm=True, tied=False),
    "starcoder2": Family(
        size="starcoder2_3b",
        base=999_999.4420358813,
        epsilon=1e-5,
        rms=False,
        gated=False,
        biases=(*QKV, "attention.out", "mlp.up", "mlp.down"),
        window=11,
    ),
    "brumby": Family(size="qwen3_14b", base=1e6, qk_norm=True, tied=False, power=(True,)),
    # Not published: its second layer has the attention of Brumby.
    "hybrid": Family(size="qwen3_14b", base=1e6, qk_norm=True, tied=False, power=(False, True)),
}


def settings(name: str, **changes) -> config.ModelConfig:
    """Returns the config of a tiny model of a family."""
    family = FAMILIES[name]
    small = config.MODEL_SIZES[family.size] | SMALL | {"layers": len(family.power)} | changes
    if name == "hybrid":
        small["attention_pattern"] = ("qwen3", "brumby")
    window = {} if family.window is None else {"window": family.window}
    attention = config.preset("qwen3" if name == "hybrid" else name, **window)
    return config.ModelConfig(**small, attention=attention)


@functools.cache
def make(name: str) -> models.DecoderLM:
    """Returns a tiny model in which every parameter matters and differs from its initial value."""
    model = models.DecoderLM(settings(name), rngs=nnx.Rngs(0))
    generator = np.random.default_rng(0)
    noisy = jax.tree.map(
        lambda x: jnp.asarray(x + 0.3 * generator.normal(size=x.shape), jnp.float32), nnx.state(model)
    )
    nnx.update(model, noisy)
    return model


def parameters(model: models.DecoderLM) -> dict[str, np.ndarray]:
    """Returns the parameters by name, in float64."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return {models.parameter_name(path): np.asarray(leaf, np.float64) for path, leaf in leaves}


def forward(name: str, weights: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Returns the logits [T, V] of one row of tokens in float64, and checks that every weight is read."""
    family, unread = FAMILIES[name], set(weights)

    def read(weight):
        unread.discard(weight)
        return weights[weight]

    def norm(x, weight):
        if not family.rms:
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + family.epsilon) * read(f"{weight}.scale")
        return x if family.rms else x + read(f"{weight}.bias")

    def project(x, layer, weight):
        out = x @ read(f"{layer}.{weight}.kernel")
        return out + read(f"{layer}.{weight}.bias") if weight in family.biases else out

    def rotate(x):
        """Rotates m and m + D/2 as one complex number."""
        theta = family.base ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        turns = theta * 8192 / (2 * np.pi)
        kept = np.clip((turns - 1) / (4 - 1), 0, 1)
        theta = theta * (kept + (1 - kept) / family.factor)
        z = (x[..., : HEAD_DIM // 2] + 1j * x[..., HEAD_DIM // 2 :]) * np.exp(
            1j * np.arange(len(x))[:, None, None] * theta
        )
        return np.concatenate([z.real, z.imag], -1)

    def attend(x, layer, power):
        query, key, value = (
            project(x, layer, f"attention.{part}").reshape(len(x), -1, HEAD_DIM)
            for part in ("query", "key", "value")
        )
        if family.qk_norm:
            query = norm(query, f"{layer}.attention.query_norm")
            key = norm(key, f"{layer}.attention.key_norm")
        key, value = (np.repeat(part, HEADS // KV_HEADS, axis=1) for part in (rotate(key), value))
        scores = np.einsum("tnd,snd->nts", rotate(query), key)
        if power:
            gates = -np.log1p(np.exp(-project(x, layer, "attention.decay")))
            decay = np.repeat(np.cumsum(gates, 0), HEADS // KV_HEADS, axis=1).T
            shares = scores**2 * np.exp(np.minimum(decay[:, :, None] - decay[:, None], 0))
        else:
            shares = np.exp(scores / np.sqrt(HEAD_DIM))
        shares = np.tril(shares)
        if family.window is not None:
            shares = np.triu(shares, 1 - family.window)
        mixed = np.einsum("nts,snd->tnd", shares / shares.sum(-1, keepdims=True), value)
        return project(mixed.reshape(len(x), -1), layer, "attention.out")

    def feed_forward(x, layer):
        up = project(x, layer, "mlp.up")
        if family.gated:
            gate = project(x, layer, "mlp.gate")
            hidden = gate / (1 + np.exp(-gate)) * up
        else:
            hidden = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
        return project(hidden, layer, "mlp.down")

    x = read("embedding")[tokens]
    for index, power in enumerate(family.power):
        layer = f"blocks.{index}"
        x = x + attend(norm(x, f"{layer}.attention_norm"), layer, power)
        x = x + feed_forward(norm(x, f"{layer}.mlp_norm"), layer)
    logits = norm(x, "final_norm") @ read("embedding" if family.tied else "unembedding").T
    assert not unread, f"not part of {name}: {sorted(unread)}"
    return logits
