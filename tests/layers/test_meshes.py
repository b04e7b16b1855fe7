"""Tests that layers and models on a caller's mesh equal those on one device.

The mesh has Explicit or Auto axes; calls are compiled, inside `shard_map`, or eager.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, models
from sympow_jax.layers import partitioning

AXES = ("data", "model")
AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
# For each kind of mesh: its devices, the type of its axes, and the axes of rows and time. Heads are sharded over
# `model`, which in `heads` does not divide the two key/value heads.
KINDS = {
    "explicit": ((2, 2), EXPLICIT, jax.P("data")),
    "heads": ((1, 4), EXPLICIT, jax.P("data")),
    "time": ((2, 2), EXPLICIT, jax.P("data", "model")),
    "auto": ((2, 2), AUTO, jax.P("data")),
    "shard_map": ((2, 2), EXPLICIT, jax.P(AXES)),
    # A mesh of the project, which divides neither the rows nor the times of a layer's input.
    "uneven": ((2, 1, 2, 2), AUTO, jax.P()),
}
RULES = (
    *(("embed", "data"), ("position", None)),
    *((name, "model") for name in ("heads", "kv_heads", "gates", "mlp", "vocab")),
)
BATCH, TIME, WIDTH, VOCABULARY = 4, 22, 16, 32

ATTENTION = {
    "power": {"preset": "conformal_paper", "form": "chunked", "exact_window": 4, "chunk_size": 8},
    "power by pairs": {"preset": "conformal_paper", "form": "attention"},
    "window": {"preset": "sympow_gated_window", "window": 8, "exact_window": 4, "chunk_size": 8},
    "channels": {"preset": "sympow", "decay": "channel_learned", "exact_window": 4, "chunk_size": 8},
    "delta": {"preset": "power_delta", "chunk_size": 8},
    "linear": {"preset": "linear_lrpe", "exact_window": 4, "chunk_size": 8},
    "permutations": {
        "preset": "linear",
        "position": "lrpe",
        "lrpe": config.LrpeConfig(core="permutation", permutation_per_head=True),
        "normalizer": "rotated",
        "exact_window": 4,
        "chunk_size": 8,
    },
    "softmax": {"preset": "softmax"},
    "alibi": {"preset": "softmax_alibi"},
    "expressive": {"preset": "expressive"},
    "spe": {"preset": "linear", "position": "spe", "exact_window": 4, "chunk_size": 8},
    "table": {"preset": "gpt2", "max_document_length": 64},
    "qwen3": {"preset": "qwen3"},
}
MODELS = ("layer", "decoder", "stream", "encoder", "images")


def settings(attention: str, model: str) -> config.ModelConfig:
    options = dict(ATTENTION[attention])
    causal = model not in ("encoder", "images")
    kind = config.preset(options.pop("preset"), causal=causal, **options)
    inputs: dict[str, Any] = {"patch_size": 2} if model == "images" else {"vocab_size": VOCABULARY}
    body = config.MODEL_SIZES["qwen3_14b"] if attention == "qwen3" else {"biases": attention == "table"}
    sizes = {"layers": 1, "width": WIDTH, "heads": 4, "kv_heads": 2} | {"mlp_width": 64, "dtype": "float32"}
    return config.ModelConfig(**body | sizes | inputs, attention=kind)


def make(attention: str, model: str) -> nnx.Module:
    """Makes the layer or model, with projections so large that attention matters."""
    task = {"encoder": config.TaskConfig(name="masked_token")}.get(
        model,
        config.TaskConfig(name="classification", classes=3) if model == "images" else config.TaskConfig(),
    )
    instance = models.make(settings(attention, model), task, rngs=0)
    for name in ("query", "key", "value", "out"):
        getattr(instance.blocks[0].attention, name).kernel[...] *= 20
    return instance.blocks[0].attention if model == "layer" else instance


def inputs(model: str) -> jax.Array:
    key = jax.random.key(1)
    if model == "layer":
        return jax.random.normal(key, (BATCH, TIME, WIDTH))
    if model == "images":
        return jax.random.normal(key, (BATCH, 8, 6, 1))
    return jax.random.randint(key, (BATCH, TIME), 0, VOCABULARY)


def call(model: str, instance: Any, x: jax.Array) -> jax.Array:
    """Applies the model; with `stream` in two pieces, from a state of zeros, the second of one token."""
    match model:
        case "encoder":
            return instance.hidden(x)
        case "images":
            return instance.classify(x)
        case "stream":
            # The number of rows of x here: within `shard_map`, those of one device.
            state = instance.init_state(len(x), max_length=TIME)
            first, state = instance.extend(x[:, :-1], state)
            second, _ = instance.extend(x[:, -1:], state)
            return jnp.concatenate([first, second], axis=1)
    return instance(x)


def compare(attention: str, model: str, kind: str, how: str) -> dict[str, float]:
    """Returns relative errors of values and gradients on a mesh; `kind` is in `KINDS`, `how` is jit or eager."""
    graph, params = nnx.split(make(attention, model))
    x = inputs(model)[:3, :21] if kind == "uneven" else inputs(model)

    def forward(params, x):
        return call(model, nnx.merge(graph, params), x)

    def gradient(forward, params, x):
        def loss(params):
            out = forward(params, x)
            return (out * jnp.cos(out)).mean(), out

        return jax.grad(loss, has_aux=True)(params)

    if how == "eager":
        expected = jax.jit(forward)(params, x)
    else:
        wanted, expected = jax.jit(lambda params, x: gradient(forward, params, x))(params, x)
    shape, axis_type, rows = KINDS[kind]
    axes = partitioning.AXES if kind == "uneven" else AXES
    mesh = jax.make_mesh(shape, axes, axis_types=(axis_type,) * len(axes))
    mapped = forward
    # The numbers of decays and of rates are equal to that of key/value heads.
    rules = tuple((name, None if (name, kind) == ("gates", "heads") else axis) for name, axis in RULES)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        # Within `shard_map` parameters are whole, and rows are over both axes.
        if kind == "shard_map":
            mapped = jax.shard_map(forward, in_specs=(jax.P(), rows), out_specs=rows)
        if kind in ("shard_map", "uneven"):
            params = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
        else:
            params = jax.device_put(params, nnx.get_named_sharding(params, mesh))
        x = jax.device_put(x, jax.NamedSharding(mesh, rows))
        if how == "eager":
            return {"value": error(mapped(params, x), expected)}
        gradients, actual = jax.jit(lambda params, x: gradient(mapped, params, x))(params, x)
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True)
    natural = max(float(jnp.sqrt((x**2).mean())) for x in jax.tree.leaves(wanted))
    return {"value": error(actual, expected), "gradient": max(error(a, b, natural) for a, b in pairs)}


def error(actual: jax.Array, expected: jax.Array, natural: float = 0.0) -> float:
    """Returns the RMS of the difference over the RMS of the expected values.

    A gradient that is below rounding of the largest one is measured relative to the largest. The gradient of the bias
    of softmax's keys, which is zero, is an example.
    """
    actual, expected = (np.asarray(jax.device_get(x), np.float64) for x in (actual, expected))
    own = np.sqrt(np.mean(expected**2))
    scale = natural if own < 1e-6 * natural else max(own, 1e-3 * natural)
    return float(np.sqrt(np.mean((actual - expected) ** 2)) / scale)


VALUE_BOUND, GRADIENT_BOUND = 1e-5, 2e-5
# The op of power attention on a mesh is in tests/ops/test_meshes.py.
OFTEN = ["softmax/layer/explicit/jit", "table/decoder/time/jit"]
CAUSAL_ONLY = ("power", "power by pairs", "window", "channels", "alibi", "delta")
RARE = [
    case
    for kind in KINDS
    for how in ("jit", "eager")
    for model in MODELS
    for name in ATTENTION
    if (case := f"{name}/{model}/{kind}/{how}") not in OFTEN
    and not (model in ("encoder", "images") and name in CAUSAL_ONLY)
    # Slices of a sharded time axis are not separate arrays, and pixels have no time axis.
    and not (kind == "time" and model in ("stream", "images"))
    and (kind != "uneven" or (name, model, how) == ("power", "layer", "jit"))
]


def check(case):
    result = compare(*case.split("/"))
    assert result["value"] <= VALUE_BOUND, result
    assert result.get("gradient", 0) <= GRADIENT_BOUND, result


@pytest.mark.parametrize("case", OFTEN)
def test_on_a_mesh(case):
    check(case)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", RARE)
def test_everything_on_a_mesh(case):
    check(case)


def test_names_of_axes_are_those_that_nnx_reads():
    """Checks every matrix of a model; names without a rule are unchanged."""
    model = make("power", "decoder")
    specs = dict(nnx.to_flat_state(nnx.get_partition_spec(nnx.state(model))))
    named = {".".join(map(str, path)): tuple(spec.get_value()) for path, spec in specs.items()}
    assert {name: spec for name, spec in named.items() if any(spec)} == {
        "embedding": ("vocab", "embed"),
        "blocks.0.attention.query.kernel": ("embed", "heads"),
        "blocks.0.attention.key.kernel": ("embed", "kv_heads"),
        "blocks.0.attention.value.kernel": ("embed", "kv_heads"),
        "blocks.0.attention.decay.kernel": ("embed", "gates"),
        "blocks.0.attention.rate.kernel": ("embed", "gates"),
        "blocks.0.attention.out.kernel": ("heads", "embed"),
        "blocks.0.mlp.up.kernel": ("embed", "mlp"),
        "blocks.0.mlp.down.kernel": ("mlp", "embed"),
    }
    model = make("qwen3", "decoder")
    assert model.unembedding.get_metadata("out_sharding") == ("vocab", "embed")
    assert model.blocks[0].mlp.gate.kernel.get_metadata("out_sharding") == ("embed", "mlp")
