"""Builds the JAX contenders for a shape, compiles them and checks their results against float32."""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import _timing
from benchmarks._shapes import WINDOW, Row
from pallas_kernels.check import supervisor
from sympow_jax import ops
from sympow_jax.training import summary

# Error bounds for bfloat16 inputs, as stated in the README.
VALUE_BOUND, GRADIENT_BOUND = 1e-2, 2e-2
# Gradients are compared at this length, or at the shape's own length if that is shorter.
GRADIENT_TIME = 2048
# Number of rows in which values are compared, at the end and in the middle of the timed sequence.
ROWS = 128
ARGUMENTS = ("query", "key", "value", "log_decay")


class WrongResult(Exception):
    """A contender's result is further from float32 than bfloat16 explains."""


class Prepared(NamedTuple):
    """A contender that has been compiled, run and checked."""

    sample: Callable[[int], _timing.Sample]  # times a number of calls
    error: float  # relative RMS error of the values
    memory: int | None  # peak bytes of a call, arguments included, if known
    kernels: Callable[[], dict[str, float] | None]  # returns the seconds of each kernel of a call, if known
    steps: int = 1  # timed operations in a call


def _prepared(program: jax.stages.Compiled, inputs: list[tuple], error: float, *, steps: int = 1) -> Prepared:
    return Prepared(
        functools.partial(_timing.queued, program, inputs),
        error,
        summary.program_bytes(program),
        functools.partial(_timing.kernel_seconds, program, inputs),
        steps,
    )


