"""Tests of stacked layers: an update that loops over them is the update that runs them one after another."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, loop, models, training
from sympow_jax.process import workdir
from sympow_jax.training import checkpoint, optimizer, restore, sharding
from tests.training import test_tasks

LAYERS = 3


def _deep(
    settings: config.Config, *, scan_layers: bool | None, layers: int = LAYERS, **model
) -> config.Config:
    model = {"attention": config.preset("sympow_gated", exact_window=4), "layers": layers, **model}
    return dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, **model),
        # Weights decay so much that decaying norms too would show.
        optimizer=config.OptimizerConfig(name="adamw", learning_rate=1e-2, weight_decay=1.0),
        training=dataclasses.replace(settings.training, scan_layers=scan_layers),
    )


def _program(settings: config.Config) -> training.Program:
    return training.Program(settings, sharding.whole_mesh())


def _rows(settings: config.Config) -> dict[str, jax.Array]:
    shape = (settings.data.batch_size, settings.data.context_length)
    tokens = jax.random.randint(jax.random.key(0), shape, 0, 256)
    return {"inputs": tokens, "targets": jnp.roll(tokens, -1, axis=1)}


def _two_updates(settings: config.Config, rows) -> tuple[training.TrainState, dict, float]:
    """Returns the state, the last metrics, and the held-out loss."""
    program = _program(settings)
    state = program.init_state()
    for _ in range(2):
        state, metrics = program.update(state, rows)
    return (
        state,
        metrics,
        program.heldout_means(state.params, state.statistics, rows)["loss"],
    )


def _assert_close(found, expected) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def test_forms_of_parameters():
    """Blocks of a period differ, and each is stacked with the blocks at its place in other periods."""
    blocks = {layer: {"decay" if layer % 3 else "bias": np.full(2, layer)} for layer in range(12)}
    stacked = models.stack({"embedding": np.ones(4), "blocks": blocks}, 3)
    assert [list(block) for block in stacked["stacked_blocks"].values()] == [["bias"], ["decay"], ["decay"]]
    np.testing.assert_array_equal(stacked["stacked_blocks"][2]["decay"][:, 0], [2, 5, 8, 11])
    names = models.parameter_names(stacked)
    assert names["stacked_blocks"][2]["decay"].tolist() == [f"blocks.{n}.decay" for n in (2, 5, 8, 11)]
    assert names["embedding"] == "embedding"
    back = models.unstack(stacked)["blocks"]
    assert sorted(back) == list(range(12))
    jax.tree.map(np.testing.assert_array_equal, back, blocks)


HYBRID = {"layers": 4, "attention_pattern": ("sympow_gated", "softmax")}


@pytest.mark.parametrize(
    ("remat", "model"),
    [
        pytest.param("none", {}, marks=pytest.mark.slow),
        pytest.param("attention", {}, marks=pytest.mark.slow),
        ("none", HYBRID),
    ],
    ids=["none", "attention", "hybrid"],
)
def test_an_update_is_that_of_layers_one_after_another(settings, remat, model):
    expected, expected_metrics, expected_loss = _two_updates(
        _deep(settings, scan_layers=False, **model), _rows(settings)
    )
    found, metrics, heldout_loss = _two_updates(
        _deep(settings, scan_layers=True, remat=remat, **model), _rows(settings)
    )
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    _assert_close(found, expected)
    _assert_close((metrics, heldout_loss), (expected_metrics, expected_loss))


def test_learning_rate_factors_are_those_of_each_layer(settings):
    factors = ("blocks.1.*=0", "blocks.*.attention.decay.kernel=0.5", "embedding=0.25")
    params = []
    for scan_layers in (False, True):
        deep = _deep(settings, scan_layers=scan_layers)
        optimizer = dataclasses.replace(deep.optimizer, learning_rate_factors=factors)
        state, _, _ = _two_updates(dataclasses.replace(deep, optimizer=optimizer), _rows(settings))
        params.append(models.unstack(state.params))
    _assert_close(params[1], params[0])
    begun = models.unstack(_program(deep).init_state().params)
    jax.tree.map(np.testing.assert_array_equal, params[1]["blocks"][1], begun["blocks"][1])
    plain, _, _ = _two_updates(deep, _rows(settings))
    kernel, other = (
        tree["blocks"][0]["attention"]["decay"]["kernel"]
        for tree in (params[1], models.unstack(plain.params))
    )
    assert not np.array_equal(kernel, other)


def test_running_means_are_those_of_layers_one_after_another():
    settings = test_tasks.make(norm="batch", layers=2, accumulate=2)
    states = []
    for scan_layers in (False, True):
        changed = dataclasses.replace(settings, training=config.TrainingConfig(scan_layers=scan_layers))
        program = _program(changed)
        state, _ = program.update(
            program.init_state(), sharding.place_batch(test_tasks.batch(), program.mesh)
        )
        states.append(state)
    _assert_close(states[1].statistics, states[0].statistics)
    _assert_close(states[1].params, states[0].params)


@pytest.mark.parametrize("changes", [{}, HYBRID], ids=["equal layers", "hybrid"])
def test_initial_parameters_are_those_of_the_model(settings, changes):
    for scan_layers in (False, True):
        deep = _deep(settings, scan_layers=scan_layers, **changes)
        program = _program(deep)
        params = models.unstack(program.init_state().params)
        model = models.make(deep.model, deep.task, rngs=deep.training.seed)
        expected = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_a_deeper_model_has_no_larger_program(settings):
    sizes = []
    for layers in (4, 48):
        program = _program(_deep(settings, scan_layers=None if layers == 48 else True, layers=layers))
        sizes.append(len(str(program.update.trace(program.abstract, _rows(settings)).jaxpr)))
    assert sizes[1] < 1.02 * sizes[0]


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "schedule_free"])
def test_abstract_states_are_those_of_the_states(settings, name, monkeypatch):
    monkeypatch.setattr(optimizer, "FACTORED_SIZE", 16)
    deep = _deep(settings, scan_layers=True)
    average = {"ema_decay": 0.9} if name == "adamw" else {}
    changed = config.OptimizerConfig(name=name, **average)
    program = _program(dataclasses.replace(deep, optimizer=changed))
    state = program.init_state()
    assert jax.tree.structure(state) == jax.tree.structure(program.abstract)
    for leaf, shape in zip(jax.tree.leaves(state), jax.tree.leaves(program.abstract)):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (shape.shape, shape.dtype, shape.sharding)


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, marks=pytest.mark.slow), HYBRID],
    ids=["equal layers", "hybrid"],
)
def test_a_run_resumes_to_the_bit_and_with_the_other_choice(tmp_path, settings, changes):
    deep = _deep(settings, scan_layers=True, **changes)
    assert loop.train(deep, tmp_path / "whole") == 0
    half = dataclasses.replace(deep, training=dataclasses.replace(deep.training, steps=4))
    assert loop.train(half, tmp_path / "halves") == 0
    shutil.copytree(tmp_path / "halves", tmp_path / "other")
    assert loop.train(deep, tmp_path / "halves") == 0
    program = _program(deep)
    whole, halves = (
        restore.restore_arrays(program, tmp_path / name)[0]["params"] for name in ("whole", "halves")
    )
    jax.tree.map(np.testing.assert_array_equal, halves, whole)
    # The rest of the run with the other choice, which a checkpoint does not depend on.
    other = _deep(settings, scan_layers=False, **changes)
    assert loop.train(other, tmp_path / "other") == 0
    _assert_close(restore.restore_arrays(program, tmp_path / "other")[0]["params"], whole)


def test_imported_weights_begin_with_a_new_optimizer_state(tmp_path, settings):
    deep = _deep(settings, scan_layers=True)
    program = _program(deep)
    params = jax.tree.map(lambda x: x + 1, program.init_state().params)
    workdir.open_workdir(tmp_path / "run", deep)
    with checkpoint.Checkpoints(tmp_path / "run", deep) as checkpoints:
        checkpoints.save(0, training.TrainState(jnp.int32(0), params, ()), None)
    with checkpoint.Checkpoints(tmp_path / "run", deep) as checkpoints:
        state, position = restore.restore_or_begin(program, checkpoints)
    assert position is None
    jax.tree.map(np.testing.assert_array_equal, state.params, params)
    assert jax.tree.structure(state) == jax.tree.structure(program.abstract)


def test_elementwise_values_are_not_kept():
    """A feed-forward layer keeps its hidden values before gelu, once, and nothing of gelu."""
    model = config.ModelConfig(
        vocab_size=8, layers=2, width=16, heads=2, dtype="float32", remat="elementwise"
    )
    for stacked in (False, True):
        made = nnx.eval_shape(lambda stacked=stacked: models.DecoderLM(model, rngs=0, stacked=stacked))
        graph, params = nnx.split(made)

        def residuals(params, graph=graph):
            return jax.vjp(lambda tree: nnx.merge(graph, tree)(jnp.zeros((3, 40), jnp.int32)), params)[1]

        kept = jax.tree.leaves(jax.eval_shape(residuals, params))
        hidden = [x.size for x in kept if x.shape[-2:] == (3 * 40, 64)]
        assert sum(hidden) == 2 * 3 * 40 * 64
