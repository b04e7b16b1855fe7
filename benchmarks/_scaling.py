"""Cost model of a training step on many H100s: counts operations, memory bytes and sent bytes, and predicts seconds.

Nothing here is measured. Sizes of mesh axes are powers of two. `benchmarks.scaling` states all assumptions.
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

# In the order of the mesh: neighbors along the last axis are closest.
AXES = ("data", "fsdp", "context", "tensor")
REMATS = ("none", "attention", "full")
FORMS = ("attention", "chunked")

# Memory traffic in bytes per token and pass of a block. Each channel of the residual stream has two norms of 6 bytes
# (float32 in, bfloat16 out) and two additions of 10. Each channel of a head has rotations of query and key, 4 each.
# Each hidden unit of the feed-forward layer has 4 for its activation. The backward pass takes twice that.
_STREAM_BYTES, _HEAD_BYTES, _HIDDEN_BYTES = 32, 8, 4
# Bytes per token and vocabulary entry: float32 logits are written and read for maximum and sum in both passes, and read
# once more for their gradient, which is written and read in bfloat16.
_LOGIT_BYTES = 32
# Bytes that the optimizer moves per parameter: the parameter, its gradient and its two moments, and the norms of
# gradient, parameters and update.
_OPTIMIZER_BYTES = 40
# Bytes held per parameter: the parameter, its gradient and two moments in float32.
_STATE_BYTES = 16
# Bytes kept for the backward pass per token and channel of a head, by form. They are the output and rotated queries and
# keys in float32, queries, keys and values in bfloat16 and, in the chunked form, states and padded copies. The numbers
# are those of compiled steps of gpt2_124m (docs/memory.md), divided by tokens, layers and channels.
_KEPT_BY_HEAD = {"attention": 24, "chunked": 39}
# A step that is longer by at most this fraction counts as equally good: predictions are not more exact than that.
_ALIKE = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of GPUs, with rates per second, GPU and direction.

    peak, sustained: dense bfloat16 FLOPs, and the fraction of it that large products are assumed to reach.
    memory_bandwidth, memory_sustained: bytes per second of a GPU's memory, and the fraction assumed to be reached.
    memory: bytes per GPU. nvlink, infiniband: bytes per second between GPUs of a node, and between nodes.
    nvlink_latency, infiniband_latency: seconds per round of messages on each kind of link.
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
    """A model, its training context and its number of tokens per batch."""

    model: config.ModelConfig
    context_length: int
    batch_tokens: int

    @property
    def rows(self) -> int:
        """Number of sequences in a batch."""
        return self.batch_tokens // self.context_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Sharding layout of a job: sizes of the mesh axes, the rematerialization policy and the form of attention."""

    data: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1
    remat: str = "none"
    form: str = "chunked"

    @property
    def gpus(self) -> int:
        """Number of GPUs in the mesh."""
        return math.prod(getattr(self, axis) for axis in AXES)

    def in_node(self, node: int) -> dict[str, int]:
        """Returns, for each axis, the number of its neighbors that share a node."""
        found, left = {}, node
        for axis in reversed(AXES):
            found[axis] = math.gcd(getattr(self, axis), left)
            left //= found[axis]
        return found


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes per GPU and step, sent within its node and out of it, and the number of sequential message rounds."""

    nvlink: float = 0.0
    infiniband: float = 0.0
    rounds: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*map(sum, zip(dataclasses.astuple(self), dataclasses.astuple(other))))

    def times(self, count: float) -> "Traffic":
        """Returns the traffic of `count` equal transfers, one after the other."""
        return Traffic(self.nvlink * count, self.infiniband * count, round(self.rounds * count))

    @property
    def total(self) -> float:
        """Sum of the bytes on both kinds of links."""
        return self.nvlink + self.infiniband

    def seconds(self, cluster: Cluster) -> float:
        """Returns the seconds it takes if the two kinds of links are used one after the other."""
        latency = cluster.infiniband_latency if self.infiniband else cluster.nvlink_latency
        return self.nvlink / cluster.nvlink + self.infiniband / cluster.infiniband + self.rounds * latency


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted step of a job under a plan: seconds per kind of computation, traffic per axis, and bytes per GPU."""

    job: Job
    plan: Plan
    cluster: Cluster
    computation: Mapping[str, float]
    traffic: Mapping[str, Traffic]
    memory: float

    @property
    def compute_seconds(self) -> float:
        """Seconds of all computation."""
        return sum(self.computation.values())

    def sent_seconds(self, axis: str) -> float:
        """Returns the seconds that the traffic of an axis takes."""
        return self.traffic[axis].seconds(self.cluster)

    @property
    def exposed_seconds(self) -> float:
        """Seconds of `data` and `fsdp` traffic that computation cannot hide.

        Gradients overlap with the backward pass, which is two thirds of the computation. Gathers of parameters overlap
        with any of it.
        """
        data, fsdp = self.sent_seconds("data"), self.sent_seconds("fsdp")
        return max(0.0, data - self.compute_seconds * 2 / 3, data + fsdp - self.compute_seconds)

    @property
    def hidden_step_seconds(self) -> float:
        """Seconds of a step if all `data` and `fsdp` traffic that can overlap does."""
        waited = self.sent_seconds("context") + self.sent_seconds("tensor")
        return self.compute_seconds + waited + self.exposed_seconds

    @property
    def step_seconds(self) -> float:
        """Seconds of a step if no traffic overlaps with computation."""
        return self.compute_seconds + sum(map(self.sent_seconds, AXES))

    def mfu(self, seconds: float) -> float:
        """Returns the model FLOPs utilization (MFU) if a step takes `seconds`."""
        a_token = flops.model_flops_per_token(self.job.model, self.job.context_length)
        return self.job.batch_tokens * a_token / (seconds * self.plan.gpus * self.cluster.peak)

    @property
    def largest(self) -> tuple[str, float]:
        """Name and fraction of the largest part of a step in which nothing overlaps."""
        parts = dict(self.computation) | {axis: self.sent_seconds(axis) for axis in AXES}
        name = max(parts, key=parts.__getitem__)
        return name, parts[name] / self.step_seconds


