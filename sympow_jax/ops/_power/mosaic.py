"""Power attention by the Pallas kernels for Hopper GPUs; imported only where they are asked for."""

import functools

import jax

from pallas_kernels import power_attention as kernel
from sympow_jax.ops._power import costs, xla
from sympow_jax.ops._power import mean as means

__all__ = ["attention", "per_device", "require_supported"]

# Mesh axes by the names in common use: those that divide heads; all others divide the batch.
_HEAD_AXES = ("model", "tensor", "heads")


def require_supported(query, value, *, power: int) -> None:
    """Raises NotImplementedError, naming the constraint, for what the kernel of the attention form cannot do."""
    kernel.choose(head_dim=query.shape[-1], value_dim=value.shape[-1], power=power, dtype=query.dtype)


def attention(query, key, value, *, power, log_decay, segment_ids, interpret=None):
    """The attention form without a state; arguments as in `power_attention`.

    Saves its arguments alone for the backward pass, which is that of `xla.attention`.
    """
    return _attention(power, interpret, query, key, value, log_decay, segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(power, interpret, query, key, value, log_decay, segment_ids):
    def mean(arrays):
        numerator, denominator, _ = kernel.power_attention(**arrays, power=power, interpret=interpret)
        return means.mean(numerator, denominator[..., None], -1).astype(arrays["value"].dtype)

    arrays = {"query": query, "key": key, "value": value, "log_decay": log_decay, "segment_ids": segment_ids}
    arrays = {name: x for name, x in arrays.items() if x is not None}
    return per_device(mean, arrays)


def _attention_fwd(power, interpret, *arguments):
    return _attention(power, interpret, *arguments), arguments


def _attention_bwd(power, interpret, arguments, dout):
    del interpret
    *differentiable, segment_ids = arguments

    def plain(query, key, value, log_decay):
        out, _ = xla.attention(
            query,
            key,
            value,
            power=power,
            log_decay=log_decay,
            segment_ids=segment_ids,
            state=None,
            window=0,
            chunk=costs.default_chunk("attention"),
            return_state=False,
        )
        return out

    return *jax.vjp(plain, *differentiable)[1](dout), None


_attention.defvjp(_attention_fwd, _attention_bwd)


def per_device(f, arrays):
    """f of each device's share of the batch and the heads, since the partitioner cannot divide a kernel.

    With the axes of the mesh in scope that are not yet manual; without any, f itself.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = [] if mesh.empty else [name for name in mesh.axis_names if name not in mesh.manual_axes]
    if not axes:
        return f(arrays)
    batch, kv_heads = arrays["key"].shape[0], arrays["key"].shape[2]
    by_batch = _dividing(batch, [name for name in axes if name not in _HEAD_AXES], mesh)
    by_head = _dividing(kv_heads, [name for name in axes if name in _HEAD_AXES], mesh)
    spec = jax.sharding.PartitionSpec
    specs = {
        name: spec(by_batch) if name == "segment_ids" else spec(by_batch, None, by_head) for name in arrays
    }
    mapped = jax.shard_map(
        f, in_specs=(specs,), out_specs=specs["query"], axis_names=set(axes), check_vma=False
    )
    if not (explicit := set(axes) & set(mesh.explicit_axes)):
        return mapped(arrays)
    # Explicit axes are part of types: arguments have to be where the kernel takes them, the result where they were.
    before = jax.typeof(arrays["query"]).sharding.spec
    arrays = {name: jax.sharding.reshard(x, _over(explicit, specs[name])) for name, x in arrays.items()}
    return jax.sharding.reshard(mapped(arrays), spec(*before[:3]))


def _over(names, spec):
    """The spec without the axes that are not among `names`."""
    axes = ((part,) if isinstance(part, str) else part or () for part in spec)
    kept = (tuple(axis for axis in part if axis in names) or None for part in axes)
    return jax.sharding.PartitionSpec(*kept)


def _dividing(size, names, mesh):
    """The first of the axes as long as they divide `size`; over the others everything is repeated."""
    taken = []
    for name in names:
        if size % mesh.shape[name]:
            break
        size //= mesh.shape[name]
        taken.append(name)
    return tuple(taken) or None
