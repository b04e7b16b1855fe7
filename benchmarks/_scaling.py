"""A model of a training step on many H100s: operations, bytes of memory and bytes sent, and the seconds they take.

Nothing here is measured. Sizes of mesh axes are powers of two; `benchmarks.scaling` states all assumptions.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping

from benchmarks import predicted
from sympow_jax import config
from sympow_jax.ops import feature_maps
from sympow_jax.training import flops

__all__ = ["AXES", "H100S", "Cluster", "Job", "Plan", "Prediction", "Traffic", "best", "predict", "traffic"]

# In the order of the mesh: neighbors along the last are closest.
AXES = ("data", "fsdp", "context", "tensor")
REMATS = ("none", "attention", "full")
FORMS = ("attention", "chunked")

# Bytes of memory that a token takes a pass of a block: for each channel of the residual stream two norms of 6 (float32
# in, bfloat16 out) and two additions to it of 10, for each channel of a head rotations of query and key at 4, for each
# hidden unit of the feed-forward 4 for its activation. The backward pass takes twice that.
_STREAM_BYTES, _HEAD_BYTES, _HIDDEN_BYTES = 32, 8, 4
# And for each entry of the vocabulary: float32 logits written and read for maximum and sum, in both passes, read once
# more for their gradient, which is written and read in bfloat16.
_LOGIT_BYTES = 32
# A parameter's, its gradient's and its two moments' in the optimizer, with norms of gradient, parameters and update.
_OPTIMIZER_BYTES = 40
# Kept of a parameter: itself, its gradient and two moments in float32.
_STATE_BYTES = 16
# Kept for the backward pass of a token and channel of a head, by form: the output and rotated queries and keys in
# float32, queries, keys and values in bfloat16, and of the chunked form states and padded copies. It is what compiled
# steps of gpt2_124m take (docs/memory.md), divided by tokens, layers and channels.
_KEPT_BY_HEAD = {"attention": 24, "chunked": 39}
# A step that is longer by so much is taken for as good: predictions are not that exact.
_ALIKE = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of GPUs; rates a second and GPU, each way.

    peak, sustained: dense bfloat16 FLOPs, and which fraction large products are taken to reach. memory_bandwidth and
    its fraction, memory: of a GPU, in bytes. nvlink: bytes between GPUs of a node; infiniband: between nodes. latency:
    seconds of one round of messages on each.
    """

    node: int = 8
    peak: float = 989e12
    sustained: float = 0.8
    memory_bandwidth: float = 3.35e12
    memory_sustained: float = 0.8
    memory: float = 70e9
    nvlink: float = 450e9
    infiniband: float = 50e9
    nvlink_latency: float = 3e-6
    infiniband_latency: float = 10e-6


H100S = Cluster()


