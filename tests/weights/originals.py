"""Tiny random models of the package `transformers`, and the fixtures made with them.

    uv run --with torch,transformers python -m tests.weights.originals

writes `tests/weights/fixtures` again: for each model its `config.json`, `model.safetensors` and `expected.safetensors`,
with tokens and their logits.
"""

import pathlib
import shutil
from typing import Any

import numpy as np
import safetensors.numpy

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
TIME, VOCABULARY = 24, 40

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Keys of the config of each model, by its name here.
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {
        **{"model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 12, "n_head": 3, "n_layer": 2},
        **{"n_positions": 32, "bos_token_id": 1, "eos_token_id": 2},
    },
    "llama": _SIZES | {"model_type": "llama", "num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    "llama32": _SIZES
    | {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "head_dim": 8,
        "rope_parameters": _LLAMA3,
        "eos_token_id": [2, 3],
    },
    "mistral": _SIZES | {"model_type": "mistral", "sliding_window": 8},
    "qwen2": _SIZES | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_window": _SIZES
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    "qwen3": _SIZES | {"model_type": "qwen3", "head_dim": 8},
    "starcoder2": _SIZES | {"model_type": "starcoder2", "sliding_window": 9},
}


def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCABULARY, (2, TIME))


def make(name: str, *, seed: int = 0) -> Any:
    import torch
    import transformers

    keys = dict(MODELS[name])
    config = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.3 if parameter.ndim == 1 else 0.5
            mean = parameter.mean().round()  # 1 of the scales of norms
            parameter.copy_(mean + scale * torch.randn(parameter.shape, generator=generator))
    return model


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.asarray(tokens)).logits.numpy()


def write(name: str, folder: pathlib.Path) -> None:
    model = make(name)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    expected = {"tokens": tokens().astype(np.int32), "logits": logits(model, tokens())}
    safetensors.numpy.save_file(expected, folder / "expected.safetensors")


if __name__ == "__main__":
    shutil.rmtree(FIXTURES, ignore_errors=True)
    for name in MODELS:
        write(name, FIXTURES / name)
