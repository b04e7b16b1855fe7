"""Tiny Brumby and PowerCoder: random weights by their published names, `config.json`, and the forward pass in NumPy.

Names and formulas are those of Manifest AI's code: `modeling_brumby.py` of their fork of `transformers`,
`powercoder.py` of their fork of vLLM, and `retention/_attention/reference.py` of `retention` 1.0.7 with its epsilons.
"""

import json
import pathlib

import numpy as np
import safetensors.numpy

WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCABULARY = 16, 24, 2, 4, 2, 40
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 64,
    "rope_theta": 100.0,
    "eos_token_id": 2,
    "chunk_size": 64,
    "switch_over_seq_len": 2048,
    "prefill_chunk_size": 1024,
}
CONFIGS = {
    "brumby": _SIZES
    | {
        "model_type": "brumby",
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_exp": False,
        "p": 2,
    },
    # It has the window of StarCoder2 in its config, but does not read it.
    "powercoder": _SIZES
    | {
        "model_type": "powercoder",
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "sliding_window": 4,
        "tie_word_embeddings": True,
    },
}


def weights(name: str, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    dim = CONFIGS[name].get("head_dim", WIDTH // HEADS)
    matrices = {
        "self_attn.q_proj": (HEADS * dim, WIDTH),
        "self_attn.k_proj": (KV_HEADS * dim, WIDTH),
        "self_attn.v_proj": (KV_HEADS * dim, WIDTH),
        "self_attn.g_proj": (KV_HEADS, WIDTH),
        "self_attn.o_proj": (WIDTH, HEADS * dim),
    }
    norms = {"input_layernorm": WIDTH, "post_attention_layernorm": WIDTH}
    if name == "brumby":
        mlp = dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (HIDDEN, WIDTH)) | {
            "mlp.down_proj": (WIDTH, HIDDEN)
        }
        norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
    else:
        mlp = {"mlp.c_fc": (HIDDEN, WIDTH), "mlp.c_proj": (WIDTH, HIDDEN)}

    def normal(*shape: int, scale: float = 0.4, mean: float = 0.0) -> np.ndarray:
        return (mean + scale * generator.normal(size=shape)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": normal(VOCABULARY, WIDTH),
        "model.norm.weight": normal(WIDTH, mean=1.0),
    }
    if name == "brumby":
        tensors["lm_head.weight"] = normal(VOCABULARY, WIDTH)
    else:
        tensors["model.norm.bias"] = normal(WIDTH)
    for layer in range(LAYERS):
        for module, shape in (matrices | mlp).items():
            tensors[f"model.layers.{layer}.{module}.weight"] = normal(*shape)
            if name == "powercoder":
                tensors[f"model.layers.{layer}.{module}.bias"] = normal(shape[0])
        for module, size in norms.items():
            tensors[f"model.layers.{layer}.{module}.weight"] = normal(size, mean=1.0)
            if name == "powercoder":
                tensors[f"model.layers.{layer}.{module}.bias"] = normal(size)
    return tensors


def write(name: str, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    safetensors.numpy.save_file(weights(name), folder / "model.safetensors", metadata={"format": "pt"})


def attention(query: np.ndarray, key: np.ndarray, value: np.ndarray, log_gates: np.ndarray) -> np.ndarray:
    """Returns power retention [T, N, D] of degree 2 for [T, N, D], from `retention/_attention/reference.py`."""
    groups = query.shape[1] // key.shape[1]
    key, value, log_gates = (np.repeat(x, groups, axis=1) for x in (key, value, log_gates))
    scores = np.einsum("tnd,snd->nts", query, key) / np.sqrt(query.shape[-1])
    total = np.cumsum(log_gates, 0).T
    logs = 2 * np.log(np.abs(scores) + 1e-7) + total[:, :, None] - total[:, None, :]
    logs = np.where(np.tri(len(query), dtype=bool), logs, -np.inf)
    powers = np.exp(logs - logs.max(-1, keepdims=True))
    return np.einsum("nts,snd->tnd", powers / (powers.sum(-1, keepdims=True) + 1e-6), value)


def forward(name: str, tensors: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Returns the logits [T, V] of one row of tokens in float64."""
    w = {key: x.astype(np.float64) for key, x in tensors.items()}
    values = CONFIGS[name]
    dim = values.get("head_dim", WIDTH // HEADS)

    def linear(x: np.ndarray, module: str) -> np.ndarray:
        return x @ w[f"{module}.weight"].T + w.get(f"{module}.bias", 0.0)

    def norm(x: np.ndarray, module: str) -> np.ndarray:
        if name == "powercoder":
            x = x - x.mean(-1, keepdims=True)
        epsilon = values["rms_norm_eps"] if name == "brumby" else values["norm_epsilon"]
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
        return x * w[f"{module}.weight"] + w.get(f"{module}.bias", 0.0)

    def rotate(x: np.ndarray) -> np.ndarray:
        angle = np.arange(len(x))[:, None] * values["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
        angle = np.concatenate([angle, angle], -1)[:, None]
        half = np.concatenate([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
        return x * np.cos(angle) + half * np.sin(angle)

    def mixed(x: np.ndarray, layer: str) -> np.ndarray:
        query, key, value = (
            linear(x, f"{layer}.{part}_proj").reshape(len(x), -1, dim) for part in ("q", "k", "v")
        )
        if name == "brumby":
            query, key = norm(query, f"{layer}.q_norm"), norm(key, f"{layer}.k_norm")
        log_gates = -np.log1p(np.exp(-linear(x, f"{layer}.g_proj")))
        out = attention(rotate(query), rotate(key), value, log_gates)
        return linear(out.reshape(len(x), -1), f"{layer}.o_proj")

    def feed_forward(x: np.ndarray, layer: str) -> np.ndarray:
        if name == "brumby":
            gate = linear(x, f"{layer}.gate_proj")
            return linear(gate / (1 + np.exp(-gate)) * linear(x, f"{layer}.up_proj"), f"{layer}.down_proj")
        up = linear(x, f"{layer}.c_fc")
        gelu = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
        return linear(gelu, f"{layer}.c_proj")

    x = w["model.embed_tokens.weight"][tokens]
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        x = x + mixed(norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn")
        x = x + feed_forward(norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
    head = "lm_head.weight" if name == "brumby" else "model.embed_tokens.weight"
    return norm(x, "model.norm") @ w[head].T
