"""What surrounds the p = 4 backward kernels, with plain arrays in their place that round where they do.

Against derivatives of the formula in float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import quartic, quartic_vjp
from pallas_kernels.power_state import quartic_layout as layouts
from sympow_jax import ops
from tests.ops import cases
from tests.pallas_kernels import quartic_state_vjp as plain
from tests.pallas_kernels import test_power_state as states
from tests.pallas_kernels import test_power_state_quartic_emulated as emulated

without_kernels = emulated.without_kernels
WINDOW = 64
NAMES = ("query", "key", "value", "log_decay")


@pytest.fixture(autouse=True)
def _without_backward_kernels(monkeypatch):
    monkeypatch.setattr(quartic_vjp.query_kernel, "query_vjp", plain.query_vjp)
    monkeypatch.setattr(quartic_vjp.key_kernel, "key_vjp", plain.key_vjp)


def results(arrays, log_decay, state, folded):
    """The weighted means [T, N, E] of one row, and the state of its first `folded` positions."""
    query, key, value = arrays
    group = query.shape[1] // key.shape[1]
    total = jnp.cumsum(log_decay, 0)
    early = jnp.tril(jnp.ones((len(query),) * 2))[..., None] > 0
    between = jnp.where(early, total[:, None] - total, -jnp.inf)
    queries = query.reshape(len(query), -1, group, query.shape[-1])
    weights = jnp.exp(between)[..., None] * jnp.einsum("tkgd,skd->tskg", queries, key) ** 4
    start = jnp.exp(total)[..., None, None] * features(queries)
    out = jnp.einsum("tskg,ske->tkge", weights, value) + jnp.einsum("tkgf,kfe->tkge", start, state[0])
    out = out / (weights.sum(1) + jnp.einsum("tkgf,kf->tkg", start, state[1]))[..., None]
    decay = jnp.exp(total[folded - 1] - total[:folded])[..., None]
    old = decay * features(key[:folded])
    carry = jnp.exp(total[folded - 1])[:, None]
    kv = jnp.einsum("skf,ske->kfe", old, value[:folded]) + carry[..., None] * state[0]
    return out.reshape(*query.shape[:2], -1), (kv, old.sum(0) + carry * state[1])


def features(x):
    """Canonical ones."""
    size = x.shape[-1]
    positions = layouts._quadruples(size)
    roots = jnp.asarray(layouts._roots(size))
    return jnp.prod(x[..., positions], -1) * roots


def drawn_cotangents(case, kv_heads, random):
    """A state to start from, of 40 earlier keys, and the cotangent of the last one."""
    size = case.head_dim
    key = case.scale * random.normal(size=(40, kv_heads, size))
    old = np.asarray(features(key))
    value = random.normal(size=(40, kv_heads, case.value_dim))
    state = np.einsum("skf,ske->kfe", old, value), old.sum(0)
    weight = random.normal(size=case.value_dim), random.normal()
    probe = np.asarray(features(random.normal(size=(kv_heads, size)) / case.scale))
    dstate = probe[..., None] * weight[0] * 1e-2, probe * weight[1] * 1e-2
    return tuple(tuple(x.astype("float32").astype("float64") for x in pair) for pair in (state, dstate))


def derivatives(drawn, state, dstate):
    """Of query, key, value, log_decay and the first state."""

    def loss(query, key, value, log_decay, state):
        out, last = results((query, key, value), log_decay, state, len(query) - WINDOW)
        product = (out * drawn["dout"][0]).sum()
        return product + sum((a * b).sum() for a, b in zip(last, dstate, strict=True))

    with jax.enable_x64(True):
        arrays = [jnp.asarray(drawn[name][0]) for name in NAMES]
        return jax.device_get(jax.jit(jax.grad(loss, range(5)))(*arrays, state))


def gradients(drawn, state, dstate, chunk):
    case = {name: jnp.asarray(drawn[name], jnp.bfloat16) for name in ("query", "key", "value", "dout")}
    query, key, value = (case[name] for name in ("query", "key", "value"))
    time = query.shape[1]
    log_decay = jnp.asarray(drawn["log_decay"], jnp.float32)
    folds = jnp.arange(time)[None] < time - WINDOW
    config = configs.choose(
        power=4,
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        dtype=jnp.bfloat16,
        chunk=chunk,
        window=WINDOW,
        state_dtype=jnp.float16,
    )
    options = {"config": config, "chunk": chunk, "window": WINDOW, "interpret": None}
    state, dstate = (tuple(jnp.asarray(x[None], jnp.float32) for x in pair) for pair in (state, dstate))
    out, total, last, saved = quartic.forward(query, key, value, log_decay, folds, state, **options)
    found = quartic_vjp.gradients(
        query, key, value, log_decay, folds, saved, out, total, case["dout"], dstate, **options
    )
    return found, last


def decay_gradient(found, last, dstate, time, group):
    """From what the op's plumbing makes of the sums: the gradient with respect to log_decay, [T, K]."""
    rows = np.asarray(found.query_sums, np.float64).sum(1)[:, :time]
    rows = rows.reshape(-1, group, time).sum(1)
    columns = np.asarray(found.key_sums, np.float64).sum(1)[:, WINDOW : WINDOW + time]
    after = np.cumsum((rows - columns)[:, ::-1], 1)[:, ::-1]
    whole = sum((a[0] * b).reshape(len(b), -1).sum(1) for a, b in zip(last, dstate, strict=True))
    return (after + np.asarray(whole)[:, None] * (np.arange(time) < time - WINDOW)).T


