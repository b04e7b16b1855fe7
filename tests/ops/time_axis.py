"""Ops over simulated devices that divide time, against one device; prints JSON.

    python -m tests.ops.time_axis power|others|kernels|programs|long

A process of its own, since a process has its devices from its start.
"""

import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax import ops
from sympow_jax.ops import documents, rotary
from sympow_jax.ops._power import target
from tests.ops import cases

AXIS = "context"
TIME = 256
SHARED = {"time": TIME, "head_dim": 8, "value_dim": 5, "group": 3}
# Queries see what was folded, and shares of 32 positions are longer than the window.
SHORT = {"window": 12, "chunk_size": 20}


def segment_ids():
    """Three rows of documents, for shares of 32, 64 and 128 positions.

    A document over six shares of 32, one of them all padding, and boundaries on edges and beside them; boundaries on
    every second edge and padding at the end; boundaries and padding anywhere.
    """
    first = np.full(TIME, 5)
    first[40:45] = first[100:170] = -1
    first[192:223], first[223:224], first[224:] = 1, 2, 3
    second = np.arange(TIME) // 64 % 2
    second[230:] = -1
    third = cases.arrays(cases.Case(time=TIME, segments="padded"), batch=1)["segment_ids"][0]
    return np.stack([first, second, third]).astype(np.int32)


