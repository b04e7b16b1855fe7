"""Tests of runs that start from the parameters of another: a decoder of other attention, an encoder of another task."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import config, models, training
from sympow_jax.process import workdir
from sympow_jax.training import restore, sharding
from tests import devices
from tests.training import small


def _decoder(settings: config.Config, preset: str, initial_run=None, **model) -> config.Config:
    attention = config.preset(preset, exact_window=4)
    return small.changed(
        settings, model={"attention": attention, **model}, task=config.TaskConfig(initial_run=initial_run)
    )


def _encoder(task="classification", initial_run=None, dual=False, **model) -> config.Config:
    of = small.encoder(task, vocab_size=256, **model)
    columns = ("text", "other") if dual else ("text",)
    data = {"source": "text"} if task == "masked_token" else {"text_columns": columns}
    return small.changed(of, task={"initial_run": initial_run, "dual_encoder": dual}, data=data)


@pytest.fixture(scope="module")
def first(settings, tmp_path_factory):
    """Makes a run of GPT-2's attention at step 7; returns its workdir and parameters."""
    folder = tmp_path_factory.mktemp("first") / "run"
    settings = _decoder(settings, "gpt2", biases=True)
    params = jax.tree.map(lambda x: x + 1, small.program(settings).init_state().params)
    small.save(folder, settings, training.TrainState(jnp.int32(7), params, ()))
    return str(folder), jax.tree.map(np.array, params)


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """Makes a run of masked tokens at step 7, without updates; returns its workdir and parameters."""
    folder = tmp_path_factory.mktemp("masked") / "run"
    settings = _encoder("masked_token", norm="batch")
    state = small.program(settings).init_state()
    small.save(folder, settings, state)
    return str(folder), jax.tree.map(np.array, state.params)


def test_a_decoder_starts_from_another_with_other_attention(settings, first, capsys):
    folder, params = first
    changed = _decoder(settings, "sympow_gated_paper", folder, biases=True)
    program = small.program(small.changed(changed, optimizer={"ema_decay": 0.9}))
    state, new = restore.begin(program), program.init_state()
    small.assert_same(state.average, state.params)
    printed = capsys.readouterr().out
    assert f"the model is that of step 7 of {folder}, a run of the task 'next_token'\n" in printed
    assert "\nnew: blocks.*.attention.decay.kernel\n" in printed
    assert "\ndropped: position_embedding\n" in printed
    gate = state.params["stacked_blocks"][0]["attention"].pop("decay")
    small.assert_same(gate, new.params["stacked_blocks"][0]["attention"]["decay"])
    kept = {name: tree for name, tree in params.items() if name != "position_embedding"}
    small.assert_same(state.params, kept)
    assert int(state.step) == 0
    assert all(not leaf.any() for leaf in jax.tree.leaves(state.opt_state))


def test_the_beginning_is_placed_as_the_update_takes_it(settings, first):
    with devices.seen(4):
        changed = _decoder(settings, "sympow_gated_paper", first[0], biases=True)
        changed = dataclasses.replace(changed, sharding=config.ShardingConfig(fsdp=2, tensor=2))
        program = training.Program(changed, sharding.make_mesh(changed))
        state = restore.begin(program)
        for (path, leaf), wanted in zip(
            jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(program.shardings), strict=True
        ):
            assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), jax.tree_util.keystr(path)


@pytest.mark.parametrize("dual", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_encoder_starts_from_that_of_another_task(masked, dual):
    folder, params = masked
    program = small.program(_encoder(initial_run=folder, norm="batch", dual=dual))
    state, new = restore.begin(program), program.init_state()
    assert set(state.params) - set(params) == {"head"}
    small.assert_same(state.params, params | {"head": new.params["head"]})
    assert int(state.step) == 0
    assert isinstance(program.model(state), models.DualEncoder if dual else models.Encoder)


@pytest.mark.slow
def test_a_run_starts_from_an_average(tmp_path, settings):
    average = small.changed(settings, optimizer=config.OptimizerConfig(name="adam", ema_decay=0.9))
    state = small.program(average).init_state()
    small.save(
        tmp_path / "first",
        average,
        dataclasses.replace(state, average=jax.tree.map(lambda x: x + 1, state.params)),
    )
    expected = jax.tree.map(np.array, small.arrays(average, tmp_path / "first")[0]["params"])
    assert not np.array_equal(expected["embedding"], state.params["embedding"])
    for options in ({"name": "schedule_free"}, {"name": "adamw", "ema_decay": 0.9}):
        task = config.TaskConfig(initial_run=str(tmp_path / "first"))
        program = small.program(
            small.changed(settings, optimizer=config.OptimizerConfig(**options), task=task)
        )
        begun = restore.begin(program)
        small.assert_same(begun.params, expected)
        # The average of schedule-free is computed from two arrays that are equal.
        found = program.model(begun).embedding[...]
        np.testing.assert_allclose(found, expected["embedding"], rtol=1e-6)
        program.update(begun, small.tokens(settings))


def test_what_does_not_fit(settings, first, masked, tmp_path):
    (decoder, _), (encoder, _) = first, masked
    longer = _decoder(settings, "gpt2", decoder, biases=True)
    attention = dataclasses.replace(longer.model.attention, max_document_length=2048)
    (tmp_path / "new").mkdir()
    workdir.open_workdir(tmp_path / "new", longer)
    for changed, message in (
        (_decoder(settings, "conformal_paper", decoder), "model.biases was True and is False; use the same"),
        (small.changed(longer, model={"attention": attention}), "position_embedding was [1024, 16] and is"),
        (_encoder("masked_token", decoder), "'next_token', whose attention is causal; name a run of an"),
        (_encoder(initial_run=encoder, width=8), "model.head_dim was 8 and is 4, "),
        (_encoder(initial_run=encoder), "model.norm was 'batch' and is 'layer'"),
        (_encoder(initial_run=str(tmp_path / "nowhere")), "nowhere is not the workdir of a run"),
        (_decoder(settings, "gpt2", str(tmp_path / "new"), biases=True), "new has no checkpoint yet"),
    ):
        with pytest.raises(ValueError, match=r"^task\.initial_run: ") as caught:
            restore.begin(small.program(changed))
        assert message in str(caught.value)