@dataclasses.dataclass(frozen=True)
class Job:
    """A model trained at a context with so many tokens a batch."""

    model: config.ModelConfig
    context_length: int
    batch_tokens: int

    @property
    def rows(self) -> int:
        """Sequences of a batch."""
        return self.batch_tokens // self.context_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How GPUs share a job: sizes of the mesh axes, what is computed again, and the form of attention."""

    data: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1
    remat: str = "none"
    form: str = "chunked"

    @property
    def gpus(self) -> int:
        """How many they are."""
        return math.prod(getattr(self, axis) for axis in AXES)

    def in_node(self, node: int) -> dict[str, int]:
        """How many of an axis' neighbors share a node, by axis."""
        found, left = {}, node
        for axis in reversed(AXES):
            found[axis] = math.gcd(getattr(self, axis), left)
            left //= found[axis]
        return found


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes a GPU sends in a step within its node and out of it, and rounds of messages that wait for each other."""

    nvlink: float = 0.0
    infiniband: float = 0.0
    rounds: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*map(sum, zip(dataclasses.astuple(self), dataclasses.astuple(other))))

    def times(self, count: float) -> "Traffic":
        """Of so many alike, one after the other."""
        return Traffic(self.nvlink * count, self.infiniband * count, round(self.rounds * count))

    @property
    def total(self) -> float:
        """Bytes on both kinds of links."""
        return self.nvlink + self.infiniband

    def seconds(self, cluster: Cluster) -> float:
        """If the links are used one after the other."""
        latency = cluster.infiniband_latency if self.infiniband else cluster.nvlink_latency
        return self.nvlink / cluster.nvlink + self.infiniband / cluster.infiniband + self.rounds * latency


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of a step of a job under a plan: of computation by what it is, and of each axis' traffic."""

    job: Job
    plan: Plan
    cluster: Cluster
    computation: Mapping[str, float]
    traffic: Mapping[str, Traffic]
    memory: float

    @property
    def compute_seconds(self) -> float:
        """All of the computation."""
        return sum(self.computation.values())

    def sent_seconds(self, axis: str) -> float:
        """The traffic of an axis."""
        return self.traffic[axis].seconds(self.cluster)

    @property
    def exposed_seconds(self) -> float:
        """Traffic of data and fsdp that computation cannot hide: gradients hide behind the backward pass, two thirds
        of the computation, and parameters behind any of it.
        """
        data, fsdp = self.sent_seconds("data"), self.sent_seconds("fsdp")
        return max(0.0, data - self.compute_seconds * 2 / 3, data + fsdp - self.compute_seconds)

    @property
    def hidden_step_seconds(self) -> float:
        """A step, if all of data and fsdp that can be hidden is."""
        waited = self.sent_seconds("context") + self.sent_seconds("tensor")
        return self.compute_seconds + waited + self.exposed_seconds

    @property
    def step_seconds(self) -> float:
        """A step, if nothing is hidden."""
        return self.compute_seconds + sum(map(self.sent_seconds, AXES))

    def mfu(self, seconds: float) -> float:
        """Model FLOPs a second of the GPU's peak, if a step takes so long."""
        a_token = flops.model_flops_per_token(self.job.model, self.job.context_length)
        return self.job.batch_tokens * a_token / (seconds * self.plan.gpus * self.cluster.peak)

    @property
    def largest(self) -> tuple[str, float]:
        """What takes most of a step in which nothing is hidden, and its part of it."""
        parts = dict(self.computation) | {axis: self.sent_seconds(axis) for axis in AXES}
        name = max(parts, key=parts.__getitem__)
        return name, parts[name] / self.step_seconds


def best(job: Job, gpus: int, cluster: Cluster = H100S) -> Prediction:
    """Of the plans that fit in memory one whose step is shortest, within `_ALIKE`, if nothing is hidden: the one that
    divides over fewest axes.

    Raises:
      ValueError: none fits.
    """
    found = [predict(job, plan, cluster) for plan in _plans(job, gpus, cluster)]
    found = [prediction for prediction in found if prediction.memory <= cluster.memory]
    if not found:
        raise ValueError(f"no arrangement of {gpus} GPUs fits {job} in {cluster.memory / 1e9:.0f} GB a GPU")
    shortest = min(one.step_seconds for one in found)
    alike = [one for one in found if one.step_seconds <= (1 + _ALIKE) * shortest]
    return min(alike, key=lambda one: (sum(getattr(one.plan, axis) > 1 for axis in AXES), one.step_seconds))


def predict(job: Job, plan: Plan, cluster: Cluster = H100S) -> Prediction:
    """A step of this plan.

    Raises:
      ValueError: the plan does not divide the rows.
    """
    if job.rows % (plan.data * plan.fsdp):
        raise ValueError(
            f"a batch has {job.rows} rows, which data {plan.data} x fsdp {plan.fsdp} do not divide; use a divisor"
        )
    return Prediction(
        job=job,
        plan=plan,
        cluster=cluster,
        computation=_computation(job, plan, cluster),
        traffic=traffic(job, plan, cluster.node),
        memory=_memory(job, plan),
    )


