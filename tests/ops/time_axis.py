"""Compares ops under context parallelism on simulated devices with one device; prints JSON.

    python -m tests.ops.time_axis ops|all-ops|kernels|all-kernels|programs|all-programs|long

Runs in a separate process, since the number of devices is fixed when a process starts.
"""

import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax import ops
from sympow_jax.ops import documents, rotary
from sympow_jax.ops._shared import target
from tests.ops import cases, linear_formula
from tests.training import collectives

AXIS = "context"
TIME = 256
SHARED = {"time": TIME, "head_dim": 8, "value_dim": 5, "group": 3}
# Queries read the state, and shards of 32 positions are longer than the window.
SHORT = {"exact_window": 12, "chunk_size": 20}


def segment_ids():
    """Returns three rows of documents, for shards of 32, 64 and 128 positions.

    The first row has a document over six shards of 32, one of them all padding, and boundaries on edges and next to
    them. The second has boundaries on every second edge and padding at the end. The third has boundaries and padding
    anywhere.
    """
    first = np.full(TIME, 5)
    first[40:45] = first[100:170] = -1
    first[192:223], first[223:224], first[224:] = 1, 2, 3
    second = np.arange(TIME) // 64 % 2
    second[230:] = -1
    third = cases.arrays(cases.Case(time=TIME, segments="padded"), batch=1)["segment_ids"][0]
    return np.stack([first, second, third]).astype(np.int32)


