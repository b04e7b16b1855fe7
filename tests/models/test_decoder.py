"""Tests of the decoder: its size, its state's size, and that streaming a document changes nothing."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, models
from tests import marked

TIME = 30
TOKENS = np.random.default_rng(1).integers(0, 32, (2, TIME)).astype(np.int32)
SEGMENT_IDS = np.array([[0] * 7 + [1] * 8 + [-1] * 3 + [1] * 2 + [0] * 10, [5] * TIME], np.int32)


@functools.cache
def small(preset=None, *, scale=20, **changes):
    """Returns a model in which attention matters; by default of two layers, with a state of powers and a linear one."""
    options = {"exact_window": 4, "form": "chunked"} if preset is None else changes
    sizes = {"vocab_size": 32, "layers": 1 if preset else 2, "width": 16, "heads": 4, "kv_heads": 2}
    kinds = {"attention": config.preset(preset or "conformal_paper", **options)}
    kinds["attention_pattern"] = () if preset else ("conformal_paper", "linear")
    model = models.DecoderLM(config.ModelConfig(**sizes, **kinds, dtype="float32"), rngs=nnx.Rngs(0))
    for block in model.blocks:
        for name in ("query", "key", "value", "out"):
            getattr(block.attention, name).kernel[...] *= scale
    return model


@nnx.jit
def run(model, tokens, segment_ids):
    return model(tokens, segment_ids=segment_ids)


@nnx.jit
def run_on(model, tokens, segment_ids, state):
    return model.extend(tokens, state, segment_ids=segment_ids)


def gpt2(size="gpt2_124m", **attention):
    return config.ModelConfig(**config.MODEL_SIZES[size], attention=config.AttentionConfig(**attention))


def test_state_bytes_of_the_papers():
    """Compares with the tables of "Symmetric Power Transformers", sections 3 and 4, printed to 2 or 3 digits."""
    for power, printed in ((2, "3.9e+07"), (4, "1.4e+10"), (6, "2.2e+12"), (8, "1.99e+14")):
        assert f"{models.state_bytes(gpt2(power=power)):.{len(printed) - 6}e}" == printed
    for size, elements in (
        ("gpt2_124m", 589_824),
        ("gpt2_335m", 1_572_864),
        ("gpt2_774m", 2_949_120),
        ("gpt2_1558m", 4_915_200),
    ):
        state = models.state_bytes(gpt2(size, kernel="linear"), bytes_per_element=1)
        # The paper has no normalizer, which is one element for each 64 of the state.
        assert 64 * state == 65 * elements


def test_state_bytes_of_rotated_features_and_per_channel_gates():
    for changes, elements in (
        # Complex features double the number; the normalizer has the features before `rotate`, or those after it.
        ({"core": "unitary"}, 128 * 64 + 64),
        ({"core": "unitary", "normalizer": "rotated"}, 128 * 64 + 128),
        ({"core": "orthogonal", "feature_map": "symmetric"}, 2080 * 64 + 2080),
        ({"kernel": "power", "decay": "channel_learned", "position": "rope"}, 2 * 2080 * 64),
        ({"kernel": "power", "core": "unitary"}, 128 * 129 // 2 * 65),
    ):
        lrpe = config.LrpeConfig(core=changes.pop("core", "orthogonal"))
        attention = config.preset("linear_lrpe", lrpe=lrpe, **changes)
        model = config.ModelConfig(**config.MODEL_SIZES["gpt2_124m"], attention=attention)
        assert models.state_bytes(model) == 12 * 12 * elements * 2, changes
    with pytest.raises(ValueError, match="no recurrent state"):
        models.state_bytes(gpt2(kernel="softmax"))


@marked.cases(
    "preset",
    [None, "gpt2"],
    slow=[
        "softmax",
        "softmax_alibi",
        "even_power",
        "sympow",
        "sympow_gated",
        "sympow_gated_window",
        "conformal",
    ],
)
def test_streaming_equals_one_call(preset):
    """Documents begin and end inside calls, with padding; without ids, a call continues the state's document."""
    model = small(preset)
    whole = run(model, TOKENS, SEGMENT_IDS)
    state, parts = model.init_state(2, max_length=TIME), []
    # Two programs; cuts are within documents and before padding.
    for start, stop in itertools.pairwise((0, 14, 15, 29, TIME)):
        ids = SEGMENT_IDS[:, start:stop] if stop - start > 1 else None
        logits, state = run_on(model, TOKENS[:, start:stop], ids, state)
        parts.append(logits)
    difference = (np.concatenate(parts, axis=1) - whole)[SEGMENT_IDS >= 0]
    assert np.abs(difference).max() < 1e-5 * np.abs(whole).max()
    assert np.std(whole) > 1e-2
    # The last document of the first row, at its beginning.
    rolled = run(model, *(np.roll(x, 10, axis=1) for x in (TOKENS, SEGMENT_IDS)))
    np.testing.assert_allclose(rolled[0, :10], whole[0, 20:], atol=1e-5)


