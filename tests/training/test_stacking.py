"""Tests of stacked layers: an update that loops over them is the update that runs them one after another."""

import jax
import numpy as np
from flax import nnx

from sympow_jax import config, models
from sympow_jax.training import optimizer
from tests import marked
from tests.training import small

HYBRID = {
    **{"layers": 4, "attention_pattern": ("sliding_window", "softmax")},
    "attention": config.preset("sliding_window", window=4),
}


def _deep(settings: config.Config, *, scan_layers: bool | None, **model) -> config.Config:
    model = {"attention": config.preset("sympow_gated_paper", exact_window=4), "layers": 3, **model}
    # Weights decay so much that decaying norms too would show.
    made = config.OptimizerConfig(name="adamw", learning_rate=1e-2, weight_decay=1.0)
    return small.changed(settings, model=model, optimizer=made, training={"scan_layers": scan_layers})


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
    small.assert_same(back, blocks)


@marked.cases(("remat", "model"), [("none", HYBRID)], slow=[("none", {}), ("attention", {})])
def test_an_update_is_that_of_layers_one_after_another(settings, remat, model):
    """Factors of the learning rate are those of each layer, also of one that is stacked with others."""
    rows, found = small.tokens(settings), []
    factors = ("blocks.1.*=0", "blocks.*.attention.query.kernel=0.5", "embedding=0.25")
    for scan_layers in (False, True):
        deep = _deep(settings, scan_layers=scan_layers, remat=remat if scan_layers else "none", **model)
        program = small.program(small.changed(deep, optimizer={"learning_rate_factors": factors}))
        state = program.init_state()
        begun = jax.tree.map(np.array, models.unstack(state.params))
        for _ in range(2):
            state, metrics = program.update(state, rows)
        found.append((state, metrics))
    assert jax.tree.structure(found[0]) == jax.tree.structure(found[1])
    small.assert_close(found[1], found[0])
    after = models.unstack(found[1][0].params)
    small.assert_same(after["blocks"][1], begun["blocks"][1])
    # The initial parameters are those of the model, stacked or not.
    made = models.make(deep.model, deep.task, rngs=deep.training.seed)
    small.assert_same(begun, nnx.to_pure_dict(nnx.state(made, nnx.Param)))


def test_running_means_are_those_of_layers_one_after_another():
    settings, found = small.encoder(norm="batch", layers=2), []
    program, rows = small.program(settings), small.labeled()
    state = program.init_state()
    for scans in (False, True):
        model = nnx.eval_shape(
            lambda scans=scans: models.make(settings.model, settings.task, rngs=0, stacked=True, scans=scans)
        )
        graph, *_ = nnx.split(model, nnx.Param, nnx.BatchStat)

        @jax.jit
        def forward(params, statistics, graph=graph):
            model = nnx.merge(graph, params, statistics)
            model.train()
            return program.task.sums(model, rows), nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

        found.append(forward(state.params, state.statistics))
    small.assert_close(*found)
    assert not np.array_equal(jax.tree.leaves(found[0][1])[0], jax.tree.leaves(state.statistics)[0])


def test_a_deeper_model_has_no_larger_program(settings):
    sizes = []
    for layers in (4, 48):
        program = small.program(_deep(settings, scan_layers=None if layers == 48 else True, layers=layers))
        sizes.append(len(str(program.update.trace(program.abstract, small.tokens(settings)).jaxpr)))
    assert sizes[1] < 1.02 * sizes[0]


@marked.cases("name", ["adamw", "adafactor"], slow=["muon", "schedule_free"])
def test_abstract_states_are_those_of_the_states(settings, name, monkeypatch):
    monkeypatch.setattr(optimizer, "FACTORED_SIZE", 16)
    average = {"ema_decay": 0.9} if name == "adamw" else {}
    made = config.OptimizerConfig(name=name, **average)
    program = small.program(small.changed(_deep(settings, scan_layers=True), optimizer=made))
    state = program.init_state()
    assert jax.tree.structure(state) == jax.tree.structure(program.abstract)
    for leaf, shape in zip(jax.tree.leaves(state), jax.tree.leaves(program.abstract)):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (shape.shape, shape.dtype, shape.sharding)
