"""Tests of models whose layers differ in attention.

`test_families` compares one with the formula, and tests of training with scanned layers and devices have one.
"""

import jax
import numpy as np
import pytest

from sympow_jax import config, generation, models, ops
from sympow_jax.tasks import flops
from tests.generation import small

PATTERN = ("2*conformal_paper", "softmax")
KERNELS = ["power", "power", "softmax", "power", "power"]


def settings(pattern=PATTERN, *, layers=5, **changes):
    own = {"attention": config.preset("conformal_paper")} | changes
    return config.ModelConfig(
        vocab_size=8, layers=layers, width=32, heads=2, attention_pattern=pattern, **own
    )


@pytest.fixture(scope="module")
def model():
    return small.model("conformal_paper", layers=2, attention_pattern=("conformal_paper", "softmax"))


def test_a_pattern_is_repeated_and_cut_off():
    assert [attention.kernel for attention in settings().attentions] == KERNELS
    assert settings().attention_name == "2*conformal_paper,softmax"
    written = config.load("quickstart")
    written = config.override(written, {"model.attention_pattern": "softmax, 1*conformal_paper"})
    assert [x.kernel for x in written.model.attentions] == ["softmax", "power"]


def test_a_preset_replaces_its_own_fields_alone():
    shared = config.AttentionConfig(kernel="linear", power=4, qk_norm=True, rope=config.RopeConfig(base=1e4))
    found = settings(("sympow", "llama3", "gpt2"), attention=shared).attentions
    assert found[0] == config.preset("sympow", power=4, qk_norm=True, rope=shared.rope)
    assert found[1] == config.preset("llama3", power=4, qk_norm=True)
    assert found[2] == config.preset("gpt2", power=4, qk_norm=True, rope=shared.rope)


def test_the_period_divides_the_layers():
    for pattern, layers, period in (
        (("softmax",), 6, 1),
        (("softmax", "2*softmax"), 6, 1),
        (PATTERN, 6, 3),
        (PATTERN, 5, 5),
    ):
        assert settings(pattern, layers=layers).attention_period == period


def test_mistakes_in_patterns():
    for pattern, message in (
        (("conformol",), r"model.attention_pattern is 'conformol'.*did you mean conformal"),
        (("0*softmax",), r"has '0\*softmax'; before `\*` is the number of layers, from 1 to 5"),
        (("a*softmax",), r"has 'a\*softmax'; before"),
        (("1" * 5000 + "*softmax",), r"from 1 to 5"),
        (("4*softmax", "2*sympow"), r"has 6 layers and the model 5; shorten the pattern"),
        (("linear", "gpt2"), r"'learned_absolute' up to 1024 and 'sinusoidal'.*only one"),
        ("softmax", r"model.attention_pattern is 'softmax', a str; it must be a tuple.* write \('softmax'"),
    ):
        with pytest.raises(ValueError, match=message):
            settings(pattern)
    with pytest.raises(ValueError, match=r"in layers of preset 'softmax': attention.implementation is"):
        settings(attention=config.AttentionConfig(implementation="mosaic_gpu"))


def test_positions_that_one_layer_adds_are_added_once():
    """Learned positions are those of the layer whose attention has them, and limit documents."""
    shared = config.AttentionConfig(max_document_length=64)
    hybrid = settings(("sympow", "linear"), layers=2, attention=shared)
    assert hybrid.longest_document is None
    assert models.DecoderLM(hybrid, rngs=0).init_state(2, max_length=4).position is not None
    learned = models.DecoderLM(settings(("sympow", "gpt2"), layers=2, attention=shared), rngs=0)
    assert learned.config.longest_document == 1024
    assert learned.position_embedding.shape == (1024, 32)


def test_each_layer_has_its_own_kind_of_state(model):
    program = generation.Program(model)

    def cached(state):
        return [isinstance(layer.memory, ops.KVCache) for layer in state.layers]

    state = program.init_state(2, max_length=1000)
    assert cached(state) == [False, True]
    assert state.layers[1].memory.capacity == 1000
    short = program.init_state(2, max_length=10)
    assert cached(short) == [True, True]
    assert cached(program.fold(short)) == [False, True]
    with pytest.raises(ValueError, match=r"attention of kernel 'softmax' uses a KV cache.*pass max_length"):
        program.init_state(2)
    with pytest.raises(ValueError, match="kv_cache is False, which this attention of kernel 'softmax'"):
        model.init_state(2, max_length=4, kv_cache=False)


def test_ragged_prompts_and_rows_and_files_of_their_states(model, tmp_path):
    """Continuations are those of whole calls; with 60 tokens, power attention begins with a recurrent state."""
    program, prompts, lengths = generation.Program(model), small.tokens(3, 40), np.array([40, 7, 20])
    logits, state = program.prefill(prompts, lengths, max_length=60)
    first, rows = state, np.pad(prompts, [(0, 0), (0, 20)])
    for step in range(8):
        token = np.argmax(logits, axis=-1).astype(np.int32)
        rows[np.arange(3), lengths + step] = token
        expected = np.asarray(small.whole(model, rows))[np.arange(3), lengths + step]
        logits, state = program.decode(state, token)
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    assert np.std(expected) > 0.1
    generation.save_state(tmp_path / "state", model, first)
    jax.tree.map(np.testing.assert_array_equal, generation.restore_state(tmp_path / "state", model), first)
    token = np.array([1, 2, 3], np.int32)
    moved = generation.insert(generation.fork(first, 2), 1, generation.take(first, 2))
    jax.tree.map(np.testing.assert_array_equal, generation.take(moved, 1), generation.take(moved, 4))
    windowed = small.model("softmax", layers=2, attention_pattern=("softmax", "sliding_window"), window=8)
    folded = windowed.fold(windowed.init_state(2, max_length=4))  # caches of 4 and 7 tokens
    generation.save_state(tmp_path / "folded", windowed, folded)
    jax.tree.map(
        np.testing.assert_array_equal, generation.restore_state(tmp_path / "folded", windowed), folded
    )
    other = small.model("conformal_paper", layers=2, attention_pattern=("softmax", "conformal_paper"))
    with pytest.raises(ValueError, match="the state has a PowerState"):
        generation.Program(other).decode(first, token)
    with pytest.raises(ValueError, match="state of another model: attention_pattern is"):
        generation.restore_state(tmp_path / "state", other)


def test_flops_and_states_are_those_of_the_layers():
    def counted(**changes):
        return flops.model_flops_per_token(settings(**changes), 4096)

    both = counted(pattern=("conformal_paper", "softmax"), layers=2)
    alone = [counted(pattern=(name,), layers=2) for name in ("conformal_paper", "softmax")]
    assert both == pytest.approx(sum(alone) / 2)
    assert alone[0] != alone[1]
    powers = models.state_bytes(settings(("sympow", "linear"), layers=2))
    each = [models.state_bytes(settings((name,), layers=1)) for name in ("sympow", "linear")]
    assert powers == sum(each)
    with pytest.raises(ValueError, match="kernel 'softmax' has no recurrent state"):
        models.state_bytes(settings())
