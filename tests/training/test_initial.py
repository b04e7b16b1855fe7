"""Tests of a decoder that starts from the parameters of one with another attention."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import config, training
from sympow_jax.process import workdir
from sympow_jax.training import checkpoint, restore, sharding
from tests import devices


def with_attention(settings: config.Config, preset: str, initial_run=None, **model) -> config.Config:
    return dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, attention=config.preset(preset, exact_window=4), **model),
        task=config.TaskConfig(initial_run=initial_run),
    )


def _program(settings: config.Config) -> training.Program:
    return training.Program(settings, sharding.whole_mesh())


@pytest.fixture
def first(settings, tmp_path):
    """Makes a run of GPT-2's attention at step 7; returns its workdir and parameters."""
    settings = with_attention(settings, "gpt2", biases=True)
    params = _program(settings).init_state().params
    params = jax.tree.map(lambda x: x + 1, params)
    folder = tmp_path / "first"
    workdir.open_workdir(folder, settings)
    with checkpoint.Checkpoints(folder, settings) as checkpoints:
        checkpoints.save(7, training.TrainState(jnp.int32(7), params, ()), None)
    return folder, params


def test_a_decoder_starts_from_another_with_other_attention(settings, first, capsys):
    folder, params = first
    program = _program(with_attention(settings, "sympow_gated", str(folder), biases=True))
    state, new = restore.begin(program), program.init_state()
    printed = capsys.readouterr().out
    assert f"the model is that of step 7 of {folder}, a run of the task 'next_token'\n" in printed
    assert "\nnew: blocks.*.attention.decay.kernel\n" in printed
    assert "\ndropped: position_embedding\n" in printed
    gate = state.params["stacked_blocks"][0]["attention"].pop("decay")
    jax.tree.map(np.testing.assert_array_equal, gate, new.params["stacked_blocks"][0]["attention"]["decay"])
    del params["position_embedding"]
    jax.tree.map(np.testing.assert_array_equal, state.params, params)
    assert int(state.step) == 0
    assert all(not leaf.any() for leaf in jax.tree.leaves(state.opt_state))


def test_the_beginning_is_placed_as_the_update_takes_it(settings, first):
    folder, _ = first
    with devices.seen(4):
        changed = with_attention(settings, "sympow_gated", str(folder), biases=True)
        changed = dataclasses.replace(changed, sharding=config.ShardingConfig(fsdp=2, tensor=2))
        program = training.Program(changed, sharding.make_mesh(changed))
        state = restore.begin(program)
        for (path, leaf), wanted in zip(
            jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(program.shardings), strict=True
        ):
            assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), jax.tree_util.keystr(path)


def test_what_does_not_fit(settings, first):
    folder, _ = first
    with pytest.raises(
        ValueError, match=r"model\.biases was True and is False; use the same settings or another"
    ):
        restore.begin(_program(with_attention(settings, "conformal", str(folder))))
    longer = with_attention(settings, "gpt2", str(folder), biases=True)
    attention = dataclasses.replace(longer.model.attention, max_document_length=2048)
    longer = dataclasses.replace(longer, model=dataclasses.replace(longer.model, attention=attention))
    with pytest.raises(
        ValueError, match=r"position_embedding was \[1024, 16\] and is \[2048, 16\]; use the settings"
    ):
        restore.begin(_program(longer))
    encoder = dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, attention=config.preset("softmax", causal=False)),
        task=config.TaskConfig(name="masked_token", initial_run=str(folder)),
    )
    with pytest.raises(
        ValueError,
        match="a run of the task 'next_token', whose attention is causal; name a run of an encoder",
    ):
        restore.begin(_program(encoder))