def test_logits_do_not_depend_on_later_tokens_and_are_those_of_hidden_states():
    model, ids = small(), np.zeros((2, TIME), np.int32)
    changed = (TOKENS + (np.arange(TIME) == 20)) % 32
    before, after = (np.asarray(run(model, x, ids)) for x in (TOKENS, changed))
    np.testing.assert_array_equal(before[:, :20], after[:, :20])
    assert np.abs(before[:, 20:] - after[:, 20:]).max() > 1e-3

    @nnx.jit
    def in_parts(model, tokens):
        hidden = model.hidden(tokens)
        assert hidden.shape == (2, TIME, 16)
        return model.unembed(hidden)

    np.testing.assert_allclose(in_parts(model, TOKENS), before, atol=1e-6)


def test_logits_of_a_new_model():
    """They are those of guessing, since hidden states are normalized, and float32 if the model is bfloat16."""
    exact = small(scale=1)
    short = models.DecoderLM(dataclasses.replace(exact.config, dtype="bfloat16"), rngs=nnx.Rngs(0))
    exact, logits = (np.asarray(run(model, TOKENS, SEGMENT_IDS)) for model in (exact, short))
    assert exact.std() < 0.5 * np.sqrt(16 / 128)
    assert logits.dtype == np.float32
    assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(nnx.state(short, nnx.Param)))
    assert np.sqrt(((logits - exact) ** 2).mean() / (exact**2).mean()) < 2e-2


def test_initial_scales_are_those_of_gpt2():
    model = models.DecoderLM(
        config.ModelConfig(vocab_size=512, layers=2, width=128, heads=4), rngs=nnx.Rngs(0)
    )
    block = model.blocks[1]
    for kernel, expected in [
        (model.embedding[...], 0.02),
        (block.attention.query.kernel[...], 0.02),
        (block.attention.out.kernel[...], 0.02 / 2),
        (block.mlp.down.kernel[...], 0.02 / 2),
    ]:
        assert abs(kernel.std() / expected - 1) < 0.05


def test_logits_multiply_in_the_models_dtype_in_both_passes():
    """A float32 product in the backward pass would take a GPU twice as long."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, embedding = jax.random.normal(keys[0], (2, 48, 32)), jax.random.normal(keys[1], (96, 32))
    cotangent = jax.random.normal(keys[2], (2, 48, 96))

    def gradients(dtype):
        return jax.vjp(lambda *arrays: models.logits(*arrays, dtype), hidden, embedding)[1](cotangent)

    jaxpr = jax.make_jaxpr(lambda: gradients(jnp.bfloat16))().jaxpr
    products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert len(products) == 2  # the forward one was evaluated
    assert {x.aval.dtype.name for eqn in products for x in eqn.invars} == {"bfloat16"}
    for actual, exact in zip(gradients(jnp.bfloat16), gradients(jnp.float32)):
        assert actual.dtype == jnp.float32
        assert float(jnp.linalg.norm(actual - exact) / jnp.linalg.norm(exact)) < 4e-3
    for actual, exact in zip(
        gradients(jnp.float32),
        (jnp.einsum("btv,vm->btm", cotangent, embedding), jnp.einsum("btv,btm->vm", cotangent, hidden)),
    ):
        np.testing.assert_allclose(actual, exact, rtol=1e-5, atol=1e-4)


def test_matrices_in_bfloat16():
    """They give the logits of the same numbers in float32; what takes little memory is not rounded."""
    model = nnx.clone(small())
    model.blocks[0].attention.decay.kernel[...] *= 1 + 1e-3  # not a bfloat16 number
    short = models.cast_weights(model, "bfloat16")
    dtypes = {
        ".".join(map(str, path)): variable[...].dtype.name
        for path, variable in nnx.to_flat_state(nnx.state(short, nnx.Param))
    }
    assert dtypes["embedding"] == dtypes["blocks.0.mlp.up.kernel"] == "bfloat16"
    for name in ("attention.decay.kernel", "attention.rate.kernel", "attention_norm.scale"):
        assert dtypes[f"blocks.0.{name}"] == "float32"
    expected = run(models.cast_weights(short, "float32"), TOKENS, SEGMENT_IDS)
    np.testing.assert_array_equal(run(short, TOKENS, SEGMENT_IDS), expected)
    assert (run(model, TOKENS, SEGMENT_IDS) != expected).any()


def test_states_in_bfloat16():
    model = small()
    short = models.DecoderLM(dataclasses.replace(model.config, state_dtype=jnp.bfloat16), rngs=0)
    nnx.update(short, nnx.state(model, nnx.Param))
    ids = np.zeros((2, TIME), np.int32)
    state = short.init_state(2, max_length=1, kv_cache=False)
    _, state = run_on(short, TOKENS[:, :20], ids[:, :20], state)
    sizes = {x.dtype.name for x in jax.tree.leaves(state)}
    for layer in state.layers:
        assert "bfloat16" in {x.dtype.name for x in jax.tree.leaves(layer.memory)}
    for index in range(20, TIME):
        logits, state = run_on(short, TOKENS[:, index : index + 1], None, state)
        assert logits.dtype == jnp.float32
    assert {x.dtype.name for x in jax.tree.leaves(state)} == sizes
    expected = run(model, TOKENS, ids)[:, -1]
    difference = np.sqrt(np.mean((logits[:, 0] - expected) ** 2) / np.mean(expected**2))
    assert 1e-5 < difference < 2e-2