def traffic(job: Job, plan: Plan, node: int) -> dict[str, Traffic]:
    """What a GPU sends in a step, by the axis over which it does."""
    model = job.model
    inside = plan.in_node(node)
    parameters = _parameters(model) / plan.tensor
    # Devices of all rows and times have gradients of the same parameters, which `fsdp` has divided before.
    shares = plan.data * plan.context
    gradients = _ring(shares, inside["data"] * inside["context"], 4 * parameters / plan.fsdp, rounds=2)
    layers = model.layers + 1
    gathers = 2 if plan.remat == "none" else 3
    gathered = _ring(plan.fsdp, inside["fsdp"], 2 * parameters, rounds=1).times(gathers)
    scattered = _ring(plan.fsdp, inside["fsdp"], 4 * parameters, rounds=1)
    sums = 4 * model.layers + (0 if plan.remat == "none" else 2 * model.layers)
    stream = 2 * _tokens(job, plan) * model.width
    return {
        # One collective a layer, which sends a layer's part.
        "data": dataclasses.replace(gradients, rounds=gradients.rounds * layers),
        "fsdp": dataclasses.replace(gathered + scattered, rounds=(gathered + scattered).rounds * layers),
        "context": _context(job, plan, inside["context"]).times(model.layers),
        # Two sums of a block in each pass, and what comes back from logits; the embedding for the lookup, in float32.
        "tensor": _ring(plan.tensor, inside["tensor"], stream, rounds=2).times(sums + 1)
        + _ring(plan.tensor, inside["tensor"], 4 * _embedding(model) / plan.fsdp, rounds=1),
    }


def _ring(size: int, near: int, whole: float, *, rounds: int) -> Traffic:
    """Of gathering or scattering `whole` bytes over `size` GPUs, `near` of them a node's, or of an all-reduce, which is
    both (`rounds` is 2): first between the GPUs of a node, then each one's part between nodes, on links of their own.
    """
    far = size // near
    steps = math.ceil(math.log2(size))
    nvlink, infiniband = (near - 1) / near * whole, (far - 1) / far * whole / near
    return Traffic(rounds * nvlink, rounds * infiniband, rounds * steps)


def _context(job: Job, plan: Plan, near: int) -> Traffic:
    """Of both passes of one layer."""
    if plan.context == 1:
        return Traffic()
    model, size, rows = job.model, plan.context, _rows(job, plan)
    heads, kv_heads, channels = _heads(model, plan)
    if plan.form == "attention":
        # Query, key, value and output, all to all; heads that the GPUs do not divide are filled up.
        filled = 2 * math.ceil(heads / size) * size + 2 * math.ceil(kv_heads / size) * size
        sent = 2 * rows * job.context_length / size * filled * channels
        return Traffic(sent * (near - 1) / size, sent * (size - near) / size, 4).times(2)
    window_bytes = 2 * rows * kv_heads * model.attention.exact_window * 2 * channels
    features = feature_maps.symmetric_power_dim(channels, _power(model))
    state = 4 * rows * kv_heads * features * (channels + 1)
    states = 1 + (math.ceil(math.log2(size - 1)) if size > 2 else 0)
    sent = window_bytes + states * state
    # Where any neighbor is in another node, all wait for the one that has it.
    inside = near == size
    return Traffic(sent if inside else 0.0, 0.0 if inside else sent, 1 + states).times(2)


def _computation(job: Job, plan: Plan, cluster: Cluster) -> dict[str, float]:
    """Seconds of each part of the computation on a GPU."""
    model, tokens = job.model, _tokens(job, plan)
    # Of a block, in forward passes; logits are always computed again.
    passes = 3 if plan.remat == "none" else 4
    stream = _STREAM_BYTES * model.width
    divided = _HEAD_BYTES * model.heads * _size(model) + _HIDDEN_BYTES * model.mlp_ratio * model.width
    block_bytes = passes * (stream + divided / plan.tensor) * model.layers
    logit_bytes = _LOGIT_BYTES * model.vocab_size / plan.tensor
    updated = _parameters(model) / (plan.fsdp * plan.tensor)
    products = passes * (_parameters(model) - _embedding(model)) + 4 * _embedding(model)
    attention = predicted.HOPPER.both_passes[plan.form] + (plan.remat == "full")
    bandwidth = cluster.memory_sustained * cluster.memory_bandwidth
    return {
        "products": 2 * products / plan.tensor * tokens / (cluster.sustained * cluster.peak),
        "attention": model.layers * attention * _kernel(job, plan),
        "memory": tokens * (block_bytes + logit_bytes) / bandwidth,
        "optimizer": _OPTIMIZER_BYTES * updated / bandwidth,
    }