def carried(drawn, chunk):
    """The gradient with respect to the logarithm of each chunk's carry: sums over weights that cross it, [K, n].

    And the same of absolute values, since the terms cancel.
    """
    query, key, value, dout = (drawn[name][0] for name in ("query", "key", "value", "dout"))
    time, group = len(query), query.shape[1] // key.shape[1]
    key, value = (np.repeat(x, group, 1) for x in (key, value))
    total = np.repeat(np.cumsum(drawn["log_decay"][0], 0), group, 1).T
    weights = np.einsum("tnd,snd->nts", query, key) ** 4
    weights *= np.tril(np.exp(np.minimum(total[:, :, None] - total[:, None], 0)))
    weights /= weights.sum(-1, keepdims=True)
    slopes = np.einsum("tne,sne->nts", dout, value)
    slopes = weights * (slopes - (weights * slopes).sum(-1, keepdims=True))
    sums = []
    for terms in (slopes, np.abs(slopes)):
        crossing = [
            terms[:, chunk * (c + 1) :, : max(chunk * c - WINDOW, 0)].sum((1, 2))
            for c in range(-(-time // chunk))
        ]
        sums.append(np.stack(crossing, 1).reshape(-1, group, len(crossing)).sum(1))
    return sums


def errors_of_plain(drawn, expected, chunk):
    """Of the plain JAX form without a state before or after, by argument."""
    arrays = [jnp.asarray(drawn[name], jnp.bfloat16) for name in NAMES[:3]]
    run = functools.partial(
        ops.power_attention, power=4, form="chunked", implementation="xla", chunk_size=chunk
    )

    def loss(query, key, value, log_decay):
        return (run(query, key, value, log_decay=log_decay).astype(jnp.float32) * drawn["dout"]).sum()

    found = jax.jit(jax.grad(loss, range(4)))(*arrays, jnp.asarray(drawn["log_decay"], jnp.float32))
    return {name: cases.error(a[0], b) for name, a, b in zip(NAMES, found, expected, strict=True)}


CASES = [
    (cases.Case(power=4, time=200, decay="gentle", group=2), 64),
    *(
        pytest.param(case, chunk, marks=pytest.mark.slow)
        for case, chunk in (
            (cases.Case(power=4, head_dim=12, time=260, value_dim=24, decay="gentle", scale=1e-3), 64),
            (cases.Case(power=4, time=300, decay="gentle", scale=1e3), 128),
            (cases.Case(power=4, time=200, head_dim=32, value_dim=32, decay="gentle"), 64),
        )
    ),
]


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize(("case", "chunk"), CASES, ids=str)
def test_gradients(case, chunk, continued):
    """As exact as those of plain JAX; with a state before and after, no less exact than without."""
    drawn = states.drawn_case(case)
    drawn["dout"] = cases.arrays(case, batch=1, kv_heads=1, dtype="bfloat16")["dout"]
    state, dstate = drawn_cotangents(case, 1, np.random.default_rng(1))
    none = tuple(np.zeros_like(x) for x in state)
    alone = derivatives(drawn, none, none)
    bounds = {name: 1.2 * error for name, error in errors_of_plain(drawn, alone[:4], chunk).items()}
    bounds["log_decay"] = max(bounds["log_decay"], 2**-11)
    # That of the normaliser is a sum of products of dout and the output, which is rounded to 2^-9.
    bounds |= {"state": 2**-11, "norm": 2**-8}
    if not continued:
        state, dstate, expected = none, none, alone
    else:
        expected = derivatives(drawn, state, dstate)
    found, last = gradients(drawn, state, dstate, chunk)
    errors = {name: cases.error(getattr(found, name)[0], expected[n]) for n, name in enumerate(NAMES[:3])}
    decay = decay_gradient(found, last, dstate, case.time, case.group)
    errors["log_decay"] = cases.error(decay, expected[3])
    errors["state"], errors["norm"] = (
        cases.error(a[0], b) for a, b in zip(found.state, expected[4], strict=True)
    )
    if not continued:
        wanted, size = carried(drawn, chunk)
        assert (np.abs(found.carry - wanted) <= 2**-11 * size).all()
    assert errors == {name: pytest.approx(0, abs=bounds[name]) for name in errors}
