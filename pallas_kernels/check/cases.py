"""Cases of `sympow check`: a kernel, a shape, and its expected results."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import power_attention, power_state, power_step
from pallas_kernels.check import formula
from pallas_kernels.hopper import launch

__all__ = ["CASES", "Case", "Prepared", "prepare"]

WINDOW = 64
# Maximum numbers of queries and of features of a state that are compared.
ROWS, FEATURES = 192, 192
# Relative RMS errors. Outputs and gradients are rounded to bfloat16, whose unit is 2^-8; operands made from them are
# rounded to 11 bits, states to float16. Results that are float32 throughout err by the length of their sums.
OUTPUT, GRADIENT, FLOAT16, FLOAT32 = 2.0**-8, 2.0**-7, 2.0**-10, 2.0**-18


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel at one shape.

    Attributes:
        kernel: key of `_KERNELS`.
        family: one of `verdict.FAMILIES`, or "toolchain".
        power: p.
        head_dim: D, and E unless `value_dim` is set.
        time: T, or for a step the number of tokens folded at once.
        documents: whether rows hold several documents.
        real: whether the shape is that of a real model; such cases are timed.
    """

    kernel: str
    family: str
    power: int = 2
    head_dim: int = 64
    value_dim: int | None = None
    time: int = 300
    batch: int = 2
    kv_heads: int = 2
    group: int = 2
    documents: bool = True
    real: bool = False

    @property
    def name(self) -> str:
        """Name that is unique among `CASES`."""
        sizes = f"p{self.power}-d{self.head_dim}-e{self.width}-t{self.time}-b{self.batch}"
        return f"{self.family}.{self.kernel}-{sizes}-k{self.kv_heads}-g{self.group}"

    @property
    def brief(self) -> bool:
        """True if `--brief` runs the case: all small ones, and of real shapes few kernels with D below 128."""
        return not self.real or (self.kernel in _BRIEF and self.head_dim < 128)

    @property
    def width(self) -> int:
        """Value size E."""
        return self.value_dim or self.head_dim


class Prepared(NamedTuple):
    """A case that is ready to run.

    Attributes:
        call: maps arrays to results by name; to be jitted.
        arrays: argument of `call`.
        compare: maps results to the arrays that are compared with `expected`.
        expected: results of plain JAX, by name.
        bounds: largest allowed relative RMS error of each.
    """

    call: Callable[[dict], dict]
    arrays: dict
    compare: Callable[[dict], dict]
    expected: dict
    bounds: dict[str, float]


def prepare(case: Case, interpret=None) -> Prepared:
    """Draws the arrays of a case and computes its expected results.

    Args:
        case: one of `CASES`.
        interpret: parameters of the GPU interpreter, or None to run on a GPU.
    """
    return _KERNELS[case.kernel](case, interpret)


