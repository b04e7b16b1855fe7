"""Predicts training steps on 8, 64 and 512 H100s from counts of operations and bytes; nothing is measured.

    uv run python -m tools.scaling

Prints the tables of docs/scaling.md, which also states what is assumed. Models are conformal at p = 2. For each number
of GPUs, all powers of two over the four mesh axes are compared, with
`model.remat` none, attention and full, and both forms of attention.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from sympow_jax import config
from sympow_jax.ops import feature_maps
from sympow_jax.tasks import flops
from tools import predicted

__all__ = ["Job", "Plan", "Step", "best", "predict", "tables"]

GPUS = (8, 64, 512)
CONTEXTS = (4096, 65_536, 1_048_576)
# Tokens per batch, by model; a batch is one row if the context is longer.
MODELS = {"gpt2_124m": 524_288, "gpt3_1311m": 1_048_576}

# Neighbors along the last axis are closest.
AXES = ("data", "fsdp", "context", "tensor")
NODE = 8
# Rates per second, GPU and direction: four fifths of the peak of dense bfloat16 products and of the memory's bytes.
PEAK = 989e12
PRODUCTS, MEMORY = 0.8 * PEAK, 0.8 * 3.35e12
LINKS = np.array([450e9, 50e9])  # NVLink, InfiniBand
ROUNDS = 3e-6, 10e-6  # seconds per round of messages on each
CAPACITY = 70e9

# Memory traffic in bytes per token and pass of a block. Each channel of the residual stream has two norms of 6 bytes
# (float32 in, bfloat16 out) and two additions of 10. Each channel of a head has rotations of query and key, 4 each.
# Each hidden unit of the feed-forward layer has 4 for its activation. The backward pass takes twice that.
STREAM_BYTES, HEAD_BYTES, HIDDEN_BYTES = 32, 8, 4
# Bytes per token and vocabulary entry: float32 logits are written and read for maximum and sum in both passes, and read
# once more for their gradient, which is written and read in bfloat16.
LOGIT_BYTES = 32
# Bytes that the optimizer moves per parameter (the parameter, its gradient, two moments and the norms), and that are
# held per parameter.
OPTIMIZER_BYTES, STATE_BYTES = 40, 16
# Bytes kept for the backward pass per token and channel of a head. They are those of compiled steps of gpt2_124m
# (docs/memory.md), divided by tokens, layers and channels.
KEPT_BY_HEAD = {"attention": 24, "chunked": 39}
# A step that is longer by at most this fraction counts as equally good: predictions are not more exact than that.
ALIKE = 0.02


@dataclasses.dataclass(frozen=True)
class Job:
    """A model, its training context and its number of tokens per batch."""

    model: config.ModelConfig
    context_length: int
    batch_tokens: int

    @functools.cached_property
    def parameters(self) -> float:
        """Number of matrix parameters, from FLOPs: without attention, 6 per token and weight."""
        attention = dataclasses.replace(self.model.attention, form="attention", exact_window=0)
        return flops.model_flops_per_token(dataclasses.replace(self.model, attention=attention), 0) / 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of the mesh axes, which are powers of two, the rematerialization policy and the form of attention."""

    data: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1
    remat: str = "none"
    form: str = "chunked"

    def in_node(self) -> dict[str, int]:
        """Returns, for each axis, the number of its neighbors that share a node."""
        sizes, left = {}, NODE
        for axis in reversed(AXES):
            sizes[axis] = math.gcd(getattr(self, axis), left)
            left //= sizes[axis]
        return sizes


@dataclasses.dataclass(frozen=True)
class Step:
    """Predicted step: seconds per kind of computation, traffic per axis, and a lower bound on a GPU's bytes.

    Traffic is an array of the bytes that a GPU sends by NVLink, those by InfiniBand, and the rounds of messages.
    """

    job: Job
    plan: Plan
    computation: dict[str, float]
    traffic: dict[str, np.ndarray]
    memory: float

    def sent_seconds(self, axis: str) -> float:
        """Returns the seconds of an axis' traffic; the two kinds of links are used one after the other."""
        sent = self.traffic[axis]
        return float((sent[:2] / LINKS).sum() + sent[2] * ROUNDS[bool(sent[1])])

    def seconds(self, *, hidden: bool) -> float:
        """Returns the seconds of the step if no traffic overlaps with computation, or if all that can does.

        Gradients overlap with the backward pass, which is two thirds of the computation, gathers of parameters with any
        of it. The traffic of `context` and `tensor` never overlaps, because the next operation needs it.
        """
        computed = sum(self.computation.values())
        data, fsdp, context, tensor = map(self.sent_seconds, AXES)
        exposed = max(0.0, data - computed * 2 / 3, data + fsdp - computed) if hidden else data + fsdp
        return computed + context + tensor + exposed

    def mfu(self, *, hidden: bool) -> float:
        """Returns the model FLOPs utilization."""
        needed = self.job.batch_tokens * flops.model_flops_per_token(self.job.model, self.job.context_length)
        gpus = math.prod(getattr(self.plan, axis) for axis in AXES)
        return needed / (self.seconds(hidden=hidden) * gpus * PEAK)


