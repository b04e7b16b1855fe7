"""Tests of the decoder: its size, its state's size, and that streaming a document changes nothing."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, models

TIME = 30
SEGMENT_IDS = np.array([[0] * 7 + [1] * 6 + [-1] * 3 + [1] * 4 + [0] * 10, [5] * TIME], np.int32)


def small(preset, **changes):
    """Returns a model of one layer, of two where the form is the attention form."""
    layers = 2 if changes.get("form") == "attention" else 1
    attention = config.preset(preset, **{"exact_window": 4, **changes})
    model = config.ModelConfig(
        vocab_size=32, layers=layers, width=16, heads=4, kv_heads=2, dtype="float32", attention=attention
    )
    model = models.DecoderLM(model, rngs=nnx.Rngs(0))
    for block in model.blocks:  # so that attention matters at this size
        for name in ("query", "key", "value", "out"):
            getattr(block.attention, name).kernel[...] *= 20
    return model


@nnx.jit
def run(model, tokens, segment_ids=None):
    return model(tokens, segment_ids=segment_ids)


@nnx.jit
def run_on(model, tokens, segment_ids, state):
    return model(tokens, segment_ids=segment_ids, initial_state=state, return_state=True)


def tokens(batch=2, time=TIME):
    return jax.random.randint(jax.random.key(1), (batch, time), 0, 32)


def parameters(size, preset):
    model = config.ModelConfig(**config.MODEL_SIZES[size], attention=config.preset(preset))
    shapes = nnx.eval_shape(lambda: models.DecoderLM(model, rngs=nnx.Rngs(0)))
    return sum(np.prod(x.shape) for x in jax.tree.leaves(nnx.state(shapes, nnx.Param)))


def test_parameters_as_the_paper_counts_them():
    sympow = parameters("gpt2_124m", "sympow")
    assert round(sympow / 1e6) == 124
    assert parameters("gpt2_124m", "sympow_gated") - sympow == 12 * 12 * 768
    assert parameters("gpt2_124m", "conformal") - sympow == 2 * 12 * 12 * 768
    assert round(100 * 12 * 12 * 768 / sympow, 2) == 0.09
    assert round(100 * 2 * 12 * 12 * 768 / sympow, 2) == 0.18


@pytest.mark.parametrize(("size", "millions"), [("gpt2_335m", 335), ("gpt2_774m", 774), ("gpt2_1558m", 1558)])
def test_parameters_of_the_larger_sizes(size, millions):
    assert abs(parameters(size, "sympow") / 1e6 / millions - 1) < 0.07  # GPT-2's own has learned positions


def gpt2(size="gpt2_124m", **attention):
    return config.ModelConfig(**config.MODEL_SIZES[size], attention=config.AttentionConfig(**attention))


@pytest.mark.parametrize(
    ("feature_map", "power", "expected"),
    [
        ("symmetric", 2, 39e6),
        ("symmetric", 4, 14e9),
        ("symmetric", 6, 2.2e12),
        ("symmetric", 8, 199e12),
        ("tensor", 2, 77e6),
        ("tensor", 4, 314e9),
        ("tensor", 6, 1.3e15),
        ("tensor", 8, 5.3e18),
    ],
)
def test_state_bytes_of_the_papers(feature_map, power, expected):
    """Compares with the tables of "Symmetric Power Transformers", sections 3 and 4, printed to 2 or 3 digits."""
    digits = 3 if expected in (314e9, 199e12) else 2
    assert (
        float(f"{models.state_bytes(gpt2(power=power), feature_map=feature_map):.{digits - 1}e}") == expected
    )


@pytest.mark.parametrize(
    ("size", "numbers"),
    [("gpt2_124m", 589_824), ("gpt2_335m", 1_572_864), ("gpt2_774m", 2_949_120), ("gpt2_1558m", 4_915_200)],
)
def test_state_of_vanilla_linear_attention(size, numbers):
    state = models.state_bytes(gpt2(size, kernel="linear"), bytes_per_element=1, normalizer=False)
    assert state == numbers


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        # Complex features double the number; the normalizer has the features before `rotate`, or those after it.
        ({"core": "unitary"}, 128 * 64 + 64),
        ({"core": "unitary", "normalizer": "rotated"}, 128 * 64 + 128),
        ({"core": "orthogonal", "feature_map": "symmetric"}, 2080 * 64 + 2080),
        ({"kernel": "power", "decay": "channel_learned", "position": "rope"}, 2 * 2080 * 64),
        ({"kernel": "power", "core": "unitary"}, 128 * 129 // 2 * 65),
    ],
)
def test_state_bytes_of_rotated_features_and_per_channel_gates(changes, numbers):
    lrpe = config.LrpeConfig(core=changes.pop("core", "orthogonal"))
    attention = config.preset("linear_lrpe", lrpe=lrpe, **changes)
    model = config.ModelConfig(**config.MODEL_SIZES["gpt2_124m"], attention=attention)
    assert models.state_bytes(model) == 12 * 12 * numbers * 2


def test_state_bytes_requires_a_recurrent_state():
    with pytest.raises(ValueError, match="no recurrent state"):
        models.state_bytes(gpt2(kernel="softmax"))
    with pytest.raises(ValueError, match="one of symmetric, tensor"):
        models.state_bytes(gpt2(), feature_map="cubic")


MEMORIES = {
    "softmax": [{}],
    "softmax_alibi": [{}],
    "gpt2": [{}],
    "linear": [{}],
    "even_power": [{}],
    "sympow": [{"form": "chunked"}],
    "sympow_gated": [{"form": "chunked"}],
    "sympow_learned_rope": [{"form": "chunked"}],
    "conformal": [{"form": "chunked"}, {"form": "attention"}],
}


# Conformal attention has the gates of the one and the positions of the other.
RARE = ("sympow_gated", "sympow_learned_rope")


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        pytest.param(name, changes, marks=pytest.mark.slow if name in RARE else ())
        for name, many in MEMORIES.items()
        for changes in many
    ],
)
def test_streaming_equals_one_call(preset, changes):
    """Documents begin and end inside calls, with padding, calls of one token and calls of many."""
    model = small(preset, **changes)
    whole = run(model, tokens(), SEGMENT_IDS)
    state, parts = model.init_state(2, max_length=TIME), []
    cuts = (0, 1, 15, 16, TIME)  # within documents, within padding, one token and fourteen at a time
    for start, stop in itertools.pairwise(cuts):
        logits, state = run_on(model, tokens()[:, start:stop], SEGMENT_IDS[:, start:stop], state)
        parts.append(logits)
    difference = (jnp.concatenate(parts, axis=1) - whole)[SEGMENT_IDS >= 0]
    assert np.abs(difference).max() < 1e-5 * np.abs(whole).max()
    assert np.std(whole) > 1e-2


@pytest.mark.parametrize(
    ("preset", "changes"),
    [("conformal", {"form": "chunked"}), ("conformal", {"form": "attention"}), ("linear", {}), ("gpt2", {})],
)
def test_tokens_without_ids_continue_the_document_of_the_state(preset, changes):
    model, ids = small(preset, **changes), np.full((2, TIME), 5, np.int32)
    whole = run(model, tokens(), ids)
    state, parts = model.init_state(2, max_length=TIME), []
    # The first two pieces are programs of the test above.
    for (start, stop), given in zip(itertools.pairwise((0, 1, 15, 29, TIME)), (ids, ids, None, None)):
        given = given if given is None else given[:, start:stop]
        logits, state = run_on(model, tokens()[:, start:stop], given, state)
        parts.append(logits)
    parts = jnp.concatenate(parts, axis=1)
    assert np.abs(parts - whole).max() < 1e-5 * np.abs(whole).max()


@pytest.mark.parametrize("preset", ["conformal", "linear", "gpt2"])
def test_a_document_does_not_depend_on_its_place_in_the_row(preset):
    model = small(preset)
    packed = run(model, tokens(), SEGMENT_IDS)
    alone = run(model, tokens()[:1, 20:])
    np.testing.assert_allclose(packed[:1, 20:], alone, atol=1e-5)


def test_logits_do_not_depend_on_later_tokens():
    model = small("conformal")
    changed = tokens().at[:, 20].add(1) % 32
    before, after = run(model, tokens()), run(model, changed)
    np.testing.assert_array_equal(before[:, :20], after[:, :20])
    assert np.abs(before[:, 20:] - after[:, 20:]).max() > 1e-3


def test_hidden_and_unembed_make_the_logits():
    model = small("conformal")
    hidden = nnx.jit(models.DecoderLM.hidden)(model, tokens())
    assert hidden.shape == (2, TIME, 16)
    np.testing.assert_allclose(model.unembed(hidden), run(model, tokens()), atol=1e-6)


def test_bfloat16_logits_are_float32():
    model = config.ModelConfig(vocab_size=32, layers=1, width=16, heads=2, dtype="bfloat16")
    exact = run(models.DecoderLM(dataclasses.replace(model, dtype="float32"), rngs=nnx.Rngs(0)), tokens())
    model = models.DecoderLM(model, rngs=nnx.Rngs(0))
    logits = run(model, tokens())
    assert logits.dtype == jnp.float32
    assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
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
    # A new model's loss is that of guessing: tied output, normalized hidden states.
    logits = run(model, jnp.arange(512)[None])
    assert logits.std() < 0.5


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
        (
            jnp.einsum("btv,vm->btm", cotangent, embedding),
            jnp.einsum("btv,btm->vm", cotangent, hidden),
        ),
    ):
        np.testing.assert_allclose(actual, exact, rtol=1e-5, atol=1e-4)


def test_matrices_in_bfloat16():
    """They give the logits of the same numbers in float32; what takes little memory is not rounded."""
    model = small("conformal")
    model.blocks[0].attention.decay.kernel[...] *= 1 + 1e-3  # not a bfloat16 number
    short = models.cast_weights(model, "bfloat16")
    dtypes = {
        ".".join(map(str, path)): variable[...].dtype.name
        for path, variable in nnx.to_flat_state(nnx.state(short, nnx.Param))
    }
    assert dtypes["embedding"] == dtypes["blocks.0.mlp.up.kernel"] == "bfloat16"
    for name in ("attention.decay.kernel", "attention.rate.kernel", "attention_norm.scale"):
        assert dtypes[f"blocks.0.{name}"] == "float32"
    tokens = np.arange(60).reshape(2, 30) % 32
    expected = run(models.cast_weights(short, "float32"), tokens)
    np.testing.assert_array_equal(run(short, tokens), expected)
    assert (run(model, tokens) != expected).any()


@pytest.mark.parametrize("preset", ["conformal", "linear_lrpe"])
def test_states_in_bfloat16(preset):
    model = small(preset)
    short = models.DecoderLM(dataclasses.replace(model.config, state_dtype=jnp.bfloat16), rngs=0)
    nnx.update(short, nnx.state(model, nnx.Param))
    tokens = np.arange(2 * TIME).reshape(2, TIME) % 32
    _, state = run_on(short, tokens[:, :20], None, short.init_state(2, max_length=1, kv_cache=False))
    sizes = {x.dtype.name for x in jax.tree.leaves(state)}
    assert "bfloat16" in sizes
    for index in range(20, TIME):
        logits, state = run_on(short, tokens[:, index : index + 1], None, state)
        assert logits.dtype == jnp.float32
    assert {x.dtype.name for x in jax.tree.leaves(state)} == sizes
    expected = run(model, tokens)[:, -1]
    difference = np.sqrt(np.mean((logits[:, 0] - expected) ** 2) / np.mean(expected**2))
    assert 1e-5 < difference < 2e-2
