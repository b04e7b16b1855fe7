"""The plain chunked form with the roundings of its kernels, whose errors are the measure of theirs."""

import functools

import jax
import jax.numpy as jnp

from sympow_jax.ops import attend, mean, plan
from sympow_jax.ops.tokens import Tokens
from tests.ops import cases


@functools.partial(jax.jit, static_argnames=("power", "chunk_size", "exact_window"))
def outputs_and_gradients(drawn, *, power, chunk_size=None, exact_window=64):
    """Returns the output of 16-bit inputs and its gradients, as `power_attention` has them with `xla`.

    As the kernels do, the backward pass reads an output that is rounded to 16 bits: with o = n / d, the gradient of d
    is -(dn . o). The op itself keeps it in float32.
    """
    names = [name for name in cases.GRADIENTS if drawn[name] is not None]

    def loss(arguments):
        arrays = {"log_decay": None, **arguments, "segment_ids": drawn["segment_ids"]}
        tokens = Tokens(**arrays)
        undivided = plan.make(
            tokens,
            None,
            power=power,
            form="chunked",
            implementation="xla",
            chunk_size=chunk_size,
            exact_window=exact_window,
            return_state=False,
            axis_name=None,
            division=mean.Division.NONE,
        )
        sums, _ = attend.attend(undivided, tokens=tokens, state=None)
        numerator, denominator = sums[..., :-1], sums[..., -1:]
        some = denominator > 0
        fixed = jax.lax.stop_gradient(jnp.where(some, denominator, 1))
        out = jnp.where(some, numerator / fixed, 0).astype(tokens.value.dtype)
        rounded = jax.lax.stop_gradient(out.astype(sums.dtype))
        return (drawn["dout"] * jnp.where(some, numerator - rounded * denominator, 0) / fixed).sum(), out

    gradients, out = jax.grad(loss, has_aux=True)({name: drawn[name] for name in names})
    return {"out": out} | gradients
