"""Prepares, times with CUDA events and checks the PyTorch contenders whose packages are installed."""

import functools
import importlib.util
import math
from collections.abc import Callable

from benchmarks import _contenders, _rows, _timing
from benchmarks._contenders import GRADIENT_TIME, ROWS, Prepared, WrongResult
from benchmarks._shapes import PEERS, Row
from pallas_kernels.check import supervisor

# Peers keep their states in 16 bits, so their values and gradients get a wider bound than this project's.
BOUND = 5e-2
RETENTION_CHUNK = 1024
DEVICE = "cuda"
# Cycles that the device sleeps before a sample so that the host gets ahead of it: at least 10 ms.
_HEAD_START = 20_000_000
_PACKAGES = ("torch", "triton", "retention", "flash-linear-attention", "fla-core")


def machine() -> dict:
    """Returns the versions of PyTorch and the installed packages."""
    import torch

    versions = {name: version for name in _PACKAGES if (version := _rows.version(name))}
    return versions | {"torch cuda": torch.version.cuda}


@supervisor.tuning()
def prepare(row: Row) -> Prepared:
    """Loads a peer, runs it and checks its result.

    Raises NotImplementedError if the peer is not installed or does not support the shape, WrongResult if its result is
    wrong.
    """
    if absent := [module for module in PEERS[row.contender] if importlib.util.find_spec(module) is None]:
        raise NotImplementedError(f"not installed: {', '.join(absent)}")
    import torch

    torch.manual_seed(0)
    # The references need exact float32 products.
    torch.backends.cuda.matmul.allow_tf32 = False
    contender, formula = _contender(row)
    training = row.mode == "training"
    arguments = _draw(row, row.time)
    dout = torch.randn_like(arguments[2])
    for x in arguments:
        x.requires_grad_(training)

    def call():
        with torch.set_grad_enabled(training):
            for x in arguments:
                x.grad = None
            out = contender(*arguments)
            if training:
                out.backward(dout)
            return out

    out = call()
    # Rows at the end and in the middle of the batch's last sequence.
    query, key, value, log_decay = (x.detach()[-1:].float() for x in arguments)
    worst = 0.0
    for end in {row.time, row.time // 2 + 1}:
        begin = max(end - ROWS, 0)
        expected = formula(query[:, begin:end], key[:, :end], value[:, :end], log_decay[:, :end])
        worst = max(worst, _rms_error(out.detach()[-1:, begin:end], expected))
    _contenders.require_close("the output", worst, BOUND)
    results = [out, *(x.grad for x in arguments)] if training else [out]
    if not all(bool(torch.isfinite(x).all()) for x in results):
        raise WrongResult("not every number is finite")
    if training:
        # Against automatic differentiation of the formula in float32, over at least two chunks.
        short = _draw(row, max(GRADIENT_TIME, 2 * RETENTION_CHUNK), batch=1)
        exact = [x.float().requires_grad_() for x in short]
        short = [x.requires_grad_() for x in short]
        cotangent = torch.randn_like(short[2])
        contender(*short).backward(cotangent)
        formula(*exact).backward(cotangent.float())
        for name, x, wanted in zip(("query", "key", "value"), short, exact, strict=False):
            _contenders.require_close(f"the gradient of {name}", _rms_error(x.grad, wanted.grad), BOUND)
    return Prepared(functools.partial(_events, call), worst, None, lambda: None)


def _contender(row: Row) -> tuple[Callable, Callable]:
    """Returns a contender, of query, key, value and log_decay, and its float32 formula."""
    if row.contender == "flash-linear-attention":
        from fla.ops.simple_gla import chunk_simple_gla

        return lambda *arguments: chunk_simple_gla(*arguments)[0], functools.partial(_formula, power=None)
    from retention import power_retention

    if row.time % RETENTION_CHUNK:
        raise NotImplementedError(f"T is not a multiple of the chunk, {RETENTION_CHUNK}")
    if row.power != 2 and row.time > RETENTION_CHUNK:
        raise NotImplementedError("the chunked form of retention is of degree 2")
    call = functools.partial(power_retention, deg=row.power, chunk_size=RETENTION_CHUNK)
    return call, functools.partial(_formula, power=row.power)


def _draw(row, time, batch=None):
    """Draws inputs as `_contenders.draw` does; heads remember 50 to 100,000 tokens."""
    import torch

    lead = (batch or row.batch, time, row.heads)
    with torch.device(DEVICE):
        vectors = [torch.randn(*lead, row.head_dim, dtype=torch.bfloat16) for _ in range(3)]
        gate = torch.randn(*lead) + torch.linspace(4, 12, row.heads)
    return [*vectors, torch.nn.functional.logsigmoid(gate)]


def _formula(query, key, value, log_decay, *, power):
    """Computes the mean of values weighted by exp(G_i - G_j) (q_i . k_j)^p, in float32.

    If power is None, computes the sum weighted by exp(G_i - G_j) (q_i . k_j) / sqrt(D) instead. Queries are at the
    last positions of the keys.
    """
    import torch

    begin = key.shape[1] - query.shape[1]
    total = log_decay.double().cumsum(1).movedim(1, 2)
    difference = total[:, :, begin:, None] - total[:, :, None]
    steps = torch.arange(key.shape[1], device=key.device)
    difference = difference.masked_fill(steps[begin:, None] < steps, -math.inf)
    scores = torch.einsum("btnd,bsnd->bnts", query, key)
    weights = difference.exp().float() * (scores**power if power else scores / math.sqrt(key.shape[-1]))
    out = torch.einsum("bnts,bsne->btne", weights, value)
    return out / weights.sum(-1).movedim(1, 2)[..., None] if power else out


def _rms_error(actual, expected) -> float:
    return float(((actual.float() - expected) ** 2).sum().div((expected**2).sum()).sqrt())


def _events(call, calls: int) -> _timing.Sample:
    """Measures the seconds per call between two CUDA events, with the host ahead of the device."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_HEAD_START)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return _timing.Sample(begin.elapsed_time(end) / 1e3 / calls, False)