def best(job: Job, gpus: int, cluster: Cluster = H100S) -> Prediction:
    """Returns the prediction for the plan with the shortest step among those that fit in memory.

    Steps are compared as if no traffic overlapped. Among plans within `_ALIKE` of the shortest step, the one that
    shards over the fewest axes wins.

    Raises:
      ValueError: No plan fits in memory.
    """
    found = [predict(job, plan, cluster) for plan in _plans(job, gpus, cluster)]
    found = [prediction for prediction in found if prediction.memory <= cluster.memory]
    if not found:
        raise ValueError(f"no arrangement of {gpus} GPUs fits {job} in {cluster.memory / 1e9:.0f} GB a GPU")
    shortest = min(one.step_seconds for one in found)
    alike = [one for one in found if one.step_seconds <= (1 + _ALIKE) * shortest]
    return min(alike, key=lambda one: (sum(getattr(one.plan, axis) > 1 for axis in AXES), one.step_seconds))


def predict(job: Job, plan: Plan, cluster: Cluster = H100S) -> Prediction:
    """Predicts a step of a job under this plan.

    Raises:
      ValueError: The plan does not divide the rows of the batch.
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
    """Counts what a GPU sends in a step, by mesh axis."""
    model = job.model
    inside = plan.in_node(node)
    parameters = _parameters(model) / plan.tensor
    # Devices along `data` and `context` hold gradients of the same parameters, already sharded by `fsdp`.
    shares = plan.data * plan.context
    gradients = _ring(shares, inside["data"] * inside["context"], 4 * parameters / plan.fsdp, rounds=2)
    layers = model.layers + 1
    gathers = 2 if plan.remat == "none" else 3
    gathered = _ring(plan.fsdp, inside["fsdp"], 2 * parameters, rounds=1).times(gathers)
    scattered = _ring(plan.fsdp, inside["fsdp"], 4 * parameters, rounds=1)
    sums = 4 * model.layers + (0 if plan.remat == "none" else 2 * model.layers)
    stream = 2 * _tokens(job, plan) * model.width
    return {
        # One collective per layer, which sends the layer's part.
        "data": dataclasses.replace(gradients, rounds=gradients.rounds * layers),
        "fsdp": dataclasses.replace(gathered + scattered, rounds=(gathered + scattered).rounds * layers),
        "context": _context(job, plan, inside["context"]).times(model.layers),
        # Two all-reduces per block and pass and one for the gradient that the logits pass back; the embedding
        # is gathered in float32 for the lookup.
        "tensor": _ring(plan.tensor, inside["tensor"], stream, rounds=2).times(sums + 1)
        + _ring(plan.tensor, inside["tensor"], 4 * _embedding(model) / plan.fsdp, rounds=1),
    }


def _ring(size: int, near: int, whole: float, *, rounds: int) -> Traffic:
    """Counts the traffic of a collective of `whole` bytes over `size` GPUs, `near` of them in each node.

    `rounds` is 1 for a gather or a scatter, and 2 for an all-reduce, which is both. GPUs of a node exchange first. Then
    each GPU sends its own part between nodes, over its own link.
    """
    far = size // near
    steps = math.ceil(math.log2(size))
    nvlink, infiniband = (near - 1) / near * whole, (far - 1) / far * whole / near
    return Traffic(rounds * nvlink, rounds * infiniband, rounds * steps)


def _context(job: Job, plan: Plan, near: int) -> Traffic:
    """Counts the traffic over `context` of both passes of one layer."""
    if plan.context == 1:
        return Traffic()
    model, size, rows = job.model, plan.context, _rows(job, plan)
    heads, kv_heads, channels = _heads(model, plan)
    if plan.form == "attention":
        # All-to-alls of query, key, value and output; heads are padded to a multiple of the GPUs.
        filled = 2 * math.ceil(heads / size) * size + 2 * math.ceil(kv_heads / size) * size
        sent = 2 * rows * job.context_length / size * filled * channels
        return Traffic(sent * (near - 1) / size, sent * (size - near) / size, 4).times(2)
    window_bytes = 2 * rows * kv_heads * model.attention.exact_window * 2 * channels
    features = feature_maps.symmetric_power_dim(channels, _power(model))
    state = 4 * rows * kv_heads * features * (channels + 1)
    states = 1 + (math.ceil(math.log2(size - 1)) if size > 2 else 0)
    sent = window_bytes + states * state
    # If any neighbor is in another node, all GPUs wait for that transfer.
    inside = near == size
    return Traffic(sent if inside else 0.0, 0.0 if inside else sent, 1 + states).times(2)


def _computation(job: Job, plan: Plan, cluster: Cluster) -> dict[str, float]:
    """Returns the seconds of each part of the computation on a GPU."""
    model, tokens = job.model, _tokens(job, plan)
    # Cost of a block's passes in units of its forward pass; logits are always computed again.
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
    """Returns the seconds of the forward pass of a layer's attention on a GPU."""
    heads, kv_heads, channels = _heads(job.model, plan)
    time = job.context_length // plan.context
    if plan.form == "attention":
        # Each GPU has the whole sequence for its shard of the heads.
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
    """Returns a lower bound on a GPU's memory in bytes.

    It counts parameters, moments, gradients and the residuals that blocks keep for the backward pass.
    """
    model = job.model
    width, out = model.width, model.heads * _size(model)
    # Not sharded over `tensor`: a block's input and the stream after attention in float32, and both of them normalized.
    # Sharded: the residuals of attention per channel of a head, and hidden units with two functions of them.
    divided = _KEPT_BY_HEAD[plan.form] * out + 3 * 2 * model.mlp_ratio * width
    all_of_it = 12 * width + divided / plan.tensor
    kept = {"none": all_of_it, "attention": 4 * width + 4 * out / plan.tensor, "full": 4 * width}[plan.remat]
    # The block that is currently computed again keeps all of its residuals.
    blocks = model.layers * kept + (0 if plan.remat == "none" else all_of_it)
    return _STATE_BYTES * _parameters(model) / (plan.fsdp * plan.tensor) + _tokens(job, plan) * blocks


