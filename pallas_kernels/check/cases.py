"""Cases of `sympow check`: a pass of a family of kernels, a shape, and its expected results."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import power_attention, power_state, power_step
from pallas_kernels.check import formula
from pallas_kernels.hopper import launch, numerics

WINDOW = 64
# Maximum numbers of queries and of features of a state that are compared.
ROWS, FEATURES = 192, 192
# Relative RMS errors. Outputs and gradients are rounded to bfloat16, whose unit is 2^-8; operands made from them are
# rounded to 11 bits, states to float16. Results that are float32 throughout err by the length of their sums.
OUTPUT, GRADIENT, FLOAT16, FLOAT32 = 2.0**-8, 2.0**-7, 2.0**-10, 2.0**-18


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A pass of a family of kernels at one shape.

    Attributes:
        part: what runs, with `family` a key of `_PREPARED`: a pass, or the read or the fold of a step.
        family: one of `verdict.FAMILIES`, or "toolchain".
        power: p.
        head_dim: D, and E unless `value_dim` is set.
        time: T, or for a step the number of tokens folded at once.
        queries: number of queries, the last of the T tokens; None means T.
        dtype: of queries, keys, values and the output's cotangent, except in a step.
        documents: whether rows hold several documents.
        real: whether the shape is that of a real model; such cases are timed.
    """

    part: str
    family: str
    power: int = 2
    head_dim: int = 64
    value_dim: int | None = None
    time: int = 300
    queries: int | None = None
    dtype: str = "bfloat16"
    batch: int = 2
    kv_heads: int = 2
    group: int = 2
    documents: bool = True
    real: bool = False

    @property
    def name(self) -> str:
        """Name that is unique among `CASES`."""
        sizes = f"p{self.power}-d{self.head_dim}-e{self.width}-t{self.time}-b{self.batch}"
        name = f"{self.family}.{self.part}-{sizes}-k{self.kv_heads}-g{self.group}"
        name += f"-q{self.queries}" if self.queries else ""
        return name if self.dtype == "bfloat16" else f"{name}-{self.dtype}"

    @property
    def brief(self) -> bool:
        """True if `--brief` runs the case: all small ones, and real shapes with D below 128."""
        return not self.real or self.head_dim < 128

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
    return _PREPARED[case.family, case.part](case, interpret)