def over_time(f, devices, arrays, out=None):
    """f(axis name, arrays) with every array divided over time; `out` for other results than one such array."""
    mesh = jax.make_mesh((devices,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(None, AXIS)
    specs = jax.tree.map(lambda _: spec, arrays)
    return jax.shard_map(
        functools.partial(f, AXIS),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=spec if out is None else out,
        check_vma=False,
    )


def outputs_and_gradients(f, arrays, dout):
    """f's output and gradients with respect to all arrays but segment ids."""
    fixed = {name: x for name, x in arrays.items() if name == "segment_ids"}

    @jax.jit
    def run(varied):
        def loss(varied):
            out = f(varied | fixed)
            return (out * dout).sum(dtype=jnp.promote_types(out.dtype, jnp.float32)), out

        gradients, out = jax.grad(loss, has_aux=True)(varied)
        return {"out": out} | gradients

    varied = {name: x for name, x in arrays.items() if name not in fixed and x is not None}
    return jax.device_get(run(varied))


def compare(op, drawn, sizes, dtype):
    """RMS errors by number of devices, 1 among them, against one device in float64."""

    def call(axis_name, arrays):
        return op(**arrays, axis_name=axis_name)

    def run(devices, dtype):
        arrays = {
            name: x if name == "segment_ids" else jnp.asarray(x, dtype)
            for name, x in drawn.items()
            if x is not None
        }
        dout = arrays.pop("dout")
        f = functools.partial(call, None) if devices == 1 else over_time(call, devices, arrays)
        return outputs_and_gradients(f, arrays, dout)

    with jax.enable_x64(True):
        expected = run(1, "float64")

    def errors(devices):
        with jax.enable_x64(dtype == "float64"):
            actual = run(devices, dtype)
        return {
            name: cases.error(actual[name], x, cases.natural_size(name, drawn))
            for name, x in expected.items()
        }

    # In float64 one device is what is compared with.
    return {devices: errors(devices) for devices in (*sizes, *([1] if dtype == "float32" else []))}


def power():
    """The forms of power attention, two heads of keys for six of queries."""
    ids = segment_ids()

    def drawn(with_documents=True, **options):
        arrays = cases.arrays(cases.Case(**SHARED | options), batch=len(ids), kv_heads=2)
        return arrays | {"segment_ids": ids if with_documents else None}

    op = functools.partial(ops.power_attention, implementation="xla", **SHORT)
    chunked, attention = functools.partial(op, form="chunked"), functools.partial(op, form="attention")
    quartic = functools.partial(ops.power_attention, power=4, form="chunked", window=32, chunk_size=64)
    results = {}
    for dtype in ("float64", "float32"):
        results |= {
            f"chunked {dtype}": compare(chunked, drawn(), (2, 4, 8), dtype),
            f"attention {dtype}": compare(attention, drawn(), (4, 8), dtype),
        }
    gentle = drawn(decay="gentle")
    return results | {
        "gentle": compare(chunked, gentle, (8,), "float32"),
        "scaled": compare(chunked, drawn(decay="gentle", scale=1e3), (8,), "float32"),
        "no documents": compare(quartic, drawn(False, decay="gentle", power=4), (8,), "float32"),
        "no decay": compare(chunked, drawn(False, decay="none"), (4,), "float32"),
        "no window": compare(
            functools.partial(ops.power_attention, form="chunked", window=0), gentle, (2,), "float64"
        ),
        "recurrent": compare(functools.partial(op, form="recurrent"), gentle, (2,), "float64"),
        "no form": compare(functools.partial(ops.power_attention, window=32), gentle, (2,), "float32"),
    }


def others():
    """Linear and softmax attention, and positions."""
    ids = segment_ids()
    drawn = cases.arrays(cases.Case(**SHARED), batch=len(ids), kv_heads=2) | {"segment_ids": ids}
    slopes = -np.array(ops.alibi_slopes(2))
    alibi = drawn | {"log_decay": np.broadcast_to(slopes, drawn["log_decay"].shape)}
    linear = functools.partial(ops.linear_attention, form="chunked", **SHORT)
    return {
        "linear": compare(linear, drawn, (8,), "float32"),
        "softmax": compare(ops.softmax_attention, alibi, (2, 4, 8), "float32"),
        "softmax without documents": compare(
            ops.softmax_attention, drawn | {"log_decay": None, "segment_ids": None}, (4,), "float32"
        ),
        "angles": {devices: angles(ids, devices) for devices in (2, 4, 8)},
        "angles without documents": {devices: angles(None, devices) for devices in (2, 8)},
        "refused": refused(),
    }


def angles(ids, devices):
    """Whether positions and angles are those of one device to the bit, and the error of the gradient of rates."""
    random = np.random.default_rng(0)
    rate = (1 + np.tanh(random.standard_normal((3, TIME, 2)))).astype(np.float32)
    weight = random.standard_normal((3, TIME, 2, 4)).astype(np.float32)
    arrays = {"rate": rate, "weight": weight} | ({} if ids is None else {"segment_ids": ids})
    state = rotary.RotaryState(jnp.full((3, 2), 7), jnp.full((3, 2), 2**31, jnp.uint32), jnp.array([5, 1, 0]))

    def f(axis_name, arrays):
        segments = arrays.get("segment_ids")

        def loss(rate):
            found, end = rotary.learned_angles(
                rate, 8, segment_ids=segments, state=state, axis_name=axis_name
            )
            return (found * arrays["weight"]).sum(), (found, end)

        gradient, (found, end) = jax.grad(loss, has_aux=True)(arrays["rate"])
        segments = jnp.zeros(rate.shape[:2], jnp.int32) if segments is None else segments
        begun = documents.PositionState(jnp.full(3, 11), state.segment)
        places, last = documents.positions(segments[:, : arrays["rate"].shape[1]], begun, axis_name=axis_name)
        ends = jax.tree.map(lambda x: x[:, None], (end, last))
        return gradient, (found, places, ends)

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
    """The first words of errors about what does not go with divided time."""
    x = jnp.ones((1, 16, 1, 8))
    state = ops.PowerState.zeros(1, 1, 8, 8, power=2, window=4)
    attempts = {
        "states": lambda x, axis: ops.power_attention(x, x, x, axis_name=axis, return_state=True),
        "state": lambda x, axis: ops.power_attention(x, x, x, axis_name=axis, initial_state=state, window=4),
        "reference": lambda x, axis: ops.power_attention(x, x, x, axis_name=axis, implementation="reference"),
        "kept": lambda x, axis: ops.power_attention(x[:, 1:], x, x, axis_name=axis),
        "kept by softmax": lambda x, axis: ops.softmax_attention(x[:, 1:], x, x, axis_name=axis),
        "window": lambda x, axis: ops.power_attention(x, x, x, axis_name=axis, form="chunked", window=9),
    }
    messages = {}
    for name, attempt in attempts.items():
        try:
            jax.eval_shape(over_time(lambda axis, x, attempt=attempt: attempt(x, axis), 2, x), x)
        except (ValueError, NotImplementedError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


def kernels():
    """The chunked form by the kernels, plain JAX in their place, and by xla; both against float64."""
    from tests.pallas_kernels import plain

    results = {}
    for decay, devices in (("gentle", 2), ("mixed", 4)):
        case = cases.Case(head_dim=32, value_dim=24, time=512, decay=decay, group=2)
        drawn = cases.arrays(case, batch=2, dtype="bfloat16")
        if decay == "mixed":
            ids = np.repeat(segment_ids()[:2], 2, axis=1)
            drawn["segment_ids"] = ids
        with jax.enable_x64(True):
            arrays = {
                name: x if name == "segment_ids" else jnp.asarray(x)
                for name, x in drawn.items()
                if x is not None
            }
            dout = arrays.pop("dout")
            expected = outputs_and_gradients(
                lambda a: ops.power_attention(**a, implementation="reference"), arrays, dout
            )
        wide = ("log_decay", "segment_ids")
        short = {name: jnp.asarray(x, None if name in wide else "bfloat16") for name, x in arrays.items()}
        short["log_decay"] = short["log_decay"].astype("float32")

        def errors(implementation, short=short, devices=devices, expected=expected, dout=dout, drawn=drawn):
            def f(axis_name, arrays):
                return ops.power_attention(
                    **arrays,
                    form="chunked",
                    chunk_size=64,
                    implementation=implementation,
                    axis_name=axis_name,
                )

            actual = outputs_and_gradients(over_time(f, devices, short), short, dout.astype("bfloat16"))
            return {
                name: cases.error(actual[name], x, cases.natural_size(name, drawn))
                for name, x in expected.items()
            }

        with target.interpreted(object()), plain.kernels():
            results[f"{decay} {devices}"] = {"kernel": errors("mosaic_gpu"), "plain": errors("xla")}
    return results


def programs():
    """What is exchanged by forward and backward pass on eight devices: kinds of collectives with their bytes."""
    batch, heads, size = 2, 8, 16
    x = jax.ShapeDtypeStruct((batch, 8 * 128, heads, size), jnp.float32)
    decay = jax.ShapeDtypeStruct(x.shape[:3], jnp.float32)
    ids = jax.ShapeDtypeStruct(x.shape[:2], jnp.int32)

    def exchanged(op, with_ids):
        arrays = {"query": x, "key": x, "value": x, "log_decay": decay} | (
            {"segment_ids": ids} if with_ids else {}
        )
        mapped = over_time(lambda axis_name, arrays: op(**arrays, axis_name=axis_name), 8, arrays)

        def loss(varied, fixed):
            return mapped(varied | fixed).sum()

        varied = {name: a for name, a in arrays.items() if name != "segment_ids"}
        fixed = {"segment_ids": ids} if with_ids else {}
        text = jax.jit(jax.grad(loss)).lower(varied, fixed).compile().as_text()
        return collectives(text)

    chunked = functools.partial(ops.power_attention, form="chunked")
    attention = functools.partial(ops.power_attention, form="attention")
    return {
        "chunked": exchanged(chunked, False),
        "chunked with documents": exchanged(chunked, True),
        "attention": exchanged(attention, True),
        "softmax": exchanged(ops.softmax_attention, True),
    }


def collectives(text):
    """[kind, bytes of the result] of every collective in a compiled program."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    found = []
    for line in text.splitlines():
        if match := re.search(rf"= (.*?) ({kinds})(-start)?\(", line):
            shapes = re.findall(r"(pred|[suf]\d+|bf16)\[([\d,]*)\]", match[1])
            width = {"pred": 1, "bf16": 2}
            sizes = [
                width.get(kind, int(re.sub(r"\D", "", kind) or 8) // 8)
                * int(np.prod([int(n) for n in shape.split(",") if n]))
                for kind, shape in shapes
            ]
            found.append([match[2], sum(sizes)])
    return found


def long():
    """65,536 tokens of conformal attention, eight devices against one, in float32."""
    random = np.random.default_rng(0)
    shape = (1, 65_536, 2)
    arrays = {name: random.standard_normal((*shape, 32)) for name in ("query", "key", "value")}
    arrays["rate"] = 1 + np.tanh(random.standard_normal(shape))
    arrays["log_decay"] = np.array(jax.nn.log_sigmoid(8 + 2 * random.standard_normal(shape)))
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    dout = jnp.asarray(random.standard_normal((*shape, 32)), jnp.float32)

    def f(axis_name, arrays):
        turns, _ = rotary.learned_angles(arrays["rate"], 32, axis_name=axis_name)
        query, key = (rotary.rotate(arrays[name], turns) for name in ("query", "key"))
        return ops.power_attention(
            query, key, arrays["value"], log_decay=arrays["log_decay"], form="chunked", axis_name=axis_name
        )

    one = outputs_and_gradients(functools.partial(f, None), arrays, dout)
    many = outputs_and_gradients(over_time(f, 8, arrays), arrays, dout)
    return {name: cases.error(many[name], x) for name, x in one.items()}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    groups = {"power": power, "others": others, "kernels": kernels, "programs": programs, "long": long}
    print(json.dumps(groups[sys.argv[1]]()))
