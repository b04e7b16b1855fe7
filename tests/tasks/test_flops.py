"""Tests of model FLOPs against hand-computed counts and XLA's own, and of the peaks for MFU."""

import dataclasses
import math
import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from sympow_jax import config, models
from sympow_jax.tasks import flops
from tests import marked

# Features of heads of 64 at p = 2.
FEATURES = 64 * 65 // 2
GATED = {"activation": "swiglu", "mlp_width": 2000}
UNITARY = config.LrpeConfig(core="unitary")


def _gpt2(name: str, **changes) -> config.ModelConfig:
    sizes = config.MODEL_SIZES["gpt2_124m"] | {"layers": 1}
    return config.ModelConfig(**sizes, attention=config.preset(name, **changes))


def _matrices(model: config.ModelConfig) -> int:
    """Returns the number of parameters that multiply tokens: all except those of norms and positions."""
    params = nnx.state(nnx.eval_shape(lambda: models.DecoderLM(model, rngs=nnx.Rngs(0))), nnx.Param)
    return sum(
        math.prod(leaf.shape)
        for path, leaf in nnx.to_flat_state(params)
        if len(leaf.shape) == 2 and not {"positions", "position_embedding"} & set(path)
    )


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in config.PRESETS),
        *(("conformal_paper", x) for x in ({"kv_heads": 3}, {"head_dim": 32, "mlp_width": 2304}, GATED)),
    ],
)
def test_products_with_weights_are_6_flops_a_weight(name, changes):
    model = dataclasses.replace(_gpt2(name), **changes)
    # Attention over a context of nothing costs nothing.
    model = dataclasses.replace(
        model, attention=dataclasses.replace(model.attention, form="attention", exact_window=0)
    )
    assert flops.model_flops_per_token(model, 0) == 6 * _matrices(model)


@pytest.mark.parametrize(
    ("name", "changes", "context", "per_head"),
    [
        # Half of the pairs are causal, and each costs 2 (64 + 64).
        ("softmax", {}, 4096, 256 * 2048),
        ("softmax_alibi", {}, 65_536, 256 * 32_768),
        ("sliding_window", {}, 4096, 256 * (1024 - 128)),
        ("sliding_window", {"window": 512}, 256, 256 * 128),
        # Keys read and write a state, and are compared with keys; pairs alone would cost less.
        ("power_delta", {"chunk_size": 64}, 256, 6 * FEATURES * 64 + 2 * 256 * 32),
        # The op takes the form that is faster: pairs would take fewer FLOPs up to 3,248 tokens.
        ("power_delta", {}, 2048, 2 * 256 * 1024),
        ("power_delta", {}, 3072, 6 * FEATURES * 64 + 2 * 256 * 64),
        ("even_power", {"power": 4}, 4096, 256 * 2048),
        ("conformal_paper", {}, 1024, 256 * 512),
        # 4,096 tokens cost 524,288 by pairs, and 532,480 by features with 32,768 by the pairs of a chunk.
        ("conformal_paper", {}, 4096, 256 * 2048),
        ("conformal_paper", {}, 65_536, 4 * FEATURES * 64 + 256 * (64 + 64)),
        ("sympow", {"chunk_size": 1024, "exact_window": 128}, 65_536, 4 * FEATURES * 64 + 256 * (512 + 128)),
        ("conformal_paper", {"form": "chunked"}, 1024, 4 * FEATURES * 64 + 256 * (64 + 64)),
        ("conformal_paper", {"form": "recurrent", "exact_window": 0}, 1024, 4 * FEATURES * 64 + 128),
        # 766,480 features cost more than 2^20 pairs.
        ("conformal_paper", {"power": 4}, 2**20, 256 * 2**19),
        ("linear", {}, 4096, 4 * 64 * 64 + 256 * (64 + 64)),
        # Complex features count as two real ones each, in pairs too.
        ("linear_lrpe", {"lrpe": UNITARY}, 65_536, 4 * 128 * 64 + 2 * (128 + 64) * (64 + 64)),
        ("linear", {"feature_map": "symmetric"}, 65_536, 4 * FEATURES * 64 + 256 * (64 + 64)),
        # One normalizer per channel.
        ("sympow", {"decay": "channel_fixed"}, 65_536, 4 * FEATURES * 128 + 2 * (64 + 128) * (64 + 64)),
        ("expressive", {}, 4096, 256 * 2048),
        # A window alongside the state.
        ("sympow_gated_window", {}, 65_536, 4 * FEATURES * 64 + 256 * (64 + 64) + 256 * (1024 - 8)),
    ],
)
def test_attention_by_hand(name, changes, context, per_head):
    model = _gpt2(name, **changes)
    attention = flops.model_flops_per_token(model, context) - 6 * _matrices(model)
    assert attention == 3 * 12 * per_head