def _kernel(job: Job, plan: Plan) -> float:
    """Seconds of the forward pass of a layer's attention on a GPU."""
    heads, kv_heads, channels = _heads(job.model, plan)
    time = job.context_length // plan.context
    if plan.form == "attention":
        # Each GPU has all of time, of a share of the heads.
        time = job.context_length
        heads, kv_heads = math.ceil(heads / plan.context), math.ceil(kv_heads / plan.context)
    attention = job.model.attention
    return _kernel_seconds(
        plan.form, time, _rows(job, plan), heads, kv_heads, channels, attention.power, attention.exact_window
    )


@functools.cache
def _kernel_seconds(form, time, batch, heads, kv_heads, channels, power, exact_window):
    return predicted.kernel_seconds(
        form,
        time=time,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=channels,
        value_dim=channels,
        power=power,
        chunk=None,
        exact_window=exact_window,
    )


def _memory(job: Job, plan: Plan) -> float:
    """Bytes a GPU needs at least: parameters, moments, gradients, and what is kept of blocks for the backward pass."""
    model = job.model
    width, out = model.width, model.heads * _size(model)
    # A block's input and the stream behind attention in float32, both normalized; and divided over `tensor` what
    # attention keeps of each channel of a head, and hidden units with two functions of them.
    divided = _KEPT_BY_HEAD[plan.form] * out + 3 * 2 * model.mlp_ratio * width
    all_of_it = 12 * width + divided / plan.tensor
    kept = {"none": all_of_it, "attention": 4 * width + 4 * out / plan.tensor, "full": 4 * width}[plan.remat]
    # The block under way is whole.
    blocks = model.layers * kept + (0 if plan.remat == "none" else all_of_it)
    return _STATE_BYTES * _parameters(model) / (plan.fsdp * plan.tensor) + _tokens(job, plan) * blocks


def _plans(job: Job, gpus: int, cluster: Cluster):
    sizes = [2**n for n in range(int(math.log2(gpus)) + 1)]
    model = job.model
    for fsdp, context, tensor in itertools.product(sizes, sizes, sizes):
        data = gpus // (fsdp * context * tensor)
        divides = data * fsdp * context * tensor == gpus and job.rows % (data * fsdp) == 0
        heads_divide = not (model.heads % tensor or (model.kv_heads or 1) % tensor)
        # A share is at least a window, and tensor's many sums stay within a node.
        if not (divides and heads_divide and tensor <= cluster.node):
            continue
        if job.context_length // context < model.attention.exact_window:
            continue
        for remat, form in itertools.product(REMATS, FORMS):
            yield Plan(data=data, fsdp=fsdp, context=context, tensor=tensor, remat=remat, form=form)


def _parameters(model: config.ModelConfig) -> float:
    """Those of matrices; norms have next to none. Without attention, a token costs 6 FLOPs a weight."""
    alone = dataclasses.replace(
        model, attention=dataclasses.replace(model.attention, form="attention", exact_window=0)
    )
    return flops.model_flops_per_token(alone, 0) / 6


def _embedding(model: config.ModelConfig) -> int:
    return model.vocab_size * model.width


def _tokens(job: Job, plan: Plan) -> int:
    """Of a GPU."""
    return _rows(job, plan) * job.context_length // plan.context


def _rows(job: Job, plan: Plan) -> int:
    return job.rows // (plan.data * plan.fsdp)


def _heads(model: config.ModelConfig, plan: Plan) -> tuple[int, int, int]:
    """Heads, key heads and their size, on a GPU."""
    return model.heads // plan.tensor, (model.kv_heads or 1) // plan.tensor, _size(model)


def _size(model: config.ModelConfig) -> int:
    assert model.head_dim is not None  # ModelConfig derives what is not given
    return model.head_dim


def _power(model: config.ModelConfig) -> int:
    return model.attention.power if model.attention.kernel == "power" else 1
