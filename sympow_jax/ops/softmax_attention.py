"""Softmax attention, causal or bidirectional, with decays and documents, using `jax.nn.dot_product_attention`."""

import contextlib
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import ad_checkpoint

from sympow_jax.array_types import Array, Bool, Float, Int
from sympow_jax.ops import (
    arguments,
    containment,
    documents,
    fixed_point,
    layout,
    means,
    pairwise,
    sharding,
    target,
    time_axis,
)
from sympow_jax.ops.tokens import SEQUENCE, Tokens

# Queries are split into runs, each attending to the keys up to its last query. With 4 runs a fifth of the computed
# scores is masked; with a single run it would be half. Each run is compiled separately.
_RUNS = 4
# Queries per block if a window has fewer tokens. Longer blocks compute more masked scores: at T = 8,192 on a CPU core,
# both passes took 2.3 times as long with blocks of 512 as with blocks of 128, for windows of 64 and of 128.
_LEAST_BLOCK = 128
_IMPLEMENTATIONS = ("xla", "cudnn")
# Compute capabilities of GPUs before Ampere, which cuDNN's flash attention does not support.
_BEFORE_AMPERE = ("5.", "6.", "7.")


def softmax_attention(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K E"],
    *,
    log_decay: Float[Array, "B S K"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    block_size: int = 512,
    axis_name: str | None = None,
) -> Float[Array, "B T N E"]:
    """Computes Y_i = sum_j A_ij V_j with A_i = softmax_j(scale Q_i . K_j + G_i - G_j) over j <= i.

    With a window of w tokens, i - w < j <= i, where padding does not count. The softmax is in float32, also for float64
    inputs; the output has the dtype of `value`.

    Args:
        query: the last T of S positions; N is a multiple of K.
        key: S >= T.
        value: E may differ from D.
        log_decay: natural logarithm of a decay, of which G is the running sum, exact to 2^-32 per step; values are
            clipped to [1 - 2^31 / S, 0]. A constant -m is ALiBi with slope m (appendix A.2 of "Conformal
            Transformations for Symmetric Power Transformers", Kumar et al. 2025). A token's own decay does not discount
            its own key.
        segment_ids: documents, as in `ops.documents`. No query attends across a boundary. Padding outputs zero, is
            masked as a key and does not decay.
        causal: if False, attention is bidirectional within a document, and log_decay must be None.
        window: number of tokens of its document that a query attends to: its own and those directly before it. None
            for all before it. Causal attention only.
        scale: a finite number; defaults to 1 / sqrt(D). To learn one, multiply the query by it.
        implementation: `xla` processes queries `block_size` at a time and recomputes them in the backward pass. Its
            memory is a few times that of one block's scores, 4 B N block_size S bytes, plus memory linear in S. With a
            window, its cost is that of T (window + block_size) pairs, if S is larger than window + block_size. `cudnn`
            is cuDNN's flash attention, on NVIDIA GPUs, in 16 bits, without decays, documents or a KV cache. Its
            gradients differ between runs in the last bits unless XLA is run with --xla_gpu_deterministic_ops=true. None
            uses `cudnn` if it supports the request, and `xla` otherwise.
        block_size: queries per block of `xla`, with a window at most the larger of 128 and the window. Changes only
            speed and memory.
        axis_name: a manual mesh axis of a `jax.shard_map` over which time is sharded in order. Arguments and output are
            this device's shard, of equal length on all devices. Each device computes a part of the heads over the whole
            time axis. The numbers of keys and queries must be equal.

    Raises:
        ValueError: for shapes or options that do not match each other.
        NotImplementedError: if `cudnn` is requested and does not support the request, naming the constraint; for a KV
            cache if time is sharded.

    Examples:
        >>> import jax.numpy as jnp
        >>> from sympow_jax import ops
        >>> query = jnp.ones((1, 32, 4, 16))  # [B, T, N, D]
        >>> key, value = jnp.ones((2, 1, 32, 2, 16))  # two query heads share a key head
        >>> slopes = jnp.asarray(ops.alibi_slopes(2))
        >>> ops.softmax_attention(query, key, value, log_decay=jnp.broadcast_to(-slopes, (1, 32, 2))).shape
        (1, 32, 4, 16)
    """
    tokens = Tokens.of(query, key, value, log_decay, segment_ids)
    arguments.check_choice("implementation", implementation, (None, *_IMPLEMENTATIONS))
    plan = pairwise.prepare(
        tokens,
        causal=causal,
        scale=scale,
        block_size=block_size,
        axis_name=axis_name,
        window=window,
        implementation=implementation,
    )
    return _call(plan, tokens=tokens)


@sharding.op({"tokens": SEQUENCE}, lambda plan: "B T N E")
def _call(plan, tokens):
    scale = 1 / math.sqrt(tokens.query.shape[-1]) if plan.scale is None else plan.scale
    return time_axis.by_heads(functools.partial(_attend_all, plan, scale), tokens, plan.axis_name)


def _attend_all(plan, scale, tokens):
    """Computes `softmax_attention` on a device that holds the whole time axis."""
    if plan.window is not None and plan.window >= tokens.key.shape[1]:
        plan = plan._replace(window=None)
    finite = containment.remove(tokens, causal=plan.causal, window=plan.window)
    dtype, value_dim = tokens.value.dtype, tokens.value.shape[-1]
    # `dot_product_attention` requires D = E, and zeros change no score.
    arrays = [x.astype(dtype) for x in finite.tokens[:3]]
    size = max(x.shape[-1] for x in arrays)
    query, key, value = (layout.pad_last(x, 0, size - x.shape[-1]) for x in arrays)
    wide = finite.tokens._replace(query=query, key=key, value=value)
    out = None
    if plan.implementation != "xla":
        try:
            out = _cudnn(plan, scale, wide)
        except NotImplementedError:
            if plan.implementation == "cudnn":
                raise
    if out is None:
        with jax.named_scope("softmax_xla"):
            out = _xla(plan, scale, wide)
    return containment.restore(out[..., :value_dim], finite)


def alibi_slopes(heads: int) -> list[float]:
    """Returns the slopes m of ALiBi (Press et al. 2021, section 3): 2^(-8 i / heads) for i = 1 to heads.

    If heads is not a power of two, these are the slopes of the next lower power, followed by every other slope of the
    next higher one.

    Examples:
        >>> from sympow_jax import ops
        >>> ops.alibi_slopes(4)
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    heads = arguments.check_integer("heads", heads, 1)
    lower = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / lower) for i in range(1, lower + 1)]
    return slopes + [2.0 ** (-8 * i / (2 * lower)) for i in range(1, 2 * (heads - lower), 2)]


def _cudnn(plan, scale: float, tokens: Tokens) -> Float[Array, "B T N E"]:
    """Computes attention by cuDNN. Raises NotImplementedError, naming the constraint, for unsupported requests."""
    query, key, value, log_decay, segment_ids = tokens
    device = target.device()
    capability = str(getattr(jax.devices()[0], "compute_capability", "unknown"))
    supported = {
        f"a GPU, not {device.device_kind or device.platform}": device.platform == "gpu",
        f"compute capability 8 or more, not {capability}": not capability.startswith(_BEFORE_AMPERE),
        f"bfloat16 or float16, not {value.dtype}": value.dtype in (jnp.bfloat16, jnp.float16),
        "attention without log_decay": log_decay is None,
        "attention without segment_ids": segment_ids is None,
        f"equal numbers of keys and queries, not {key.shape[1]} and {query.shape[1]}": key.shape[1]
        == query.shape[1],
    }
    for constraint, holds in supported.items():
        if not holds:
            raise NotImplementedError(f"implementation 'cudnn' needs {constraint}")
    attend = functools.partial(
        jax.nn.dot_product_attention,
        scale=scale,
        is_causal=plan.causal,
        # The numbers of tokens before and after the query's own.
        local_window_size=None if plan.window is None else (plan.window - 1, 0),
        implementation="cudnn",
    )
    try:
        # JAX checks head sizes, which depend on the version of cuDNN; it raises RuntimeError if cuDNN is missing.
        jax.eval_shape(attend, query, key, value)
    except (NotImplementedError, RuntimeError) as error:
        raise NotImplementedError(f"implementation 'cudnn': {error}") from error
    with jax.named_scope("softmax_cudnn"):
        return attend(query, key, value)


def _xla(plan, scale: float, tokens: Tokens) -> Float[Array, "B T N E"]:
    """Computes attention block by block, with D = E."""
    query, key, value, log_decay, segment_ids = tokens
    dtype = value.dtype
    if dtype == jnp.float16 and target.device().platform != "gpu":
        # JAX asks for products of float16 that only GPUs have.
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    rows, valid = _Rows.of(log_decay, segment_ids, key.shape[1], plan.window)
    before = key.shape[1] - query.shape[1]
    queries, keys = (query, _slice_time(rows, before, key.shape[1])), (key, value, rows)
    if plan.window is not None:
        plan = plan._replace(block_size=min(plan.block_size, max(_LEAST_BLOCK, plan.window)))
    if plan.window is None or key.shape[1] <= plan.window + plan.block_size:
        out = _attend_runs(queries, keys, plan, scale)
    elif valid is None:
        out = _attend_slices(queries, keys, plan, scale)
    else:
        # With padding moved to the front, and tokens in order, those of a window are neighbors.
        query_order, key_order = (
            jnp.argsort(tokens, axis=1, stable=True) for tokens in (valid[:, before:], valid)
        )
        ordered = layout.reordered(queries, query_order), layout.reordered(keys, key_order)
        out = layout.reordered(_attend_slices(*ordered, plan, scale), jnp.argsort(query_order, axis=1))
    out = out.astype(dtype)
    out = out if valid is None else jnp.where(valid[:, before:, None, None], out, 0)
    return ad_checkpoint.checkpoint_name(out, means.SAVED_AS)


class _Rows(NamedTuple):
    """Document, place and decay of each position, which with the scores determine the attention weights.

    document: number of the document, counted from 1 in the row; -1 for padding.
    ordinal: number of tokens up to this one; None without a window.
    decay: -G, a whole part and a fraction.

    With a window and without segment ids, the first two have a single row.
    """

    document: Int[Array, "B S"] | None
    ordinal: Int[Array, "B S"] | None
    decay: tuple[Int[Array, "B S K"], Float[Array, "B S K"]] | None

    @classmethod
    def of(
        cls, log_decay, segment_ids, time: int, window: int | None
    ) -> tuple["_Rows", Bool[Array, "B S"] | None]:
        """Returns the rows, and a mask of tokens that are not padding, None without segment ids.

        -G is exact, so that differences are right to rounding: a plain float32 sum above 1e4 loses the small steps
        after it. The derivative of the fraction stands for that of -G.
        """
        document = ordinal = decay = valid = None
        if segment_ids is not None:
            document = documents.numbered(segment_ids)
            valid = document >= 0
        if window is not None:
            document = jnp.ones((1, time), jnp.int32) if document is None else document
            ordinal = jnp.cumsum(document >= 0, axis=1, dtype=jnp.int32)
        if log_decay is not None:
            log_decay = log_decay.astype(jnp.float32)
            if valid is not None:
                log_decay = jnp.where(valid[..., None], log_decay, 0)
            least = 1 - 2.0**31 / time
            whole, fraction = fixed_point.running_sum(-jnp.clip(jax.lax.stop_gradient(log_decay), least, 0))
            fraction = fixed_point.with_derivative(
                lambda change, *_: -jax.lax.cumsum(change, axis=1),
                fraction.astype(jnp.float32) * 2.0**-32,
                log_decay,
            )
            decay = whole, fraction
        return cls(document, ordinal, decay), valid


def _slice_time(tree, start: int, stop: int):
    """Returns positions start to stop - 1 of arrays [B, T, ...]."""
    return jax.tree.map(lambda x: x[:, start:stop], tree)


def _attend_runs(queries, keys, plan, scale: float) -> Float[Array, "B T N E"]:
    """Computes the outputs of the last T positions of `keys`, run by run."""
    time, before = queries[0].shape[1], keys[0].shape[1] - queries[0].shape[1]
    blocks = -(-time // plan.block_size)
    run_length = -(-blocks // (_RUNS if plan.causal else 1)) * plan.block_size
    runs = []
    for start in range(0, time, run_length):
        stop = min(start + run_length, time)
        run_keys, run_queries = _slice_time(keys, 0, before + stop), _slice_time(queries, start, stop)
        first = before + start
        if stop - start <= plan.block_size:
            runs.append(_attend(jnp.arange(first, before + stop), run_queries, run_keys, plan, scale))
            continue

        def attend(begin, block_queries, first=first, run_keys=run_keys):
            steps = first + begin + jnp.arange(plan.block_size)
            return _attend(steps, block_queries, run_keys, plan, scale)

        runs.append(_by_block(attend, run_queries, plan.block_size))
    return jnp.concatenate(runs, axis=1)


def _attend_slices(queries, keys, plan, scale: float) -> Float[Array, "B T N E"]:
    """Computes the outputs of the last T positions of `keys`, each block from the keys of its windows.

    There is no padding between tokens.
    """
    time, key_time = queries[0].shape[1], keys[0].shape[1]
    # A block and the window - 1 tokens before it. The first of these may be before the keys.
    length = plan.window - 1 + plan.block_size
    start = key_time - time - (plan.window - 1)
    missing = max(0, -start), -time % plan.block_size

    def padded(x, number=0):
        widths = [(0, 0), missing] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x[:, max(0, start) :], widths, constant_values=number)

    key, value, rows = keys
    document = padded(rows.document, -1)
    keys = padded(key), padded(value), jax.tree.map(padded, rows)._replace(document=document)
    steps = plan.window - 1 + jnp.arange(plan.block_size)

    def attend(start, block_queries):
        block_keys = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, length, axis=1), keys)
        return _attend(steps, block_queries, block_keys, plan, scale)

    return _by_block(attend, queries, plan.block_size)


def _by_block(attend, queries, block_size: int) -> Float[Array, "B T N E"]:
    """Concatenates the outputs of `attend(start, block)` for all blocks of queries.

    Only inputs and outputs of a block stay in memory after it.
    """
    time = queries[0].shape[1]
    blocks = -(-time // block_size)

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, blocks * block_size - time)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], blocks, block_size, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def attend_block(block):
        index, block_queries = block
        return attend(index * block_size, block_queries)

    out = jax.lax.map(attend_block, (jnp.arange(blocks), jax.tree.map(split, queries)))
    out = jnp.moveaxis(out, 0, 1)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :time]


def _attend(steps: Int[Array, " T"], queries, keys, plan, scale: float) -> Float[Array, "B T N E"]:
    """Computes the outputs of queries at positions `steps` of the keys."""
    (query, query_rows), (key, value, key_rows) = queries, keys
    last = steps if plan.causal else jnp.full_like(steps, key.shape[1])
    mask = (last[:, None] >= jnp.arange(key.shape[1]))[None, None]
    if key_rows.document is not None:
        same = query_rows.document[:, :, None] == key_rows.document[:, None, :]
        mask &= (same & (key_rows.document >= 0)[:, None, :])[:, None]
    if plan.window is not None:
        age = query_rows.ordinal[:, :, None] - key_rows.ordinal[:, None, :]
        mask &= (age < plan.window)[:, None]
    bias = None
    if key_rows.decay is not None:
        whole, fraction = (
            k[:, None, :] - q[:, :, None] for q, k in zip(query_rows.decay, key_rows.decay, strict=True)
        )
        bias = jnp.moveaxis(whole.astype(jnp.float32) + fraction, -1, 1)
        bias = jnp.repeat(bias, query.shape[2] // key.shape[2], axis=1)
    exact = jax.default_matmul_precision("highest")
    with exact if query.dtype == jnp.float32 else contextlib.nullcontext():
        return jax.nn.dot_product_attention(query, key, value, bias, mask, scale=scale)
