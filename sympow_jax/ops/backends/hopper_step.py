"""One decoding step by the Pallas kernels for Hopper GPUs; imported only when it is requested.

The order of operations is that of the `xla` step. The kernels read the recurrent state and update it.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels import power_step as kernels
from sympow_jax.ops import decays, feature_maps, means, preparation, sharding
from sympow_jax.ops.forms import step as xla_step

# Bytes of keys, or of their features, in one call of an update: they stay within the 50 MB of an H100's cache.
_CACHED_BYTES = 32 * 1024**2
# Fields of the window of a state.
_WINDOW = ("keys", "values", "log_decays")
# Leading axes of the kernels' inputs and outputs, for `sharding.per_device`.
_LAYOUTS = (
    dict.fromkeys(("query", "out", "kv", "norm", "key", "value", "log_decay"), "B K")
    | dict.fromkeys(("keys", "values", "log_decays"), "B T K")
    | dict.fromkeys(("active", "slot"), "B")
)


def require_supported(query, state, *, power) -> None:
    """Raises NotImplementedError, naming the constraint, for requests that the kernels do not support."""
    batch, kv_heads = state.kv.shape[:2]
    shape = batch, kv_heads, query.shape[1] // kv_heads, query.shape[-1]
    kernels.choose(shape, state.kv, exact_window=state.exact_window, power=power)


def family(**_) -> str:
    """Returns the family of the step kernels, one of `pallas_kernels.check.verdict.FAMILIES`."""
    return "power_step"


# Not `derivatives.custom_vjp`: within `jax.custom_jvp`, JAX does not support kernels that write to their operands.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def step(plan, tokens, state):
    """Runs `xla_step.step_by` with the kernels; a donated state is updated in place.

    Only the arguments are saved for the backward pass, which is that of the `xla` step.
    """
    state_ops = xla_step.StateOps(attend, fold, xla_step.in_place)
    return xla_step.step_by(state_ops, plan, tokens, state)


step.defvjp(
    lambda plan, *arguments: (step(plan, *arguments), arguments),
    lambda plan, arguments, cotangents: jax.vjp(functools.partial(xla_step.step, plan), *arguments)[1](
        cotangents
    ),
)


def attend(plan, query, token, slot, state):
    """Computes `xla_step.StateOps.attend`; products are of float32 whatever the requested precision."""

    def compute(arrays):
        query, features = arrays["query"], None
        if plan.power != 2:
            features = feature_maps.symmetric_power(
                preparation.unit_scale(query.astype(plan.dtype)), plan.power
            )
        operands = kernels.Operands(features=features, **arrays)
        numerator, denominator, window = kernels.read(operands, power=plan.power, interpret=plan.interpret)
        return {"out": means.mean(numerator, denominator, -1)} | dict(zip(_WINDOW, window))

    arrays = {name: getattr(state, name) for name in (*_WINDOW, "kv", "norm")} | {
        "query": query,
        "key": token["keys"],
        "value": token["values"],
        "log_decay": token["log_decays"].astype(jnp.float32),
        "slot": slot,
    }
    results = sharding.per_device(compute, arrays, _LAYOUTS, ("out", *_WINDOW))
    return results.pop("out"), results


def fold(plan, state, tokens, active):
    """Computes `xla_step.fold` in place."""

    def compute(arrays):
        key, value, log_decay = (arrays[name] for name in _WINDOW)
        log_decay = with_layout_constraint(log_decay, Layout((0, 1, 2)))
        log_decay = jnp.moveaxis(log_decay, 1, 2)
        across = decays.exp(log_decay.sum(-1))
        to_end = decays.exp(decays.sums_after(log_decay))[..., None]
        active = arrays["active"]
        # Rows per call, limited so that their keys or features fit into the cache.
        numbers = key[0].size if plan.power == 2 else arrays["norm"][0].size * key.shape[1]
        size = max(1, min(len(active), _CACHED_BYTES // (4 * numbers)))
        count = active.sum(dtype=jnp.int32)
        chosen_first = jnp.pad(jnp.argsort(~active, stable=True), (0, -len(active) % size))

        def block_of_rows(block, sums):
            chosen = jax.lax.dynamic_slice_in_dim(chosen_first, block * size, size).astype(jnp.int32)
            keys, decay = jnp.moveaxis(key[chosen], 1, 2), to_end[chosen]
            if plan.power == 2:
                keys *= jnp.sqrt(decay)
            else:
                keys = feature_maps.symmetric_power(keys, plan.power) * decay
            left = count - block * size
            tokens = kernels.Window(chosen, left[None], keys, value[chosen], across[chosen])
            return kernels.fold(*sums, tokens, interpret=plan.interpret)

        blocks = (count + size - 1) // size
        kv, norm = jax.lax.fori_loop(jnp.int32(0), blocks, block_of_rows, (arrays["kv"], arrays["norm"]))
        return {"kv": kv, "norm": norm}

    arrays = tokens | {"kv": state.kv, "norm": state.norm, "active": active}
    return sharding.per_device(compute, arrays, _LAYOUTS, ("kv", "norm"))