def over_time(f, devices, arrays, out=None):
    """Returns f(axis name, arrays) with every array sharded over time; `out` for results other than one such array."""
    mesh = jax.make_mesh((devices,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(None, AXIS)
    specs = jax.tree.map(lambda _: spec, arrays)
    return jax.shard_map(
        functools.partial(f, AXIS),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=spec if out is None else out,
    )


def outputs_and_gradients(f, arrays, dout):
    """Returns f's output and gradients with respect to all arrays except segment ids."""
    fixed = {name: x for name, x in arrays.items() if name == "segment_ids"}
    varied = {name: x for name, x in arrays.items() if name not in fixed and x is not None}
    return jax.device_get(_compiled(f)(varied, fixed, dout))


@functools.cache
def _compiled(f):
    def loss(varied, fixed, dout):
        out = f(varied | fixed)
        return (out * dout).sum(dtype=jnp.promote_types(out.dtype, jnp.float32)), out

    @jax.jit
    def run(varied, fixed, dout):
        gradients, out = jax.grad(loss, has_aux=True)(varied, fixed, dout)
        return {"out": out} | gradients

    return run


@functools.cache
def _on_devices(op, devices, names):
    """Returns the op as a function of the named arrays, with time sharded over devices if there are several."""

    def call(axis_name, arrays):
        return op(**arrays, axis_name=axis_name)

    return (
        functools.partial(call, None) if devices == 1 else over_time(call, devices, dict.fromkeys(names, 0))
    )


def compare(drawn, formula, runs):
    """Returns RMS errors of runs, {name: (op, devices, dtype)}, against the formula on one device in float64."""

    def run(op, devices, dtype):
        arrays = {name: x if name == "segment_ids" else jnp.asarray(x, dtype) for name, x in present.items()}
        f = _on_devices(op, devices, tuple(arrays))
        return outputs_and_gradients(f, arrays, jnp.asarray(drawn["dout"], dtype))

    present = {name: x for name, x in drawn.items() if x is not None and name != "dout"}
    with jax.enable_x64(True):
        expected = run(formula, 1, "float64")
    results = {}
    for name, (op, devices, dtype) in runs.items():
        with jax.enable_x64(dtype == "float64"):
            result = run(op, devices, dtype)
        results[name] = {
            name: cases.error(result[name], x, cases.natural_size(name, drawn))
            for name, x in expected.items()
        }
    return results


def drawn_for(ids=None, **options):
    """Draws arguments with two key heads and six query heads."""
    arrays = cases.arrays(cases.Case(**SHARED | options), batch=3, kv_heads=2)
    return arrays | {"segment_ids": ids}


def check_ops(everything):
    """Returns errors by case and run, and the results for positions, angles and error messages."""
    ids = segment_ids()
    formula = functools.partial(ops.power_attention, implementation="reference")
    chunked, attention = (
        functools.partial(ops.power_attention, form=form, **SHORT) for form in ("chunked", "attention")
    )
    recurrent = functools.partial(ops.power_attention, form="recurrent", exact_window=SHORT["exact_window"])
    extreme, gentle = drawn_for(ids), drawn_for(ids, decay="gentle")
    linear = functools.partial(rotated_linear, form="chunked", **SHORT)
    linear_by_heads = functools.partial(rotated_linear, form="attention", **SHORT)
    of_linear = functools.partial(rotated_linear, implementation="reference")
    alibi = extreme | {
        "log_decay": np.broadcast_to(-np.array(ops.alibi_slopes(2)), extreme["log_decay"].shape)
    }
    softmax, single = ops.softmax_attention, "float32"
    window = functools.partial(softmax, window=50, block_size=48)
    expressive = functools.partial(ops.expressive_attention, block_size=48)
    of_expressive = functools.partial(ops.expressive_attention, implementation="reference")
    results = {
        "extreme": compare(extreme, formula, {"chunked 8 float64": (chunked, 8, "float64")}),
        "gentle": compare(
            gentle, formula, {"chunked 4": (chunked, 4, single), "attention 4": (attention, 4, single)}
        ),
        # One document whose tokens weigh to its end: the last of four devices needs the state of the first.
        "linear": compare(drawn_for(decay="gentle"), of_linear, {"chunked 4": (linear, 4, single)}),
        "softmax": compare(alibi, softmax, {"8": (softmax, 8, single)}),
        "window": compare(alibi, window, {"4": (window, 4, single)}),
        "expressive": compare(extreme, of_expressive, {"4": (expressive, 4, single)}),
        "angles": {8: angles(ids, 8)},
        "refused": refused(),
    }
    if not everything:
        return results
    grid = [(n, dtype) for n in (2, 4, 8) for dtype in ("float64", "float32")]
    both = {
        f"{name} {devices} {dtype}": (op, devices, dtype)
        for name, op in {"chunked": chunked, "attention": attention}.items()
        for devices, dtype in grid
    }
    single_runs = {f"chunked {devices}": (chunked, devices, single) for devices in (2, 4, 8)}
    quartic = functools.partial(ops.power_attention, power=4, form="chunked", exact_window=32, chunk_size=64)
    # A few keys before a shard of padding: queries after it still attend to them exactly.
    few = drawn_for(np.repeat([[1, 2, -1, 2]], [91, 5, 64, 96], axis=1).repeat(3, axis=0), decay="gentle")
    sextic = functools.partial(chunked, power=6)
    no_window = functools.partial(ops.power_attention, form="chunked", exact_window=0)
    no_form = functools.partial(ops.power_attention, exact_window=32)
    return results | {
        "all extreme": compare(extreme, formula, both),
        "all gentle": compare(gentle, formula, both),
        "long keys": compare(drawn_for(ids, decay="gentle", scale=1e3), formula, single_runs),
        "short keys": compare(drawn_for(ids, scale=1e-3), formula, single_runs),
        "no decay": compare(drawn_for(decay="none"), formula, single_runs),
        "quartic": compare(
            drawn_for(decay="gentle"),
            functools.partial(formula, power=4),
            {str(n): (quartic, n, single) for n in (2, 4, 8)},
        ),
        "few keys": compare(few, functools.partial(formula, power=6), {"8": (sextic, 8, single)}),
        "settings": compare(
            gentle,
            formula,
            {
                "recurrent float64": (recurrent, 2, "float64"),
                "no window float64": (no_window, 4, "float64"),
                "no form float64": (no_form, 8, "float64"),
            },
        ),
        "all linear": compare(extreme, of_linear, {f"{n} {dtype}": (linear, n, dtype) for n, dtype in grid}),
        "linear by heads": compare(gentle, of_linear, {str(n): (linear_by_heads, n, single) for n in (2, 4)}),
        "all softmax": compare(alibi, softmax, {str(n): (softmax, n, single) for n in (2, 4)}),
        "plain softmax": compare(
            drawn_for(decay="none"), softmax, {str(n): (softmax, n, single) for n in (2, 4, 8)}
        ),
        "all angles": {n: angles(ids, n) for n in (2, 4)},
        "angles of one document": {n: angles(None, n) for n in (2, 4, 8)},
        "angles of pairs": {4: angles(ids, 4, pairs=(4,))},
    }


def rotated_linear(*, axis_name, **arguments):
    """Computes linear attention whose features are rotated by their positions on all devices."""
    time = arguments["query"].shape[1]
    begin = 0 if axis_name is None else time * jax.lax.axis_index(axis_name)
    rotate = linear_formula.rotation(begin + jnp.arange(time))
    return ops.linear_attention(**arguments, rotate=rotate, axis_name=axis_name)


def angles(ids, devices, pairs=()):
    """Returns whether positions and angles are bitwise those of one device, and the error of the gradient of rates."""
    random = np.random.default_rng(0)
    rate = (1 + np.tanh(random.standard_normal((3, TIME, 2, *pairs)))).astype(np.float32)
    weight = random.standard_normal((3, TIME, 2, 4)).astype(np.float32)
    arrays = {"rate": rate, "weight": weight} | ({} if ids is None else {"segment_ids": ids})
    whole = jnp.full((3, 2, *pairs), 7)
    state = rotary.RotaryState(whole, jnp.full(whole.shape, 2**31, jnp.uint32), jnp.array([5, 1, 0]))

    def f(axis_name, arrays):
        segments = arrays.get("segment_ids")

        def loss(rate):
            result, end = rotary.learned_angles(
                rate, 8, segment_ids=segments, initial_state=state, axis_name=axis_name
            )
            return (result * arrays["weight"]).sum(), (result, end)

        gradient, (result, end) = jax.grad(loss, has_aux=True)(arrays["rate"])
        segments = jnp.zeros(rate.shape[:2], jnp.int32) if segments is None else segments
        begun = documents.PositionState(jnp.full(3, 11), state.segment)
        places, last = documents.positions(segments[:, : arrays["rate"].shape[1]], begun, axis_name=axis_name)
        ends = jax.tree.map(lambda x: x[:, None], (end, last))
        return gradient, (result, places, ends)

    one = jax.device_get(jax.jit(functools.partial(f, None))(arrays))
    spec = jax.sharding.PartitionSpec(None, AXIS)
    many = jax.device_get(jax.jit(over_time(f, devices, arrays, (spec, spec)))(arrays))
    *_, ends = many[1]
    identical = all(
        np.array_equal(x[:, -1:] if x.shape != y.shape else x, y)
        for x, y in zip(jax.tree.leaves(many[1]), jax.tree.leaves(one[1]), strict=True)
    )
    assert jax.tree.leaves(ends)[0].shape[1] == devices
    return {"identical": identical, "rate": cases.error(many[0], one[0])}


def refused():
    """Returns the first words of errors for arguments that context parallelism does not support."""
    x = jnp.ones((1, 16, 1, 8))
    state = ops.PowerState.zeros(1, 1, 8, 8, power=2, exact_window=4)
    attempts = {
        "states": lambda x, axis: ops.power_attention(x, x, x, axis_name=axis, return_state=True),
        "state": lambda x, axis: ops.power_attention(
            x, x, x, axis_name=axis, initial_state=state, exact_window=4
        ),
        "reference": lambda x, axis: ops.power_attention(x, x, x, axis_name=axis, implementation="reference"),
        "KV cache": lambda x, axis: ops.power_attention(x[:, 1:], x, x, axis_name=axis),
        "KV cache of softmax": lambda x, axis: ops.softmax_attention(x[:, 1:], x, x, axis_name=axis),
        "KV cache of expressive": lambda x, axis: ops.expressive_attention(x[:, 1:], x, x, axis_name=axis),
        "exact_window": lambda x, axis: ops.power_attention(
            x, x, x, axis_name=axis, form="chunked", exact_window=9
        ),
    }
    messages = {}
    for name, attempt in attempts.items():
        try:
            jax.eval_shape(over_time(lambda axis, x, attempt=attempt: attempt(x, axis), 2, x), x)
        except (ValueError, NotImplementedError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


def check_kernels(everything):
    """Returns errors of the chunked form in bfloat16, by xla and by the kernels' plain JAX stand-ins."""
    from tests.pallas_kernels import plain, plain_quartic

    ids = np.repeat(segment_ids()[:2], 2, axis=1)
    settings = {"documents": (cases.Case(head_dim=32, value_dim=24, decay="gentle", group=2), ids, 4)}
    if everything:
        settings |= {
            "gates": (cases.Case(head_dim=32, value_dim=24, decay="mixed", group=2), ids, 4),
            "one document": (cases.Case(head_dim=64, value_dim=32, decay="gentle", scale=1e3), None, 2),
            "quartic": (cases.Case(power=4, decay="gentle", group=2), ids, 2),
        }
    results = {}
    with target.interpreted(object()), plain.kernels(), plain_quartic.kernels():
        for name, (case, segments, devices) in settings.items():
            case = dataclasses.replace(case, time=2 * TIME)
            drawn = cases.arrays(case, batch=2, dtype="bfloat16") | {"segment_ids": segments}
            results[name] = _kernel_errors(drawn, case.power, devices)
    return results


def _kernel_errors(drawn, power, devices):
    present = {name: x for name, x in drawn.items() if x is not None and name != "dout"}
    short = {
        name: jnp.asarray(x, {"log_decay": "float32", "segment_ids": "int32"}.get(name, "bfloat16"))
        for name, x in present.items()
    }

    def run(arrays, devices, **options):
        def f(axis_name, arrays):
            return ops.power_attention(**arrays, power=power, axis_name=axis_name, **options)

        f = functools.partial(f, None) if devices == 1 else over_time(f, devices, arrays)
        return outputs_and_gradients(f, arrays, jnp.asarray(drawn["dout"], arrays["query"].dtype))

    with jax.enable_x64(True):
        expected = run(present, 1, implementation="reference")
    result = {
        "kernel": run(short, devices, implementation="mosaic_gpu", form="chunked", chunk_size=64),
        "plain": run(short, 1, implementation="xla", form="chunked", chunk_size=64),
    }
    return {
        by: {
            name: cases.error(results[name], x, cases.natural_size(name, drawn))
            for name, x in expected.items()
        }
        for by, results in result.items()
    }


def check_programs(everything):
    """Returns the collectives of forward and backward pass on eight devices, by kind with their bytes."""
    x = jax.ShapeDtypeStruct((2, 8 * 128, 8, 16), jnp.float32)
    arrays = {"query": x, "key": x, "value": x, "log_decay": jax.ShapeDtypeStruct(x.shape[:3], jnp.float32)}
    ids = {"segment_ids": jax.ShapeDtypeStruct(x.shape[:2], jnp.int32)}

    def exchanged(op, fixed):
        mapped = over_time(lambda axis_name, arrays: op(**arrays, axis_name=axis_name), 8, arrays | fixed)

        def loss(arrays, fixed):
            return jnp.square(mapped(arrays | fixed)).sum()

        return exchanges(jax.jit(jax.grad(loss)).lower(arrays, fixed).compile().as_text())

    chunked = functools.partial(ops.power_attention, form="chunked")
    attention = functools.partial(ops.power_attention, form="attention")
    results = {"chunked with documents": exchanged(chunked, ids), "attention": exchanged(attention, ids)}
    if everything:
        results |= {"chunked": exchanged(chunked, {}), "softmax": exchanged(ops.softmax_attention, ids)}
    return results


def exchanges(program):
    """Returns [kind, bytes of the result] of every collective in a compiled program."""
    result = []
    for line in program.splitlines():
        kind, arrays = collectives.called(line)
        if arrays:
            result.append([kind, sum(collectives.Collective(kind, (), *array).nbytes for array in arrays)])
    return result


def long():
    """Compares 65,536 tokens of conformal attention on eight devices with one, in float32."""
    random = np.random.default_rng(0)
    shape = (1, 65_536, 2)
    arrays = {name: random.standard_normal((*shape, 32)) for name in ("query", "key", "value")}
    arrays["rate"] = 1 + np.tanh(random.standard_normal(shape))
    # One head remembers most of the sequence, the other about 2,000 tokens.
    gates = np.array([12, 8]) + random.standard_normal(shape)
    arrays["log_decay"] = -np.log1p(np.exp(-gates))
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    dout = jnp.asarray(random.standard_normal((*shape, 32)), jnp.float32)

    def f(axis_name, arrays):
        angles, _ = rotary.learned_angles(arrays["rate"], 32, axis_name=axis_name)
        query, key = (rotary.rotate(arrays[name], angles) for name in ("query", "key"))
        return ops.power_attention(
            query, key, arrays["value"], log_decay=arrays["log_decay"], form="chunked", axis_name=axis_name
        )

    one = outputs_and_gradients(functools.partial(f, None), arrays, dout)
    many = outputs_and_gradients(over_time(f, 8, arrays), arrays, dout)
    return {name: cases.error(many[name], x) for name, x in one.items()}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    checks = {"ops": check_ops, "kernels": check_kernels, "programs": check_programs}
    name = sys.argv[1].removeprefix("all-")
    print(json.dumps(long() if name == "long" else checks[name](name != sys.argv[1])))
