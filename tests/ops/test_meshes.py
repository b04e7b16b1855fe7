"""Tests that ops on meshes of Auto and Explicit axes and within `jax.shard_map` equal those on one device."""

import contextlib
import functools

import jax
import pytest

from tests.ops import cases, every_op

Spec = jax.sharding.PartitionSpec
AXES = {"B": "data", "N": "model", "K": "model"}
WAYS = (
    "Auto jit",
    "Auto eager",
    "Explicit jit",
    "Explicit eager",
    "Explicit without a mesh in scope",
    "Explicit jit without a mesh in scope",
    "shard_map jit",
    "shard_map eager",
    "shard_map jit check_vma=False",
    "shard_map jit gradient within",
)

# Both types of mesh axes; eager calls compile each of their operations. Without a mesh in scope a call differs only
# until it is lowered.
# Ops that together cover most loops and custom gradients, each by the ways that differ for it.
FAST = {
    "chunked": ("Explicit jit",),
    "step-that-folds": ("Explicit jit",),
    "step": ("shard_map jit",),
    "softmax": ("shard_map jit",),
    "kv_cache-step": ("Explicit jit",),
    "lrpe": ("Explicit jit", "Explicit lowered without a mesh in scope"),
}


def spec_of(layout):
    return Spec(*(AXES.get(letter) for letter in layout.split()))


def results(way, f, arrays, layouts, outputs):
    """Returns outputs and gradients of f for one way of running it; None if it is only lowered."""
    kind, *_ = way.split()
    axis_type = jax.sharding.AxisType["Explicit" if kind == "Explicit" else "Auto"]
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type, axis_type))
    specs = jax.tree.map(spec_of, {name: layouts[name] for name in arrays})
    backward = "without" not in way
    maybe_jit = jax.jit if "jit" in way else lambda g: g
    if kind == "shard_map":
        out_specs = jax.tree.map(spec_of, outputs)
        if "within" in way:
            floats = [
                spec
                for spec, x in zip(jax.tree.leaves(specs), jax.tree.leaves(arrays), strict=True)
                if every_op.is_float(x)
            ]

            def local(arrays):
                return every_op.outputs_and_gradients(f, arrays)

            mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=(out_specs, floats))
            return jax.jit(mapped)(arrays)

        def call(**arrays):
            mapped = jax.shard_map(
                lambda arrays: f(**arrays),
                mesh=mesh,
                in_specs=(specs,),
                out_specs=out_specs,
                check_vma="check_vma=False" not in way,
            )
            return mapped(arrays)

        return maybe_jit(functools.partial(every_op.outputs_and_gradients, call))(arrays)
    arrays = jax.tree.map(lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec)), arrays, specs)
    if "lowered" in way:
        traced = jax.jit(lambda arrays: f(**arrays)).trace(arrays)
        traced.lower()
        for x, layout in zip(traced.jaxpr.out_avals, jax.tree.leaves(outputs), strict=True):
            assert tuple(x.sharding.spec) == tuple(spec_of(layout)), (x, layout)
        return None
    with jax.set_mesh(mesh) if backward else contextlib.nullcontext():
        actual = maybe_jit(functools.partial(every_op.outputs_and_gradients, f, backward=backward))(arrays)
    if kind == "Explicit":
        for x, layout in zip(jax.tree.leaves(actual[0]), jax.tree.leaves(outputs), strict=True):
            assert x.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec_of(layout)), x.ndim), (x, layout)
    return actual


def check(name, ways):
    f, arrays, layouts, outputs = every_op.OPS[name]()
    expected = jax.jit(functools.partial(every_op.outputs_and_gradients, f))(arrays)
    for way in ways:
        if "within" in way and name in ("lrpe", "lrpe-complex"):
            continue  # the gradient of rates that all devices share is a sum over devices
        actual = results(way, f, arrays, layouts, outputs)
        if actual is None:
            continue
        needed = expected if actual[1] or not expected[1] else (expected[0], [])
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(needed), strict=True):
            assert cases.error(a, b) <= 1e-5, (name, way)


@pytest.mark.parametrize("name", FAST)
def test_sharded_arrays(name):
    check(name, FAST[name])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", every_op.OPS)
def test_every_kind_of_mesh(name):
    check(name, WAYS)
