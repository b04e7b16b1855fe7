"""Fake published GPT-2: a file of random weights, its `config.json`, and the forward pass in NumPy."""

import json
import pathlib

import numpy as np
import safetensors.numpy

WIDTH, HEADS, LAYERS, LENGTH, VOCABULARY = 24, 3, 2, 20, 40
CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "activation_function": "gelu_new",
    "bos_token_id": 39,
    "eos_token_id": 39,
    "layer_norm_epsilon": 1e-05,
    "n_ctx": LENGTH,
    "n_embd": WIDTH,
    "n_head": HEADS,
    "n_layer": LAYERS,
    "n_positions": LENGTH,
    "vocab_size": VOCABULARY,
}


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random weights by their published names, with the masks that files have.

    They are so large that all of them matter.
    """
    generator = np.random.default_rng(seed)

    def normal(*shape: int, scale: float, mean: float = 0) -> np.ndarray:
        return (mean + scale * generator.normal(size=shape)).astype(np.float32)

    tensors = {
        "wte.weight": normal(VOCABULARY, WIDTH, scale=1.0),
        "wpe.weight": normal(LENGTH, WIDTH, scale=0.5),
        "ln_f.weight": normal(WIDTH, scale=0.2, mean=1.0),
        "ln_f.bias": normal(WIDTH, scale=0.2),
    }
    for layer in range(LAYERS):
        for name, size_in, size_out in (
            ("attn.c_attn", WIDTH, 3 * WIDTH),
            ("attn.c_proj", WIDTH, WIDTH),
            ("mlp.c_fc", WIDTH, 4 * WIDTH),
            ("mlp.c_proj", 4 * WIDTH, WIDTH),
        ):
            tensors[f"h.{layer}.{name}.weight"] = normal(size_in, size_out, scale=1.5 / size_in**0.5)
            tensors[f"h.{layer}.{name}.bias"] = normal(size_out, scale=0.3)
        for name in ("ln_1", "ln_2"):
            tensors[f"h.{layer}.{name}.weight"] = normal(WIDTH, scale=0.2, mean=1.0)
            tensors[f"h.{layer}.{name}.bias"] = normal(WIDTH, scale=0.2)
        tensors[f"h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, LENGTH, LENGTH), np.float32))
        tensors[f"h.{layer}.attn.masked_bias"] = np.array(-1e4, np.float32)
    return tensors


def forward(weights: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Returns logits [B, T, V] of GPT-2 in float64."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def conv(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def attend(x: np.ndarray, name: str) -> np.ndarray:
        parts = np.split(conv(x, f"{name}.c_attn"), 3, axis=-1)
        query, key, value = (part.reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2) for part in parts)
        scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (share / share.sum(-1, keepdims=True)) @ value
        return conv(mixed.swapaxes(1, 2).reshape(x.shape), f"{name}.c_proj")

    def gelu(x: np.ndarray) -> np.ndarray:
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    x = w["wte.weight"][tokens] + w["wpe.weight"][: tokens.shape[1]]
    for layer in range(LAYERS):
        x = x + attend(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn")
        hidden = gelu(conv(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc"))
        x = x + conv(hidden, f"h.{layer}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


def write(
    folder: pathlib.Path, tensors: dict[str, np.ndarray] | None = None, *, prefix: str = "", **changes
) -> pathlib.Path:
    """Writes `model.safetensors` of these weights and `config.json`, with changes, in a folder.

    Returns the path of the former.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    path = folder / "model.safetensors"
    tensors = weights() if tensors is None else tensors
    safetensors.numpy.save_file(
        {prefix + name: value for name, value in tensors.items()}, path, metadata={"format": "pt"}
    )
    return path