class _Sequence(NamedTuple):
    """Arguments of an op for whole sequences, and the rows of them that are compared."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    dout: jax.Array  # zero except in the rows that are compared
    log_decay: np.ndarray  # without boundaries
    documents: np.ndarray  # int32 [B, T], numbered from 0
    positions: np.ndarray

    @classmethod
    def of(cls, case: Case) -> "_Sequence":
        """Draws random arrays.

        Memory grows from 50 tokens in the first head to 20,000 in the last.
        """
        random = np.random.default_rng(0)
        lead = case.batch, case.time

        def normal(*sizes):
            drawn = random.standard_normal((*lead, *sizes), np.float32)
            return jnp.asarray(drawn, jnp.bfloat16)

        heads = case.kv_heads * case.group
        positions = np.arange(case.time)
        if case.time > ROWS:
            middle = random.choice(np.arange(1, case.time - 1), ROWS - 2, replace=False)
            positions = np.sort(np.concatenate([middle, [0, case.time - 1]]))
        dout = np.zeros((*lead, heads, case.width), np.float32)
        dout[:, positions] = random.standard_normal((case.batch, len(positions), heads, case.width))
        # Each head has its own decay rate, so that some remember tokens from many chunks before.
        rate = np.geomspace(2e-2, 5e-5, case.kv_heads)
        forgotten = rate * random.uniform(0.5, 1.5, (*lead, case.kv_heads))
        starts = np.zeros(lead, np.int32)
        if case.documents:
            # Boundaries next to the edges of blocks and inside blocks, at different positions in each row.
            for row in range(case.batch):
                for position in (63 + row, 130, 192, case.time // 2, case.time - 20):
                    if 0 < position < case.time:
                        starts[row, position] = 1
        return cls(
            normal(heads, case.head_dim),
            normal(case.kv_heads, case.head_dim),
            normal(case.kv_heads, case.width),
            jnp.asarray(dout, jnp.bfloat16),
            np.log1p(-forgotten).astype(np.float32),
            np.cumsum(starts, 1, dtype=np.int32),
            positions,
        )

    @property
    def decays(self) -> formula.Decays:
        return formula.Decays.of(self.log_decay)

    @property
    def bounded_decay(self) -> jax.Array:
        """Log decays with a boundary value, below -87, at the first token of each later document."""
        starts = np.diff(self.documents, axis=1, prepend=0) > 0
        return jnp.asarray(np.where(starts[..., None], -88, self.log_decay))

    def rows(self, power: int) -> formula.Rows:
        """Returns the expected results of the queries at `positions`."""
        call = jax.jit(functools.partial(formula.attend, power=power))
        return call(self.query, self.key, self.value, self.decays, self.documents, self.positions)

    def gradients(self, power: int) -> dict[str, jax.Array]:
        """Returns the expected gradients.

        The gradient of log_decay is zero at the first token of a document, where a boundary replaces the decay.
        """
        call = jax.jit(functools.partial(formula.gradients, power=power))
        cotangent = self.dout[:, self.positions].astype(jnp.float32)
        found = call(self.query, self.key, self.value, self.decays, self.documents, self.positions, cotangent)
        starts = np.diff(self.documents, axis=1, prepend=0) > 0
        found["log_decay"] = jnp.where(starts[..., None], 0, found["log_decay"])
        return found

    def compared_rows(self, results: dict) -> dict:
        """Returns the results at `positions`."""
        return {name: x[:, self.positions] for name, x in results.items()}


def _copy(case, interpret):
    """Prepares a copy of a block through shared memory by TMA, the minimum that all kernels need of the toolchain."""
    shape = (case.time, case.head_dim)

    def body(source, target, smem, full):
        plgpu.copy_gmem_to_smem(source, smem, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(smem, target)
        plgpu.wait_smem_to_gmem(0)

    def call(arrays):
        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
            scratch_types=[plgpu.SMEM(shape, jnp.float32), plgpu.Barrier()],
            kernel_name="check_copy",
            **launch.interpreted(interpret),
        )
        return {"copy": kernel(arrays["source"])}

    source = jax.random.normal(jax.random.key(0), shape)
    return Prepared(call, {"source": source}, dict, {"copy": source}, {"copy": 0.0})


def _attention_results(case, interpret, arrays):
    fixed = {"power": case.power, "interpret": interpret}
    fixed |= {name: arrays[name] for name in ("log_decay", "segment_ids")}
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    return power_attention.power_attention(query, key, value, **fixed), fixed


def _attention_forward(case, interpret):
    drawn = _Sequence.of(case)
    rows = drawn.rows(case.power)

    def call(arrays):
        found, _ = _attention_results(case, interpret, arrays)
        mean = found["out"].astype(jnp.float32) + found["remainder"].astype(jnp.float32)
        weights = jnp.moveaxis(jnp.ldexp(found["weight_sum"], found["weight_exponent"]), 1, 2)
        return {"mean": mean, "denominator": weights[:, : case.time]}

    bounds = {"mean": OUTPUT, "denominator": FLOAT16}
    return Prepared(call, _attention_arrays(drawn), drawn.compared_rows, rows._asdict(), bounds)


def _attention_arrays(drawn):
    arrays = {name: getattr(drawn, name) for name in ("query", "key", "value", "dout")}
    return arrays | {"log_decay": jnp.asarray(drawn.log_decay), "segment_ids": jnp.asarray(drawn.documents)}


def _attention_gradients(names, case, interpret):
    drawn = _Sequence.of(case)
    expected = {name: x for name, x in drawn.gradients(case.power).items() if name in names}

    def call(arrays):
        found, fixed = _attention_results(case, interpret, arrays)
        inputs = {name: arrays[name] for name in ("query", "key", "value", "dout")}
        results = power_attention.power_attention_vjp(**inputs, saved=found, **fixed)
        found = dict(zip(("query", "key", "value", "log_decay"), results))
        # Only the named gradients are returned, so that XLA drops the kernels of the others.
        return {name: found[name] for name in names}

    return Prepared(call, _attention_arrays(drawn), dict, expected, dict.fromkeys(names, GRADIENT))


def _state_arguments(case, drawn, interpret):
    """Returns the arguments of all parts of the chunked form, their static options, and what enters the state."""
    included = np.broadcast_to(np.arange(case.time) < case.time - WINDOW, (case.batch, case.time))
    arrays = {name: getattr(drawn, name) for name in ("query", "key", "value", "dout")}
    arrays |= {"log_decay": drawn.bounded_decay, "folds": jnp.asarray(included)}
    call = power_state.call_for(
        arrays["key"],
        arrays["value"],
        power=case.power,
        exact_window=WINDOW,
        # Small shapes have several chunks too.
        chunk=None if case.real else 192,
        interpret=interpret,
    )
    return arrays, call, included


def _of_state(arrays, *names):
    return tuple(arrays[name] for name in (*names, "key", "value", "log_decay", "folds"))


def _state_update(case, interpret):
    drawn = _Sequence.of(case)
    arrays, kernels, included = _state_arguments(case, drawn, interpret)
    sample = formula.monomials(case.head_dim, case.power, FEATURES, 0)
    expected = formula.state(
        drawn.key, drawn.value, drawn.log_decay, drawn.documents, jnp.asarray(included), sample
    )

    def call(arrays):
        _, (kv, norm) = power_state.fold(*_of_state(arrays), call=kernels)
        return {"kv": kv, "norm": norm}

    def compare(results):
        return {name: x[:, :, sample[0]] for name, x in results.items()}

    return Prepared(call, arrays, compare, expected, {"kv": FLOAT16, "norm": FLOAT16})


def _state_query(case, interpret):
    drawn = _Sequence.of(case)
    arrays, kernels, _ = _state_arguments(case, drawn, interpret)
    rows = drawn.rows(case.power)

    def call(arrays):
        saved, _ = power_state.fold(*_of_state(arrays), call=kernels)
        out, denominator = power_state.attend(*_of_state(arrays, "query"), saved, call=kernels)
        # The kernel divides each query by a power of two; its denominators are those of the divided queries.
        largest = jnp.abs(arrays["query"].astype(jnp.float32)).max(-1)
        return {"mean": out, "denominator": jnp.ldexp(denominator, case.power * jnp.frexp(largest)[1])}

    bounds = {"mean": OUTPUT, "denominator": FLOAT16}
    return Prepared(call, arrays, drawn.compared_rows, rows._asdict(), bounds)


def _state_results(arrays, kernels):
    (out, denominator, _), saved = power_state.power_state_fwd(*_of_state(arrays, "query"), call=kernels)
    return out, denominator, saved


def _state_dual(case, interpret):
    drawn = _Sequence.of(case)
    arrays, kernels, _ = _state_arguments(case, drawn, interpret)
    sample = formula.monomials(case.head_dim, case.power, FEATURES, 0)
    cotangent = drawn.dout[:, drawn.positions].astype(jnp.float32)
    expected = formula.state_gradient(
        drawn.query, drawn.rows(case.power), drawn.decays, drawn.documents, drawn.positions, cotangent, sample
    )

    def call(arrays):
        out, denominator, _ = _state_results(arrays, kernels)
        _, (kv, norm) = power_state.fold_vjp(
            *_of_state(arrays, "query"), out, denominator, arrays["dout"], call=kernels
        )
        return {"kv": kv, "norm": norm}

    def compare(results):
        return {name: x[:, :, sample[0]] for name, x in results.items()}

    return Prepared(call, arrays, compare, expected, {"kv": FLOAT16, "norm": FLOAT16})


def _state_gradients(names, case, interpret, forgets=False):
    drawn = _Sequence.of(case)
    if forgets:
        # A fifth of the tokens forget all but 4e-8 of what was before them, and a query is almost orthogonal to its own
        # key, which there outweighs the others all the same. Rounding the output that the backward pass reads would
        # add 7e-2 to the error.
        gates = np.random.default_rng(1).random(drawn.log_decay.shape) < 0.2
        query, key = (x.astype(jnp.float32) for x in (drawn.query, jnp.repeat(drawn.key, case.group, 2)))
        query += key * (2**-10 - (query * key).sum(-1, keepdims=True) / (key * key).sum(-1, keepdims=True))
        drawn = drawn._replace(
            query=query.astype(drawn.query.dtype),
            log_decay=np.where(gates, np.float32(-17), drawn.log_decay),
        )
    arrays, kernels, _ = _state_arguments(case, drawn, interpret)
    expected = {name: x for name, x in drawn.gradients(case.power).items() if name in names}

    def call(arrays):
        out, denominator, saved = _state_results(arrays, kernels)
        found, _ = power_state.power_state_vjp(
            *_of_state(arrays, "query"),
            out,
            denominator,
            saved,
            arrays["dout"],
            call=kernels,
        )
        return {name: getattr(found, name) for name in names}

    starts = np.diff(drawn.documents, axis=1, prepend=0) > 0

    def compare(results):
        # The gradient of a boundary is meaningless.
        return {
            name: jnp.where(starts[..., None], 0, x) if name == "log_decay" else x
            for name, x in results.items()
        }

    # The gradient of log_decay is not rounded.
    bounds = {name: 2 * FLOAT16 if name == "log_decay" else OUTPUT for name in names}
    return Prepared(call, arrays, compare, expected, bounds)


def _step_read(case, interpret):
    random = np.random.default_rng(0)
    batch, kv_heads, group, width = case.batch, case.kv_heads, case.group, case.width
    features = formula.monomials(case.head_dim, case.power, 10**9, 0)
    count = len(features[0])

    def normal(*sizes):
        return jnp.asarray(random.standard_normal(sizes, np.float32))

    arrays = {
        "features": normal(batch, kv_heads, group, count),
        "kv": normal(batch, kv_heads, count, width),
        "norm": normal(batch, kv_heads, count),
        "query": normal(batch, kv_heads, group, case.head_dim),
        "keys": normal(batch, 2 * case.time, kv_heads, case.head_dim),
        "values": normal(batch, 2 * case.time, kv_heads, width),
        "decay": jnp.asarray(random.uniform(0, 1, (batch, kv_heads, 2 * case.time)), jnp.float32),
    }

    def call(arrays):
        names = "numerator", "denominator"
        return dict(zip(names, power_step.read(**arrays, power=case.power, interpret=interpret)))

    @jax.jit
    def plain(features, kv, norm, query, keys, values, decay):
        exact = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
        weights = exact("bkgd,bwkd->bkgw", query, keys) ** case.power * decay[:, :, None]
        numerator = exact("bkgf,bkfe->bkge", features, kv) + exact("bkgw,bwke->bkge", weights, values)
        return {
            "numerator": numerator,
            "denominator": exact("bkgf,bkf->bkg", features, norm) + weights.sum(-1),
        }

    return Prepared(call, arrays, dict, plain(**arrays), {"numerator": FLOAT32, "denominator": FLOAT32})


def _step_fold(case, interpret):
    random = np.random.default_rng(0)
    batch, kv_heads, width, exact_window = case.batch, case.kv_heads, case.width, case.time
    count = len(formula.monomials(case.head_dim, case.power, 10**9, 0)[0])

    def normal(*sizes):
        return jnp.asarray(random.standard_normal(sizes, np.float32))

    # One row is left out, so that writes outside the chosen rows are detected.
    rows = np.roll(np.arange(batch, dtype=np.int32)[::-1], -1)
    chosen = max(batch - 1, 1)
    arrays = {
        "kv": normal(batch, kv_heads, count, width),
        "norm": normal(batch, kv_heads, count),
        "rows": jnp.asarray(rows),
        "count": jnp.int32(chosen),
        "features": normal(batch, kv_heads, exact_window, count),
        "values": normal(batch, exact_window, kv_heads, width),
        "carry": jnp.asarray(random.uniform(0, 1, (batch, kv_heads)), jnp.float32),
    }

    def call(arrays):
        return dict(zip(("kv", "norm"), power_step.fold(**arrays, interpret=interpret)))

    @jax.jit
    def plain(kv, norm, rows, count, features, values, carry):
        del count
        exact = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
        first, place = slice(chosen), rows[:chosen]
        added = exact("nkwf,nwke->nkfe", features[first], values[first])
        decay = carry[first]
        kv = kv.at[place].set(kv[place] * decay[..., None, None] + added)
        norm = norm.at[place].set(norm[place] * decay[..., None] + features[first].sum(2))
        return {"kv": kv, "norm": norm}

    return Prepared(call, arrays, dict, plain(**arrays), {"kv": FLOAT32, "norm": FLOAT32})


_OF_KEYS = ("key", "value", "log_decay")
_KERNELS: dict[str, Callable[..., Prepared]] = {
    "copy": _copy,
    "forward": _attention_forward,
    "query_vjp": functools.partial(_attention_gradients, ("query",)),
    "key_vjp": functools.partial(_attention_gradients, _OF_KEYS),
    "state_update": _state_update,
    "state_query": _state_query,
    "state_dual_update": _state_dual,
    "state_query_vjp": functools.partial(_state_gradients, ("query",)),
    "state_key_vjp": functools.partial(_state_gradients, _OF_KEYS),
    "state_forgets": functools.partial(_state_gradients, ("key",), forgets=True),
    "read": _step_read,
    "fold": _step_fold,
}
_ATTENTION = ("forward", "query_vjp", "key_vjp")
_BRIEF = ("fold", "read", "forward", "key_vjp", "state_query", "state_key_vjp")
_STATE = ("state_update", "state_query", "state_dual_update", "state_query_vjp", "state_key_vjp")


def _each(kernels, family, **sizes):
    return [Case(kernel=kernel, family=family, **sizes) for kernel in kernels]


def _small():
    step = {"kernel": "fold", "family": "power_step", "group": 1}
    # The last tile of a head is full only at some sizes.
    yield Case(**step, head_dim=16, time=8)
    yield Case(**step, head_dim=64, time=64, batch=3)
    step |= {"kernel": "read", "group": 2}
    yield Case(**step, head_dim=16, time=8)
    yield Case(**step, head_dim=64, time=64)
    for power, head_dim in ((2, 64), (4, 64), (2, 128), (2, 32)):
        yield from _each(_ATTENTION, "power_attention", power=power, head_dim=head_dim)
    for head_dim in (64, 32, 128):
        yield from _each(_STATE, "power_state_square", head_dim=head_dim, time=700)
    for head_dim in (16, 32):
        yield from _each(_STATE, "power_state_quartic", power=4, head_dim=head_dim, time=700)
    yield Case(kernel="state_forgets", family="power_state_square", documents=False)


def _real():
    model = {"batch": 1, "kv_heads": 8, "group": 1, "documents": False, "real": True}
    decode = model | {"batch": 64, "time": 64, "family": "power_step"}
    yield Case(kernel="fold", **decode)
    yield Case(kernel="read", **decode)
    for power, head_dim in ((2, 64), (4, 64), (2, 128)):
        yield from _each(_ATTENTION, "power_attention", power=power, head_dim=head_dim, time=8192, **model)
    yield from _each(_STATE, "power_state_square", time=65_536, **model)
    for head_dim in (32, 128):
        yield from _each(_STATE, "power_state_square", head_dim=head_dim, time=16_384, **model)
    for head_dim, time in ((16, 16_384), (32, 8192)):
        yield from _each(_STATE, "power_state_quartic", power=4, head_dim=head_dim, time=time, **model)


# Smallest first, so that the first failure is the simplest.
CASES: tuple[Case, ...] = (
    Case(kernel="copy", family="toolchain", time=64, batch=1, kv_heads=1, group=1, documents=False),
    *_small(),
    *_real(),
)
