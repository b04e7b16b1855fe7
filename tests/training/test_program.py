"""Tests of the program of a run: its state and its update, which micro-batches and slices of time do not change."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sympow_jax import config, models, tasks
from sympow_jax.config.model import REMATS
from sympow_jax.tasks import loss
from sympow_jax.training import sharding
from tests.training import small


@pytest.fixture(scope="module")
def sgd(settings):
    """Returns the config of an update that subtracts the gradient itself; Adam's first step would hide its size."""
    return small.changed(settings, optimizer={"name": "sgd", "learning_rate": 1.0})


@pytest.fixture(scope="module")
def program(sgd):
    return small.program(sgd)


@pytest.fixture(scope="module")
def params(program):
    """Returns the parameters before the first update, in arrays that no update donates."""
    return jax.tree.map(jnp.copy, program.init_state().params)


@pytest.fixture(scope="module")
def formula(settings, program, params):
    batch = small.tokens(settings)

    def mean_loss(params):
        log_probs = jax.nn.log_softmax(program.merge(params)(batch["inputs"]))
        picked = jnp.take_along_axis(log_probs, jnp.maximum(batch["targets"], 0)[..., None], axis=-1)[..., 0]
        counts = batch["targets"] >= 0
        return -jnp.sum(picked * counts) / jnp.sum(counts)

    return jax.jit(jax.value_and_grad(mean_loss))(models.unstack(params))


def test_loss_gradient_and_norms_of_an_update(settings, program, params, formula):
    batch, (expected, grads) = small.tokens(settings), formula
    donated = program.init_state()
    state, metrics = program.update(donated, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated.params))
    norm = float(optax.tree.norm(grads))
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {
            "loss": float(expected),
            "grad_norm": norm,
            "parameter_norm": float(optax.tree.norm(state.params)),
            "update_norm": norm,
            "learning_rate": 1.0,
        },
        rel=1e-4,
    )
    moved = models.unstack(jax.tree.map(jnp.subtract, params, state.params))
    small.assert_close(moved, grads, rtol=1e-4, atol=1e-6)
    assert int(state.step) == 1
    # A batch without targets moves nothing.
    nothing = batch | {"targets": jnp.full_like(batch["targets"], -1)}
    state, metrics = program.update(program.init_state(), nothing)
    assert metrics["loss"] == 0
    small.assert_same(state.params, params)