def best(job: Job, gpus: int) -> Step:
    """Returns the step over the fewest axes among those that fit in memory and are as short as any, unhidden.

    Raises:
      ValueError: No plan fits in memory.
    """
    steps = [step for plan in _plans(job, gpus) if (step := predict(job, plan)).memory <= CAPACITY]
    if not steps:
        raise ValueError(
            f"no plan for {gpus} GPUs fits {job} in {CAPACITY / 1e9:.0f} GB per GPU; use more GPUs"
        )
    longest = (1 + ALIKE) * min(step.seconds(hidden=False) for step in steps)
    alike = [step for step in steps if step.seconds(hidden=False) <= longest]
    return min(
        alike, key=lambda step: (sum(getattr(step.plan, a) > 1 for a in AXES), step.seconds(hidden=False))
    )


def _plans(job: Job, gpus: int) -> Iterator[Plan]:
    sizes = [2**n for n in range(int(math.log2(gpus)) + 1)]
    model, rows = job.model, job.batch_tokens // job.context_length
    for fsdp, context, tensor in itertools.product(sizes, sizes, sizes):
        data = gpus // (fsdp * context * tensor)
        divides = data * fsdp * context * tensor == gpus and rows % (data * fsdp) == 0
        heads_divide = not (model.heads % tensor or model.num_kv_heads % tensor)
        # A shard of the sequence is at least one window long, and the many all-reduces of `tensor` stay within a node.
        long_enough = job.context_length // context >= model.attention.exact_window
        if divides and heads_divide and long_enough and tensor <= NODE:
            for remat, form in itertools.product(("none", "attention", "full"), KEPT_BY_HEAD):
                yield Plan(data=data, fsdp=fsdp, context=context, tensor=tensor, remat=remat, form=form)


def predict(job: Job, plan: Plan) -> Step:
    """Predicts a step of a job under a plan."""
    model, inside, size = job.model, plan.in_node(), job.model.head_size
    heads, kv_heads = model.heads // plan.tensor, model.num_kv_heads // plan.tensor
    rows = job.batch_tokens // job.context_length // (plan.data * plan.fsdp)
    tokens = rows * job.context_length // plan.context
    embedding, again = model.vocab_size * model.width, plan.remat != "none"
    mine = job.parameters / (plan.fsdp * plan.tensor)

    # Computation. Passes of a block are in units of its forward pass; logits are always computed again.
    passes = 3 + again
    products = passes * (job.parameters - embedding) + 4 * embedding
    sharded_bytes = HEAD_BYTES * model.heads * size + HIDDEN_BYTES * model.hidden_width
    block_bytes = passes * (STREAM_BYTES * model.width + sharded_bytes / plan.tensor) * model.layers
    # In the attention form a GPU has the whole sequence for its shard of the heads.
    split = plan.context if plan.form == "attention" else 1
    shape = job.context_length * split // plan.context, rows, -(-heads // split), -(-kv_heads // split)
    attention = model.attention
    kernel = _kernel_seconds(plan.form, *shape, size, attention.power, attention.exact_window)
    computation = {
        "products": 2 * products / plan.tensor * tokens / PRODUCTS,
        "attention": model.layers * (predicted.BOTH_PASSES[plan.form] + (plan.remat == "full")) * kernel,
        "memory": tokens * (block_bytes + LOGIT_BYTES * model.vocab_size / plan.tensor) / MEMORY,
        "optimizer": OPTIMIZER_BYTES * mine / MEMORY,
    }

    # Traffic. One collective per layer sends the layer's part of gradients and parameters. Devices along `data` and
    # `context` hold gradients of the same parameters. The embedding is gathered in float32 for the lookup.
    layers = np.array([1, 1, model.layers + 1])
    gathered = 2 * (2 + again) * job.parameters / plan.tensor
    sums = (6 if again else 4) * model.layers + 1
    traffic = {
        "data": _ring(plan.data * plan.context, inside["data"] * inside["context"], 4 * mine, 2) * layers,
        "fsdp": _ring(plan.fsdp, inside["fsdp"], gathered + 4 * job.parameters / plan.tensor, 1)
        * layers
        * np.array([1, 1, 3 + again]),
        "context": 2 * model.layers * _context(job, plan, rows, heads, kv_heads),
        "tensor": sums * _ring(plan.tensor, inside["tensor"], 2 * tokens * model.width, 2)
        + _ring(plan.tensor, inside["tensor"], 4 * embedding / plan.fsdp, 1),
    }

    # Memory. A block's input and the stream after attention are in float32, both normalized: not sharded over `tensor`.
    # Residuals of attention and hidden units with two functions of them are. A block computed again keeps all of its.
    width, out = model.width, model.heads * size
    whole = 12 * width + (KEPT_BY_HEAD[plan.form] * out + 6 * model.hidden_width) / plan.tensor
    kept = {"none": whole, "attention": 4 * width + 4 * out / plan.tensor, "full": 4 * width}[plan.remat]
    memory = STATE_BYTES * mine + tokens * (model.layers * kept + again * whole)
    return Step(job, plan, computation, traffic, memory)