class _Sequence(NamedTuple):
    """Arguments of an op for whole sequences, and the rows of them that are compared."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    dout: jax.Array  # zero except in the rows that are compared
    log_decay: np.ndarray  # without boundaries
    documents: np.ndarray  # int32 [B, T], numbered from 0
    positions: np.ndarray
    earlier: int  # tokens before the first that is a query

    @classmethod
    def of(cls, case: Case) -> "_Sequence":
        """Draws random arrays.

        Memory grows from 50 tokens in the first head to 20,000 in the last.
        """
        random = np.random.default_rng(0)
        lead = case.batch, case.time

        def normal(*sizes):
            drawn = random.standard_normal((*lead, *sizes), np.float32)
            return jnp.asarray(drawn, case.dtype)

        heads = case.kv_heads * case.group
        earlier = case.time - (case.queries or case.time)
        positions = np.arange(earlier, case.time)
        if len(positions) > ROWS:
            middle = random.choice(positions[1:-1], ROWS - 2, replace=False)
            positions = np.sort(np.concatenate([middle, positions[[0, -1]]]))
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
            jnp.asarray(dout, case.dtype),
            np.log1p(-forgotten).astype(np.float32),
            np.cumsum(starts, 1, dtype=np.int32),
            positions,
            earlier,
        )

    @property
    def arrays(self) -> dict[str, jax.Array]:
        """The arrays of query, key, value and dout, by name."""
        queries = {name: getattr(self, name)[:, self.earlier :] for name in ("query", "dout")}
        return queries | {"key": self.key, "value": self.value}

    @property
    def tokens(self) -> formula.Tokens:
        """The arguments of the formulas."""
        decays = formula.Decays.of(self.log_decay)
        return formula.Tokens(self.query, self.key, self.value, decays, jnp.asarray(self.documents))

    @property
    def starts(self) -> np.ndarray:
        """Mask of the first token of each later document, bool [B, T, 1]."""
        return np.diff(self.documents, axis=1, prepend=0)[..., None] > 0

    @property
    def cotangent(self) -> jax.Array:
        """Cotangent of the rows that are compared."""
        return self.dout[:, self.positions].astype(jnp.float32)

    def rows(self, power: int) -> formula.Rows:
        """Returns the expected results of the queries at `positions`."""
        call = jax.jit(functools.partial(formula.attend, power=power))
        return call(self.tokens, self.positions)

    def gradients(self, power: int) -> dict[str, jax.Array]:
        """Returns the expected gradients.

        The gradient of log_decay is zero at the first token of a document, where a boundary replaces the decay.
        """
        call = jax.jit(functools.partial(formula.gradients, power=power))
        found = call(self.tokens, self.positions, self.cotangent)
        log_decay = jnp.where(self.starts, 0, found["log_decay"])
        return found | {"query": found["query"][:, self.earlier :], "log_decay": log_decay}


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


def _attention(case, interpret, backward=False):
    drawn, options = _Sequence.of(case), {"power": case.power, "interpret": interpret}
    # Without documents, the kernels have no array of visible blocks.
    documents = {"segment_ids": jnp.asarray(drawn.documents) if case.documents else None}
    decays = documents | {"log_decay": jnp.asarray(drawn.log_decay)}

    def found(arrays):
        arrays = {name: x for name, x in arrays.items() if name != "dout"}
        return power_attention.power_attention(**arrays, **options)

    def gradients(arrays):
        results = power_attention.power_attention_vjp(**arrays, saved=found(arrays), **options)
        return dict(zip(("query", "key", "value", "log_decay"), results))

    def means(arrays):
        results = found(arrays)
        mean = results["out"].astype(jnp.float32) + results["remainder"].astype(jnp.float32)
        weights = jnp.moveaxis(jnp.ldexp(results["weight_sum"], results["weight_exponent"]), 1, 2)
        return {"mean": mean, "denominator": weights[:, : mean.shape[1]]}

    def compared(results):
        return {name: x[:, drawn.positions - drawn.earlier] for name, x in results.items()}

    if backward:
        expected = drawn.gradients(case.power)
        return Prepared(gradients, drawn.arrays | decays, dict, expected, dict.fromkeys(expected, GRADIENT))
    bounds = {"mean": OUTPUT, "denominator": FLOAT16}
    return Prepared(means, drawn.arrays | decays, compared, drawn.rows(case.power)._asdict(), bounds)


def _state_arrays(case, drawn, interpret):
    """Returns the arrays of the chunked form and its static options; the last positions enter no state."""
    included = np.broadcast_to(np.arange(case.time) < case.time - WINDOW, (case.batch, case.time))
    # A boundary is a log decay below -87.
    decays = {"log_decay": jnp.asarray(np.where(drawn.starts, -88, drawn.log_decay))}
    call = power_state.call_for(
        drawn.key,
        drawn.value,
        power=case.power,
        exact_window=WINDOW,
        # Small shapes have several chunks too.
        chunk=None if case.real else 192,
        interpret=interpret,
    )
    return drawn.arrays | decays | {"enters_state": jnp.asarray(included)}, call


def _arguments(arrays):
    return power_state.Arguments(*(arrays[name] for name in power_state.Arguments._fields))


def _state_forward(case, interpret):
    drawn = _Sequence.of(case)
    arrays, options = _state_arrays(case, drawn, interpret)
    sample = formula.monomials(case.head_dim, case.power, FEATURES)
    state = formula.state(
        drawn.key, drawn.value, drawn.log_decay, drawn.documents, arrays["enters_state"], sample
    )

    def call(arrays):
        arguments = _arguments(arrays)
        saved, (kv, norm) = power_state.fold(arguments, call=options)
        out, denominator = power_state.attend(arguments, saved, call=options)
        # The kernel divides each query by a power of two; its denominators are those of the divided queries.
        largest = jnp.abs(arguments.query.astype(jnp.float32)).max(-1)
        denominator = jnp.ldexp(denominator, case.power * jnp.frexp(largest)[1])
        return {"kv": kv, "norm": norm, "mean": out, "denominator": denominator}

    def compare(results):
        return {
            name: x[:, :, sample[0]] if name in state else x[:, drawn.positions]
            for name, x in results.items()
        }

    bounds = {"kv": FLOAT16, "norm": FLOAT16, "mean": OUTPUT, "denominator": FLOAT16}
    return Prepared(call, arrays, compare, state | drawn.rows(case.power)._asdict(), bounds)


def _state_backward(case, interpret, forgets=False):
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
    arrays, options = _state_arrays(case, drawn, interpret)
    sample = formula.monomials(case.head_dim, case.power, FEATURES)
    state = formula.state_gradient(
        drawn.tokens, drawn.rows(case.power), drawn.positions, drawn.cotangent, sample
    )
    expected = drawn.gradients(case.power)
    expected = {"key": expected["key"]} if forgets else expected | state

    def call(arrays):
        arguments = _arguments(arrays)
        (*means, _), saved = power_state.power_state_fwd(arguments, call=options)
        gradients, initial = power_state.power_state_vjp(
            arguments, means, saved, arrays["dout"], call=options
        )
        return gradients._asdict() | dict(zip(("kv", "norm"), initial))

    def compare(results):
        # The gradient of a boundary is meaningless.
        results = results | {"log_decay": jnp.where(drawn.starts, 0, results["log_decay"])}
        return results | {name: results[name][:, :, sample[0]] for name in state}

    # The gradients of states and of log_decay are not rounded.
    exact = {"kv": FLOAT16, "norm": FLOAT16, "log_decay": 2 * FLOAT16}
    return Prepared(call, arrays, compare, expected, {name: exact.get(name, OUTPUT) for name in expected})


def _step_fold(case, interpret):
    random, phi = np.random.default_rng(0), _features(case)
    # One row is left out, so that writes outside the chosen rows are detected.
    batch, kv_heads, chosen = case.batch, case.kv_heads, max(case.batch - 1, 1)
    arrays = _drawn_state(case, random) | {
        # In an order that is neither sorted nor reversed.
        "rows": jnp.asarray(np.roll(np.arange(batch, dtype=np.int32)[::-1], -1)),
        "updated": jnp.array([chosen], jnp.int32),
        "keys": _normal(random, batch, kv_heads, case.time, case.head_dim),
        "values": _normal(random, batch, case.time, kv_heads, case.width),
        "across": _uniform(random, batch, kv_heads),
    }

    def fold(arrays):
        names = power_step.Window._fields
        tokens = power_step.Window(*(arrays[name] for name in names))
        if case.power != 2:  # at p = 2 the kernel computes the features
            tokens = tokens._replace(keys=phi(tokens.keys))
        state = power_step.fold(arrays["kv"], arrays["norm"], tokens=tokens, interpret=interpret)
        return dict(zip(("kv", "norm"), state))

    @jax.jit
    def plain(arrays):
        place = arrays["rows"][:chosen]
        keys, values, decay = (arrays[name][:chosen] for name in ("keys", "values", "across"))
        features = phi(keys)
        kv, norm = (arrays[name][place] for name in ("kv", "norm"))
        kv = kv * decay[..., None, None] + _einsum("nkwf,nwke->nkfe", features, values)
        norm = norm * decay[..., None] + features.sum(2)
        return {"kv": arrays["kv"].at[place].set(kv), "norm": arrays["norm"].at[place].set(norm)}

    expected = plain(arrays)
    return Prepared(fold, arrays, dict, expected, dict.fromkeys(expected, FLOAT32))


def _step_read(case, interpret):
    random, phi = np.random.default_rng(0), _features(case)
    batch, kv_heads, slots = case.batch, case.kv_heads, 2 * case.time
    # Any number of tokens is in the window; the last row has none to add.
    slot = np.append(random.integers(0, slots, batch - 1), slots)
    used = jnp.arange(slots) < slot[:, None]
    window = {
        "keys": _normal(random, batch, slots, kv_heads, case.head_dim),
        "values": _normal(random, batch, slots, kv_heads, case.width),
        "log_decays": -_uniform(random, batch, slots, kv_heads),
    }
    window = {
        name: jnp.where(used.reshape(used.shape + (1,) * (x.ndim - 2)), x, 0) for name, x in window.items()
    }
    arrays = _drawn_state(case, random) | window
    arrays |= {
        "query": _normal(random, batch, kv_heads, case.group, case.head_dim),
        "key": _normal(random, batch, kv_heads, case.head_dim),
        "value": _normal(random, batch, kv_heads, case.width),
        "log_decay": -_uniform(random, batch, kv_heads),
        "slot": jnp.asarray(slot, jnp.int32),
    }

    def unit(query):
        # The kernel scales queries by a power of two.
        return numerics.scaled(query, -numerics.exponent(jnp.abs(query).max(-1, keepdims=True)))

    def read(arrays):
        # At p = 2 the kernel computes the features.
        features = None if case.power == 2 else phi(unit(arrays["query"]))
        operands = power_step.Operands(**arrays, features=features)
        numerator, denominator, found = power_step.read(operands, power=case.power, interpret=interpret)
        return {"numerator": numerator, "denominator": denominator[..., 0]} | dict(zip(window, found))

    @jax.jit
    def plain(arrays):
        put = jax.vmap(lambda slots, i, x: slots.at[i].set(x, mode="drop"))
        token = (arrays[name] for name in ("key", "value", "log_decay"))
        keys, values, log_decays = (put(arrays[name], arrays["slot"], x) for name, x in zip(window, token))
        query = unit(arrays["query"])
        after = jnp.cumsum(log_decays[:, ::-1], 1)[:, ::-1]
        scores = _einsum("bkgd,bwkd->bkgw", query, keys)
        weights = scores**case.power * jnp.moveaxis(jnp.exp(after - log_decays), 1, 2)[:, :, None]
        features = phi(query) * jnp.exp(after[:, 0])[..., None, None]
        numerator = _einsum("bkgf,bkfe->bkge", features, arrays["kv"])
        denominator = _einsum("bkgf,bkf->bkg", features, arrays["norm"])
        numerator += _einsum("bkgw,bwke->bkge", weights, values)
        found = {"keys": keys, "values": values, "log_decays": log_decays}
        return {"numerator": numerator, "denominator": denominator + weights.sum(-1)} | found

    expected = plain(arrays)
    return Prepared(read, arrays, dict, expected, dict.fromkeys(expected, FLOAT32))


def _features(case):
    """Returns the map of vectors [..., D] to their features [..., F]."""
    _, indices, factors = formula.monomials(case.head_dim, case.power)
    return lambda x: x[..., indices].prod(-1) * factors


def _drawn_state(case, random):
    features = math.comb(case.head_dim + case.power - 1, case.power)
    sizes = case.batch, case.kv_heads, features
    return {"kv": _normal(random, *sizes, case.width), "norm": _normal(random, *sizes)}


def _normal(random, *sizes):
    return jnp.asarray(random.standard_normal(sizes, np.float32))


def _uniform(random, *sizes):
    return jnp.asarray(random.uniform(0, 1, sizes), jnp.float32)


_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
_PASSES = ("forward", "backward")
_STATES = ("power_state_square", "power_state_quartic")
_PREPARED: dict[tuple[str, str], Callable[..., Prepared]] = {
    ("toolchain", "copy"): _copy,
    ("power_attention", "forward"): _attention,
    ("power_attention", "backward"): functools.partial(_attention, backward=True),
    **{(family, "forward"): _state_forward for family in _STATES},
    **{(family, "backward"): _state_backward for family in _STATES},
    ("power_state_square", "forgets"): functools.partial(_state_backward, forgets=True),
    ("power_step", "read"): _step_read,
    ("power_step", "fold"): _step_fold,
}


def _passes(family, **sizes):
    return [Case(part=part, family=family, **sizes) for part in _PASSES]


_STEP: dict = {"family": "power_step"}
_MODEL: dict = {"batch": 1, "kv_heads": 8, "group": 1, "documents": False, "real": True}
_DECODE = _STEP | _MODEL | {"batch": 64, "time": 64}
# The simplest families first.
CASES: tuple[Case, ...] = (
    Case(part="copy", family="toolchain", time=64, batch=1, kv_heads=1, group=1, documents=False),
    # The last tile of a head is full only at some sizes.
    Case(part="fold", **_STEP, group=1, head_dim=16, time=8),
    Case(part="fold", **_STEP, group=1, time=64, batch=3),
    Case(part="fold", **_STEP, group=1, power=4, head_dim=16, value_dim=32, time=16),
    Case(part="read", **_STEP, head_dim=16, time=8),
    Case(part="read", **_STEP, time=64),
    Case(part="read", **_STEP, power=4, head_dim=16, value_dim=32, time=16),
    Case(part="read", **_STEP, power=6, head_dim=8, value_dim=64, time=8),
    *_passes("power_attention"),
    *_passes("power_attention", power=4),
    *_passes("power_attention", head_dim=128),
    *_passes("power_attention", head_dim=32),
    *_passes("power_attention", power=6, dtype="float16"),
    # Weights are scaled by row.
    *_passes("power_attention", power=8, value_dim=128),
    # More keys than queries.
    *_passes("power_attention", queries=150, value_dim=32),
    *_passes("power_state_square", time=700),
    *_passes("power_state_square", time=700, head_dim=32),
    *_passes("power_state_square", time=700, head_dim=128),
    *_passes("power_state_square", time=700, head_dim=32, value_dim=128),
    *_passes("power_state_quartic", time=700, power=4, head_dim=16),
    *_passes("power_state_quartic", time=700, power=4, head_dim=32),
    *_passes("power_state_quartic", time=700, power=4, head_dim=16, value_dim=32),
    Case(part="forgets", family="power_state_square", documents=False),
    # Shapes of real models.
    Case(part="fold", **_DECODE),
    Case(part="read", **_DECODE),
    *_passes("power_attention", time=8192, **_MODEL),
    *_passes("power_attention", time=8192, power=4, **_MODEL),
    *_passes("power_attention", time=8192, head_dim=128, **_MODEL),
    *_passes("power_state_square", time=65_536, **_MODEL),
    *_passes("power_state_square", time=16_384, head_dim=32, **_MODEL),
    *_passes("power_state_square", time=16_384, head_dim=128, **_MODEL),
    *_passes("power_state_quartic", time=16_384, power=4, head_dim=16, **_MODEL),
    *_passes("power_state_quartic", time=8192, power=4, head_dim=32, **_MODEL),
)