def test_frozen_parameters_do_not_count_for_the_norm_of_the_others(sgd):
    factors = {"learning_rate_factors": ("embedding=0",)}
    _, metrics = small.update(small.changed(sgd, optimizer=factors), small.tokens(sgd))
    norm = metrics["grad_norm"]
    assert metrics["update_norm"] == pytest.approx(norm, rel=1e-4)
    _, metrics = small.update(small.changed(sgd, optimizer=factors | {"clip_norm": 0.01}), small.tokens(sgd))
    assert metrics["update_norm"] == pytest.approx(0.01, rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_micro_batches_equal_the_batch(settings, sgd, params, formula):
    state, metrics = small.update(small.changed(sgd, optimizer={"accumulate": 2}), small.tokens(settings))
    assert metrics["loss"] == pytest.approx(float(formula[0]), rel=1e-6)
    moved = models.unstack(jax.tree.map(jnp.subtract, params, state.params))
    small.assert_close(moved, formula[1], rtol=1e-4, atol=1e-6)


def test_gpus_draw_initial_parameters_in_a_kernel(settings, monkeypatch):
    """Otherwise XLA computes them while it compiles for a GPU, for minutes."""
    lowered = []

    def make(*arguments, **options):
        trace = jax.jit(lambda: jax.random.normal(jax.random.key(0), (4,))).trace()
        lowered.append(trace.lower(lowering_platforms=("cuda",)).as_text())
        return real(*arguments, **options)

    program, real = small.program(settings), models.make
    monkeypatch.setattr(models, "make", make)
    program.init_state()
    assert lowered
    assert all("cu_threefry2x32_ffi" in text for text in lowered)
    assert not jax.config.jax_threefry_gpu_kernel_lowering


def test_initial_parameters_do_not_depend_on_flags_of_jax(settings, params):
    with jax.default_prng_impl("rbg"), jax.threefry_partitionable(False):
        small.assert_same(small.program(settings).init_state().params, params)


def test_slices_of_time_do_not_change_the_loss_and_no_array_has_all_logits(
    settings, program, params, formula, monkeypatch
):
    batch = small.tokens(settings)
    count = tasks.count(batch)
    monkeypatch.setattr(loss, "_LOGITS_BYTES", 4 * 4 * 256 * 7)

    def mean_loss(params):
        return program.task.sums(program.merge(params), batch).loss / count

    lowered = jax.jit(jax.value_and_grad(mean_loss)).lower(params)
    found, grads = lowered.compile()(params)
    # Three slices, the last of which is padded.
    assert "4x6x256xf32" in lowered.as_text()
    assert "4x16x256xf32" not in lowered.as_text()
    assert float(found) == pytest.approx(float(formula[0]), rel=1e-6)
    small.assert_close(models.unstack(grads), formula[1])


def test_documents_do_not_see_each_other(settings, program, params):
    batch = small.tokens(settings)
    segments = jnp.asarray(np.repeat([[0, 1]], 8, axis=1).repeat(4, axis=0), jnp.int32)
    model = program.merge(params)
    batch["targets"] = batch["targets"].at[:, :8].set(-1)
    total = jax.jit(lambda rows: program.task.sums(model, rows).loss)
    apart = float(total({**batch, "segment_ids": segments}))
    changed = {**batch, "inputs": batch["inputs"].at[:, :8].add(1)}
    assert float(total({**changed, "segment_ids": segments})) == apart
    assert float(total(batch)) != float(total(changed))


def test_rematerialization_keeps_less_for_the_backward_pass(settings):
    """`full` saves a block's input, `attention` also the output of attention and its denominators.

    Stacked layers with `none` save no more than with `elementwise`: of a feed-forward layer, its hidden values before
    gelu, once.
    """
    layers, batch = 3, {name: jnp.tile(x, (1, 16)) for name, x in small.tokens(settings).items()}
    rows, time = batch["inputs"].shape
    attention = config.preset("conformal_paper", form="chunked", chunk_size=64)
    kept = {}
    for remat in (*REMATS, "stacked"):
        stacked = remat == "stacked"
        changes = {"layers": layers, "attention": attention, "remat": "none" if stacked else remat}
        model = small.changed(settings, model=changes).model
        made = nnx.eval_shape(
            lambda model=model, stacked=stacked: models.DecoderLM(model, rngs=0, stacked=stacked)
        )
        graph, params = nnx.split(made)

        def residuals(params, graph=graph):
            task = tasks.make(settings)
            return jax.vjp(lambda tree: task.sums(nnx.merge(graph, tree), batch).loss, params)[1]

        # Residuals of tokens only: parameters and constants are saved in every mode.
        shapes = jax.tree.leaves(jax.eval_shape(residuals, params))
        leaves = [x for x in shapes if rows in x.shape[:2] and time in x.shape]
        kept[remat] = sum(x.size * x.dtype.itemsize for x in leaves)
        if remat in ("elementwise", "stacked"):
            width, size = 4 * settings.model.width, rows * time * 4 * settings.model.width
            assert sum(x.size for x in shapes if x.shape[-1:] == (width,) and x.size >= size) == layers * size
    heads, head_dim = settings.model.heads, settings.model.head_size
    of_attention = layers * rows * time * heads * (head_dim + 1) * 4
    assert kept["attention"] - kept["full"] == of_attention
    assert kept["none"] > kept["elementwise"] > kept["attention"]
    assert kept["none"] > 3 * kept["attention"]
    assert kept["attention"] < kept["stacked"] <= kept["elementwise"]


@pytest.mark.parametrize("task", ["classification", pytest.param("regression", marks=pytest.mark.slow)])
def test_the_loss_of_labels_is_the_mean_over_those_that_count(task):
    settings, rows = small.encoder(task), small.labeled(task)
    made = small.program(settings)
    params = made.init_state().params
    counts = np.array([0, 1, 3])
    outputs = jax.jit(lambda tokens, ids: made.merge(params).classify(tokens, segment_ids=ids))(
        rows["inputs"], rows["segment_ids"]
    )
    outputs, labels = np.asarray(outputs, np.float64)[counts], rows["labels"][counts]
    metrics = {name: float(x) for name, x in made.heldout_means(params, {}, rows).items()}
    if task == "regression":
        assert metrics == {"loss": pytest.approx(np.mean((outputs[:, 0] - labels) ** 2), rel=1e-5)}
        return
    logs = outputs - np.log(np.exp(outputs).sum(-1, keepdims=True))
    assert metrics["loss"] == pytest.approx(-np.mean(logs[np.arange(3), labels]), rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(np.mean(outputs.argmax(-1) == labels))


def test_running_means_of_the_first_norm_are_the_formula():
    """The first norm's input is the embeddings of tokens. Each micro-batch moves its means by a tenth."""
    accumulate, rows = 2, small.labeled()
    settings = small.encoder(norm="batch", accumulate=accumulate)
    embedding = np.asarray(small.program(settings).init_state().params["embedding"], np.float64)
    state, _ = small.update(settings, rows)
    mean, variance = np.zeros(16), np.ones(16)
    for part in range(accumulate):
        tokens = rows["inputs"][part::accumulate][rows["segment_ids"][part::accumulate] >= 0]
        mean = 0.9 * mean + 0.1 * embedding[tokens].mean(0)
        variance = 0.9 * variance + 0.1 * embedding[tokens].var(0)
    found = state.statistics["embedding_norm"]
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(found["var"], variance, rtol=1e-5)
    assert len(jax.tree.leaves(state.statistics)) == 2 * 4


def test_a_skipped_update_leaves_all_but_the_step():
    """The rate of the learning rate's schedule and the moving average count the updates that were applied."""
    made = config.OptimizerConfig(name="sgd", learning_rate=5e-3, warmup_steps=50, ema_decay=0.25)
    settings = small.changed(small.encoder("regression", norm="batch"), optimizer=made)
    programs = {
        skips: small.program(small.changed(settings, training={"skip_nonfinite": skips}))
        for skips in (False, True)
    }
    rows = small.labeled("regression")
    bad = rows | {"labels": np.array([0.5, np.inf, np.nan, 3.0], np.float32)}
    good, bad = (sharding.place_batch(x, programs[True].mesh) for x in (rows, bad))
    parts = ("params", "opt_state", "statistics", "average")
    state, applied, skipped, in_a_row = programs[True].init_state(), 0, 0, 0
    # Whether updates may be skipped may change; the rate counts those that were applied.
    for skips, batch in [(True, good), (True, bad), (True, bad), (False, good), (True, bad), (True, good)]:
        before = jax.tree.map(np.array, state)
        state, scalars = programs[skips].update(state, batch)
        assert int(state.step) == before.step + 1
        assert float(scalars["learning_rate"]) == pytest.approx(1e-4 * (applied + 1))
        skipped, in_a_row = (skipped + 1, in_a_row + 1) if batch is bad else (skipped, 0)
        assert ("skipped_updates" in scalars) == skips
        if skips:
            assert (float(scalars["skipped_updates"]), float(scalars["skipped_in_a_row"])) == (
                skipped,
                in_a_row,
            )
        if batch is bad:
            assert not np.isfinite(scalars["grad_norm"])
            assert float(scalars["update_norm"]) == 0
            small.assert_same(*([getattr(x, name) for name in parts] for x in (state, before)))
            continue
        applied += 1
        decay = min(0.25, (1 + applied) / (10 + applied))
        expected = jax.tree.map(
            lambda old, new, decay=decay: decay * old + (1 - decay) * np.asarray(new, np.float64),
            before.average,
            state.params,
        )
        small.assert_close(state.average, expected, rtol=1e-5, atol=1e-6)
        assert programs[skips].evaluation_params(state) is state.average
        for name in parts:
            differ = jax.tree.map(
                lambda a, b: (np.asarray(a) != b).any(), getattr(state, name), getattr(before, name)
            )
            assert any(jax.tree.leaves(differ)), name