def test_shared_keys_update_one_state():
    model = dataclasses.replace(_gpt2("sympow"), kv_heads=3)
    attention = flops.model_flops_per_token(model, 65_536) - 6 * _matrices(model)
    assert attention == 3 * ((12 + 3) * 2 * FEATURES * 64 + 12 * 256 * (64 + 64))


@marked.cases(
    ("name", "form", "chunk", "context"),
    [
        ("softmax", None, None, 128),
        ("conformal_paper", "attention", None, 128),
        ("conformal_paper", "chunked", 256, 256),
    ],
    slow=[("linear", "attention", None, 128), ("linear", "chunked", 128, 128)],
)
def test_xla_counts_as_many(name, form, chunk, context):
    """Agrees within a tenth with XLA's count of the forward pass.

    XLA's masked pairs are added, and its elementwise operations are not counted.
    """
    changes = {} if form is None else {"form": form, "chunk_size": chunk}
    sizes = {"vocab_size": 512, "layers": 1, "width": 128, "heads": 4, "dtype": "float32"}
    model = config.ModelConfig(**sizes, attention=config.preset(name, **changes))
    graphdef, params = nnx.split(nnx.eval_shape(lambda: models.DecoderLM(model, rngs=nnx.Rngs(0))))
    tokens = jax.ShapeDtypeStruct((2, context), jnp.int32)
    compiled = jax.jit(lambda tree, rows: nnx.merge(graphdef, tree)(rows)).lower(params, tokens).compile()
    counted = compiled.cost_analysis()["flops"] / (2 * context)
    expected = flops.model_flops_per_token(model, context) / 3
    if form != "chunked":
        expected += 4 * 128 * context / 2
    assert counted == pytest.approx(expected, rel=0.1)


def test_peaks():
    for kind, peak in {
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H100 NVL": 835e12,
        "NVIDIA H200": 989e12,
        "NVIDIA H200 NVL": 835e12,
        "NVIDIA H20": 148e12,
        "NVIDIA GH200 480GB": 989e12,
        "NVIDIA A100-SXM4-40GB": 312e12,
        "NVIDIA A100 80GB PCIe": 312e12,
        "NVIDIA L40S": 362e12,
        "NVIDIA L4": 121e12,
        "NVIDIA B200": 2250e12,
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
        "NVIDIA GeForce GTX 1080": None,
        "cpu": None,
    }.items():
        assert flops.peak_flops(types.SimpleNamespace(device_kind=kind)) == peak


def test_encoders_by_hand():
    """Every pair counts, features have no chunk in addition, and only masked tokens are unembedded."""
    blocks = 6 * 12 * 12 * 768**2
    for attention, per_head in (
        (config.preset("softmax", causal=False), 256 * 512),
        (config.lrpe_method("base", causal=False), 4 * 64 * 64),
        (config.lrpe_method("type1", causal=False), 4 * 128 * 64),  # complex features
    ):
        model = dataclasses.replace(_gpt2("softmax"), layers=12, attention=attention)
        found = flops.model_flops_per_token(model, 512, unembedded=0.25)
        assert found == blocks + 6 * 768 * 50_304 // 4 + 3 * 12 * 12 * per_head


def test_images_by_hand():
    """DeiT-small: the embedding of patches of 16 x 16 x 3, and nothing for the classification head."""
    attention = config.lrpe_method("base", causal=False)
    model = config.ModelConfig(patch_size=16, layers=12, width=384, heads=6, attention=attention)
    expected = 6 * 12 * 12 * 384**2 + 6 * 768 * 384 + 3 * 12 * 6 * 4 * 64 * 64
    assert flops.model_flops_per_token(model, 196, unembedded=0) == expected
