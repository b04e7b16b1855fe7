"""Tests of the program of a run: its state and its update, which micro-batches and slices of time do not change."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sympow_jax import config, models, tasks, training
from sympow_jax.config.model import REMATS
from sympow_jax.tasks import loss
from sympow_jax.training import sharding


def _batch(settings: config.Config, *, seed: int = 0) -> dict[str, jnp.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (settings.data.batch_size, settings.data.context_length)
    targets = rng.integers(0, 256, shape).astype(np.int32)
    # Rows with different numbers of targets, so that a mean of means would differ from the mean.
    for row in range(len(targets)):
        targets[row, : 4 * row] = -1
    return {"inputs": jnp.asarray(rng.integers(0, 256, shape), jnp.int32), "targets": jnp.asarray(targets)}


def _program(settings: config.Config) -> training.Program:
    return training.Program(settings, sharding.whole_mesh())


def _update(settings: config.Config, batch) -> tuple[training.TrainState, dict[str, float]]:
    program = training.Program(settings, sharding.make_mesh(settings))
    state, metrics = program.update(program.init_state(), batch)
    return state, {name: float(value) for name, value in metrics.items()}


def _mean_loss(settings: config.Config, params, batch) -> jnp.ndarray:
    log_probs = jax.nn.log_softmax(_program(settings).merge(params)(batch["inputs"]))
    picked = jnp.take_along_axis(log_probs, jnp.maximum(batch["targets"], 0)[..., None], axis=-1)[..., 0]
    counts = batch["targets"] >= 0
    return -jnp.sum(picked * counts) / jnp.sum(counts)


def test_loss_and_gradient_of_the_mean_over_targets(settings):
    batch = _batch(settings)
    params = _program(settings).init_state().params
    loss, grads = jax.jit(jax.value_and_grad(lambda tree: _mean_loss(settings, tree, batch)))(params)
    state, metrics = _update(settings, batch)
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-4)
    assert metrics["learning_rate"] == pytest.approx(1e-2)
    assert metrics["parameter_norm"] == pytest.approx(float(optax.tree.norm(state.params)), rel=1e-5)
    assert int(state.step) == 1


def test_gpus_draw_initial_parameters_in_a_kernel(settings, monkeypatch):
    """Otherwise XLA computes them while it compiles for a GPU, for minutes."""
    lowered = []

    def make(*arguments, **options):
        trace = jax.jit(lambda: jax.random.normal(jax.random.key(0), (4,))).trace()
        lowered.append(trace.lower(lowering_platforms=("cuda",)).as_text())
        return real(*arguments, **options)

    program, real = _program(settings), models.make
    monkeypatch.setattr(models, "make", make)
    program.init_state()
    assert lowered
    assert all("cu_threefry2x32_ffi" in text for text in lowered)
    assert not jax.config.jax_threefry_gpu_kernel_lowering


def test_initial_parameters_do_not_depend_on_flags_of_jax(settings):
    expected = _program(settings).init_state().params
    with jax.default_prng_impl("rbg"), jax.threefry_partitionable(False):
        found = _program(settings).init_state().params
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_update_norm_is_of_what_was_added(settings):
    batch = _batch(settings)
    before = _program(settings).init_state().params
    state, metrics = _update(settings, batch)
    moved = optax.tree.norm(jax.tree.map(jnp.subtract, state.params, before))
    assert metrics["update_norm"] == pytest.approx(float(moved), rel=1e-4)


def test_micro_batches_equal_the_batch(settings):
    # SGD moves by the gradient itself; Adam's first step would hide its size.
    settings = dataclasses.replace(settings, optimizer=config.OptimizerConfig(name="sgd", learning_rate=1.0))
    batch = _batch(settings)
    whole, expected = _update(settings, batch)
    divided = dataclasses.replace(settings, optimizer=dataclasses.replace(settings.optimizer, accumulate=2))
    state, metrics = _update(divided, batch)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, whole.params)


@pytest.mark.parametrize("width", [1, 5])
def test_slices_of_time_do_not_change_the_loss(settings, monkeypatch, width):
    batch = _batch(settings)
    program = _program(settings)
    params = program.init_state().params

    def total(tree):
        return program.task.sums(program.merge(tree), batch).loss

    expected = jax.jit(jax.value_and_grad(total))(params)
    monkeypatch.setattr(loss, "_LOGITS_BYTES", 4 * 4 * 256 * width)
    actual = jax.jit(jax.value_and_grad(lambda tree: total(tree)))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), actual, expected)


def test_no_array_of_all_logits_exists(settings, monkeypatch):
    batch = _batch(settings)
    program = _program(settings)
    params = program.init_state().params
    monkeypatch.setattr(loss, "_LOGITS_BYTES", 4 * 4 * 256 * 2)
    differentiate = jax.grad(lambda tree: program.task.sums(program.merge(tree), batch).loss)
    lowered = jax.jit(differentiate).lower(params).as_text()
    assert "4x2x256xf32" in lowered
    assert "4x16x256xf32" not in lowered


def test_documents_do_not_see_each_other(settings):
    batch = _batch(settings)
    segments = jnp.asarray(np.repeat([[0, 1]], 8, axis=1).repeat(4, axis=0), jnp.int32)
    program = _program(settings)
    model = program.merge(program.init_state().params)
    batch["targets"] = batch["targets"].at[:, :8].set(-1)
    total = jax.jit(lambda rows: program.task.sums(model, rows).loss)
    apart = float(total({**batch, "segment_ids": segments}))
    changed = {**batch, "inputs": batch["inputs"].at[:, :8].add(1)}
    assert float(total({**changed, "segment_ids": segments})) == apart
    assert float(total(batch)) != float(total(changed))


def test_the_state_is_donated(settings):
    program = _program(settings)
    state = program.init_state()
    program.update(state, _batch(settings))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


def test_abstract_state_is_that_of_the_state(settings):
    program = _program(settings)
    state, abstract = program.init_state(), program.abstract
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    for leaf, shape in zip(jax.tree.leaves(state), jax.tree.leaves(abstract)):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (shape.shape, shape.dtype, shape.sharding)


def test_a_batch_without_targets_moves_nothing(settings):
    batch = _batch(settings)
    batch["targets"] = jnp.full_like(batch["targets"], -1)
    before = _program(settings).init_state().params
    state, metrics = _update(settings, batch)
    assert metrics["loss"] == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, before)


def test_rematerialization_keeps_less_for_the_backward_pass(settings):
    """`full` saves a block's input, `attention` also the output of attention and its denominators.

    Stacked layers with `none` save no more than with `elementwise`.
    """
    layers, batch = 3, {name: jnp.tile(x, (1, 16)) for name, x in _batch(settings).items()}
    rows, time = batch["inputs"].shape
    kept = {}
    for remat in (*REMATS, "stacked"):
        attention = config.preset("conformal", form="chunked", chunk_size=64)
        model = dataclasses.replace(settings.model, layers=layers, attention=attention)
        stacked = remat == "stacked"
        model = dataclasses.replace(model, remat="none" if stacked else remat)
        made = nnx.eval_shape(
            lambda model=model, stacked=stacked: models.DecoderLM(model, rngs=0, stacked=stacked)
        )
        graph, params = nnx.split(made)

        def residuals(params, graph=graph):
            return jax.vjp(
                lambda tree: tasks.make(settings).sums(nnx.merge(graph, tree), batch).loss, params
            )[1]

        # Residuals of tokens only: parameters and constants are saved in every mode.
        shapes = jax.tree.leaves(jax.eval_shape(residuals, params))
        leaves = [x for x in shapes if rows in x.shape[:2] and time in x.shape]
        kept[remat] = sum(x.size * x.dtype.itemsize for x in leaves)
    heads, head_dim = settings.model.heads, settings.model.head_size
    of_attention = layers * rows * time * heads * (head_dim + 1) * 4
    assert kept["attention"] - kept["full"] == of_attention
    assert kept["none"] > kept["elementwise"] > kept["attention"]
    assert kept["none"] > 3 * kept["attention"]
    assert kept["attention"] < kept["stacked"] <= kept["elementwise"]