def prepare(row: Row) -> Prepared:
    """Compiles the contender of a row, runs it and checks its result.

    Raises NotImplementedError if the contender does not support the shape, WrongResult if its result is wrong.
    """
    if row.mode == "step":
        return _prepare_step(row)
    contender, formula = _contender(row)
    inputs = [draw(row, seed) for seed in range(2)]
    if row.mode == "training":
        call = _both_passes(contender)
        inputs = [(*arguments, draw(row, 7)[0]) for arguments in inputs]
        program, (out, gradients) = _run(call, *inputs[0])
        _require_finite(gradients)
        arguments = inputs[0]
        if row.time > GRADIENT_TIME:
            shorter = dataclasses.replace(row, time=GRADIENT_TIME, batch=1)
            arguments = (*draw(shorter, 3), draw(shorter, 7)[0])
            _, (_, gradients) = _run(call, *arguments)
        # Gradients of the batch's last sequence. Softmax attention has no gates here: their gradient is zero.
        exact = [x[-1:].astype(jnp.float32) for x in arguments]
        _, (_, expected) = _run(_both_passes(formula), *exact)
        for name, found, wanted in zip(ARGUMENTS, gradients, expected, strict=True):
            if bool(jnp.any(wanted)):
                require_close(f"the gradient of {name}", float(rms_error(found[-1:], wanted)), GRADIENT_BOUND)
    else:
        program, out = _run(contender, *inputs[0])
    _require_finite(out)

    def row_error(end, arguments, out):
        """Returns the RMS error of the rows just before `end`, which attend to all earlier keys."""
        query, key, value, log_decay = (x[-1:, :end].astype(jnp.float32) for x in arguments[:4])
        return rms_error(out[-1:, max(end - ROWS, 0) : end], formula(query[:, -ROWS:], key, value, log_decay))

    # Rows at the end and in the middle of the batch's last sequence.
    ends = (row.time // 2 + 1, row.time)
    error = float(max(_run(functools.partial(row_error, end), inputs[0], out)[1] for end in ends))
    require_close("the output", error, VALUE_BOUND)
    return _prepared(program, inputs, error)


def _run(function, *arguments):
    """Compiles a function, then calls it while it holds the device; returns the program and the result."""
    with supervisor.tuning():
        program = jax.jit(function).lower(*arguments).compile()
    with supervisor.exclusive():
        return program, jax.block_until_ready(program(*arguments))


def draw(row: Row, seed: int) -> tuple[jax.Array, ...]:
    """Draws query, key, value and log_decay while it holds the device."""
    with supervisor.exclusive():
        return jax.block_until_ready(_drawn(row, seed))


@functools.partial(jax.jit, static_argnums=0)
def _drawn(row, seed):
    """Returns query, key and value in bfloat16 and log_decay in float32; heads remember 50 to 100,000 tokens."""
    keys, lead = jax.random.split(jax.random.key(seed), 4), (row.batch, row.time, row.heads)
    vectors = (jax.random.normal(key, (*lead, row.head_dim), jnp.bfloat16) for key in keys[:3])
    gate = jax.random.normal(keys[3], lead) + jnp.linspace(4, 12, row.heads)
    return *vectors, jax.nn.log_sigmoid(gate)


def _contender(row: Row) -> tuple[Callable, Callable]:
    """Returns a contender, of query, key, value and log_decay, and its float32 formula.

    Raises NotImplementedError if it needs a package or a device that is not there.
    """
    form, _, implementation = row.contender.partition("/")
    if form in ("attention", "chunked"):
        options = {"form": form, "implementation": implementation, "chunk_size": row.chunk}

        def power(query, key, value, log_decay):
            return ops.power_attention(
                query, key, value, power=row.power, log_decay=log_decay, exact_window=WINDOW, **options
            )

        return power, _power(row.power)
    if implementation == "cudnn":
        if jax.default_backend() != "gpu":
            raise NotImplementedError("cuDNN needs a GPU")
        attend, name = jax.nn.dot_product_attention, "cudnn"
    else:
        module = "tokamax" if implementation == "tokamax" else "jla.ops"
        try:
            peer = importlib.import_module(module)
        except ImportError as error:
            package = implementation or row.contender
            raise NotImplementedError(f"{package} is not installed ({error})") from error
        if module == "jla.ops":

            def linear(query, key, value, log_decay):
                return peer.linear_attention("simple_gla", query, key, value, g=log_decay, impl="mosaic_gpu")[
                    0
                ]

            return linear, _linear
        attend, name = peer.dot_product_attention, "mosaic"

    def softmax(query, key, value, log_decay):
        return attend(query, key, value, is_causal=True, implementation=name)

    return softmax, lambda query, key, value, log_decay: ops.softmax_attention(query, key, value)


def _power(power):
    """Returns the xla attention form for the last rows of a sequence, given all of its keys."""

    def formula(query, key, value, log_decay):
        return ops.power_attention(
            query, key, value, power=power, log_decay=log_decay, form="attention", implementation="xla"
        )

    return formula


def _linear(query, key, value, log_decay):
    """Computes sum_j exp(G_i - G_j) (q_i . k_j) v_j / sqrt(D) for queries at the last positions of the keys."""
    total = jnp.cumsum(log_decay, 1)
    rows = jnp.arange(key.shape[1] - query.shape[1], key.shape[1])
    seen = (rows[:, None] >= jnp.arange(key.shape[1]))[..., None]
    decay = jnp.exp(jnp.where(seen, total[:, rows, None] - total[:, None], -jnp.inf))
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("btnd,bsnd->btsn", query, key, precision=exact) / math.sqrt(query.shape[-1])
    return jnp.einsum("btsn,bsne->btne", decay * scores, value, precision=exact)


def _both_passes(call):
    """Returns a function that computes values and gradients.

    It returns the values too, because XLA would otherwise drop a forward pass that the gradients do not need.
    """

    def run(*arguments):
        *arguments, dout = arguments
        out, pull_back = jax.vjp(call, *arguments)
        return out, pull_back(dout)

    return run


def _prepare_step(row):
    """Prepares a loop of decode steps on the device, starting from a state after the same number of tokens."""
    both = dataclasses.replace(row, time=2 * row.time)

    def tokens(seed, part):
        return tuple(jnp.moveaxis(x[:, part], 1, 0) for x in draw(both, seed))

    def loop(state, *tokens):
        def step(state, token):
            query, key, value, log_decay = token
            out, state = ops.power_attention_step(
                query, key, value, state, power=row.power, log_decay=log_decay, implementation=implementation
            )
            return state, out

        return jax.lax.scan(step, state, tokens)

    implementation = row.contender.split("/")[1]
    first, second = slice(row.time), slice(row.time, None)
    state = ops.PowerState.zeros(
        row.batch, row.heads, row.head_dim, row.head_dim, power=row.power, exact_window=WINDOW
    )
    program, (state, _) = _run(loop, state, *tokens(0, first))
    inputs = [(state, *tokens(seed, second)) for seed in range(2)]
    with supervisor.exclusive():
        out = jax.block_until_ready(jnp.moveaxis(program(*inputs[0])[1], 0, 1))

    _require_finite(out)
    whole = [x[-1:].astype(jnp.float32) for x in draw(both, 0)]
    _, expected = _run(_power(row.power), whole[0][:, second], *whole[1:])
    error = float(rms_error(out[-1:], expected))
    require_close("the output", error, VALUE_BOUND)
    return _prepared(program, inputs, error, steps=row.time)


@jax.jit
def rms_error(actual: jax.Array, expected: jax.Array) -> jax.Array:
    """Computes RMS(actual - expected) / RMS(expected) in float32."""
    difference = actual.astype(jnp.float32) - expected
    return jnp.sqrt((difference**2).sum() / (expected**2).sum())


def require_close(what: str, found: float, bound: float) -> None:
    """Raises WrongResult unless an error is within its bound."""
    # Not `found > bound`, which is false for NaN.
    if not found <= bound:
        raise WrongResult(f"{what} is off by {found:.1e}, more than {bound:.0e}")


def _require_finite(arrays):
    if not all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(arrays)):
        raise WrongResult("not every number is finite")
