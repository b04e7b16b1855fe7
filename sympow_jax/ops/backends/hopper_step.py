"""One decoding step by the Pallas kernels for Hopper GPUs; imported only when it is requested.

The order of operations is that of the `xla` step. The kernels read the recurrent state and update it.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import power_step as kernels
from sympow_jax.ops import decays, feature_maps, means, sharding
from sympow_jax.ops.forms import step as xla_step

__all__ = ["family", "fold", "read", "require_supported", "step"]

# Bytes of key features computed at once for an update: they stay within the 50 MB of an H100's cache.
_FEATURE_BYTES = 32 * 1024**2
# Leading axes of the kernels' inputs and outputs, for `sharding.per_device`.
_LAYOUTS = (
    dict.fromkeys(("query", "out", "kv", "norm"), "B K")
    | dict.fromkeys(("key", "value", "log_decay"), "B T K")
    | {"active": "B"}
)


def require_supported(query, state, *, power) -> None:
    """Raises NotImplementedError, naming the constraint, for requests that the kernels do not support."""
    batch, kv_heads, features, value_dim = state.kv.shape
    kernels.choose(
        heads=batch * kv_heads,
        group=query.shape[1] // kv_heads,
        features=features,
        head_dim=query.shape[-1],
        value_dim=value_dim,
        exact_window=state.exact_window,
        power=power,
        dtype=state.kv.dtype,
    )


def family(**_) -> str:
    """Returns the family of the step kernels, one of `pallas_kernels.check.verdict.FAMILIES`."""
    return "power_step"


# Not `derivatives.custom_vjp`: within `jax.custom_jvp`, JAX does not support kernels that write to their operands.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def step(plan, tokens, state):
    """Runs `xla_step.step_by` with the kernels; a donated state is updated in place.

    Only the arguments are saved for the backward pass, which is that of the `xla` step.
    """
    state_ops = xla_step.StateOps(read, fold, xla_step.in_place)
    return xla_step.step_by(state_ops, plan, tokens, state)


step.defvjp(
    lambda plan, *arguments: (step(plan, *arguments), arguments),
    lambda plan, arguments, cotangents: jax.vjp(functools.partial(xla_step.step, plan), *arguments)[1](
        cotangents
    ),
)


def read(plan, query, state):
    """Computes `xla_step.read`; products are of float32 whatever the requested precision."""

    def compute(arrays):
        query, log_decay = arrays["query"], jnp.moveaxis(arrays["log_decay"], 1, 2)
        from_start = decays.exp(log_decay.sum(-1))[..., None, None]
        numerator, denominator = kernels.read(
            feature_maps.symmetric_power(query, plan.power) * from_start,
            arrays["kv"],
            arrays["norm"],
            query,
            arrays["key"],
            arrays["value"],
            decays.exp(decays.sums_after(log_decay)),
            power=plan.power,
            interpret=plan.interpret,
        )
        return {"out": means.mean(numerator, denominator[..., None], -1)}

    arrays = {
        "query": query,
        "key": state.keys,
        "value": state.values,
        "log_decay": state.log_decays,
        "kv": state.kv,
        "norm": state.norm,
    }
    return sharding.per_device(compute, arrays, _LAYOUTS, ("out",))["out"]


def fold(plan, state, tokens, active):
    """Computes `xla_step.fold` in place."""

    def compute(arrays):
        key, value, log_decay = arrays["key"], arrays["value"], jnp.moveaxis(arrays["log_decay"], 1, 2)
        across = decays.exp(log_decay.sum(-1))
        to_end = decays.exp(decays.sums_after(log_decay))[..., None]
        active = arrays["active"]
        # Rows per call, limited so that their features fit into the cache.
        size = max(1, min(len(active), _FEATURE_BYTES // (4 * arrays["norm"][0].size * key.shape[1])))
        count = active.sum(dtype=jnp.int32)
        chosen_first = jnp.pad(jnp.argsort(~active, stable=True), (0, -len(active) % size))

        def block_of_rows(block, sums):
            chosen = jax.lax.dynamic_slice_in_dim(chosen_first, block * size, size).astype(jnp.int32)
            features = (
                feature_maps.symmetric_power(jnp.moveaxis(key[chosen], 1, 2), plan.power) * to_end[chosen]
            )
            left = count - block * size
            return kernels.fold(
                *sums, chosen, left, features, value[chosen], across[chosen], interpret=plan.interpret
            )

        blocks = (count + size - 1) // size
        kv, norm = jax.lax.fori_loop(jnp.int32(0), blocks, block_of_rows, (arrays["kv"], arrays["norm"]))
        return {"kv": kv, "norm": norm}

    arrays = {
        "key": tokens["keys"],
        "value": tokens["values"],
        "log_decay": tokens["log_decays"],
        "kv": state.kv,
        "norm": state.norm,
        "active": active,
    }
    return sharding.per_device(compute, arrays, _LAYOUTS, ("kv", "norm"))