@functools.cache
def _kernel_seconds(form, time, batch, heads, kv_heads, size, power, exact_window):
    shape = {"time": time, "batch": batch, "heads": heads, "kv_heads": kv_heads}
    sizes = {"head_dim": size, "value_dim": size, "power": power, "exact_window": exact_window}
    return predicted.kernel_seconds(form, **shape, **sizes)


def _ring(size: int, near: int, nbytes: float, rounds: int) -> np.ndarray:
    """Returns the traffic of a collective over `size` GPUs, `near` of them in each node.

    `rounds` is 1 for a gather or a scatter, and 2 for an all-reduce, which is both. GPUs of a node exchange first. Then
    each GPU sends its own part between nodes, over its own link.
    """
    far = size // near
    sent = [(near - 1) / near * nbytes, (far - 1) / far * nbytes / near, math.ceil(math.log2(size))]
    return rounds * np.array(sent)


def _context(job: Job, plan: Plan, rows: int, heads: int, kv_heads: int) -> np.ndarray:
    """Returns the traffic over `context` of one pass of a layer."""
    size, near, channels = plan.context, plan.in_node()["context"], job.model.head_size
    if size == 1:
        return np.zeros(3)
    if plan.form == "attention":
        # All-to-alls of query, key, value and output; heads are padded to a multiple of the GPUs.
        padded = 2 * (-(-heads // size) + -(-kv_heads // size)) * size
        sent = 2 * rows * job.context_length / size * padded * channels
        return np.array([sent * (near - 1) / size, sent * (size - near) / size, 4])
    window_bytes = 2 * rows * kv_heads * job.model.attention.exact_window * 2 * channels
    features = feature_maps.symmetric_power_dim(channels, job.model.attention.power)
    states = 1 + (math.ceil(math.log2(size - 1)) if size > 2 else 0)
    sent = window_bytes + states * 4 * rows * kv_heads * features * (channels + 1)
    # If any neighbor is in another node, all GPUs wait for that transfer.
    return np.array([sent, 0, 1 + states]) if near == size else np.array([0, sent, 1 + states])


def tables() -> dict[str, str]:
    """Returns a Markdown table for each model; the largest number of GPUs also has 8 times the batch."""
    header = [
        "context",
        "GPUs",
        "tokens per batch",
        "mesh",
        "form",
        "remat",
        "step, ms",
        "million tokens/s",
        "MFU, %",
    ]
    header += ["GB per GPU", "GB sent by NVLink", "GB by InfiniBand", "ms sent", "takes most"]
    found = {}
    for name, batch_tokens in MODELS.items():
        sizes: Any = config.MODEL_SIZES[name]
        model = config.ModelConfig(**sizes, attention=config.preset("conformal"))
        lines = [header, ["---:"] * 3 + ["---"] * 3 + ["---:"] * 7 + ["---"]]
        for context, (gpus, batches) in itertools.product(CONTEXTS, [*((n, 1) for n in GPUS), (GPUS[-1], 8)]):
            lines.append(_cells(best(Job(model, context, batches * max(batch_tokens, context)), gpus), gpus))
        found[name] = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return found


def _cells(step: Step, gpus: int) -> list[str]:
    """Formats a row; ranges run from all that can be hidden to nothing hidden, and the rest is of the latter."""
    both = [(step.seconds(hidden=hidden), step.mfu(hidden=hidden)) for hidden in (True, False)]
    ranges = [
        [_number(1e3 * seconds) for seconds, _ in both],
        [_number(step.job.batch_tokens / seconds / 1e6) for seconds, _ in both],
        [f"{100 * mfu:.0f}" for _, mfu in both],
    ]
    sent = sum(step.traffic.values(), np.zeros(3))
    parts = step.computation | {axis: step.sent_seconds(axis) for axis in AXES}
    most = max(parts, key=parts.__getitem__)
    mesh = ((axis, getattr(step.plan, axis)) for axis in AXES)
    return [
        *(f"{count:,}" for count in (step.job.context_length, gpus, step.job.batch_tokens)),
        " x ".join(f"{axis} {size}" for axis, size in mesh if size > 1),
        step.plan.form,
        step.plan.remat,
        *("–".join(dict.fromkeys(texts)) for texts in ranges),
        f"{step.memory / 1e9:.0f}",
        *(_number(nbytes / 1e9) if nbytes else "-" for nbytes in sent[:2]),
        _number(1e3 * sum(map(step.sent_seconds, AXES))),
        f"{most} {100 * parts[most] / both[1][0]:.0f} %",
    ]


def _number(value: float) -> str:
    """Formats a number with three significant digits, or all digits before the decimal point."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


if __name__ == "__main__":
    for name, table in tables().items():
        print(f"## {name}\n\n{table}\n")