def _plans(job: Job, gpus: int, cluster: Cluster):
    sizes = [2**n for n in range(int(math.log2(gpus)) + 1)]
    model = job.model
    for fsdp, context, tensor in itertools.product(sizes, sizes, sizes):
        data = gpus // (fsdp * context * tensor)
        divides = data * fsdp * context * tensor == gpus and job.rows % (data * fsdp) == 0
        heads_divide = not (model.heads % tensor or (model.kv_heads or 1) % tensor)
        # A shard of the sequence is at least one window long, and the many all-reduces of `tensor` stay within a node.
        if not (divides and heads_divide and tensor <= cluster.node):
            continue
        if job.context_length // context < model.attention.exact_window:
            continue
        for remat, form in itertools.product(REMATS, FORMS):
            yield Plan(data=data, fsdp=fsdp, context=context, tensor=tensor, remat=remat, form=form)


def _parameters(model: config.ModelConfig) -> float:
    """Counts the matrix parameters (norms are negligible) from FLOPs: without attention, 6 per token and weight."""
    alone = dataclasses.replace(
        model, attention=dataclasses.replace(model.attention, form="attention", exact_window=0)
    )
    return flops.model_flops_per_token(alone, 0) / 6


def _embedding(model: config.ModelConfig) -> int:
    return model.vocab_size * model.width


def _tokens(job: Job, plan: Plan) -> int:
    """Returns the number of tokens per GPU."""
    return _rows(job, plan) * job.context_length // plan.context


def _rows(job: Job, plan: Plan) -> int:
    return job.rows // (plan.data * plan.fsdp)


def _heads(model: config.ModelConfig, plan: Plan) -> tuple[int, int, int]:
    """Returns the numbers of query heads and key heads on a GPU, and the head size."""
    return model.heads // plan.tensor, (model.kv_heads or 1) // plan.tensor, _size(model)


def _size(model: config.ModelConfig) -> int:
    assert model.head_dim is not None  # ModelConfig derives what is not given
    return model.head_dim


def _power(model: config.ModelConfig) -> int:
    return model.attention.power if model.attention.kernel == "power" else 1
