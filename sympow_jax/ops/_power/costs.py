"""What a form costs, from shapes alone: the choice of form and chunk, and the size of a state."""

import dataclasses
import importlib
import os
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp

from sympow_jax.ops import feature_maps

__all__ = ["HOPPER", "cheapest_form", "default_chunk", "flops_per_token", "kernel_seconds", "require_memory"]


def flops_per_token(
    form: str,
    *,
    time: int,
    head_dim: int,
    value_dim: int,
    power: int,
    chunk: int,
    window: int,
    backward: bool = False,
) -> float:
    """FLOPs of the forward pass, or with `backward` of both passes, for one token and head among `time` tokens.

    attention: 2 (D + E) T / 2, since half of the pairs are causal. chunked: 4 F E + 2 (D + E) (C / 2 + W).
    Backward, five products over pairs stand against two of the forward pass, and four over features against two.
    """
    over_pairs, over_features = (3.5, 3) if backward else (1, 1)
    if form == "attention":
        return over_pairs * (head_dim + value_dim) * time
    features = feature_maps.symmetric_power_dim(head_dim, power)
    pairs = (head_dim + value_dim) * (chunk + 2 * window)
    return over_features * 4 * features * value_dim + over_pairs * pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kernels:
    """Seconds of the forward pass of kernels: a model with few constants, all of them predicted and none measured.

    pair, pair_power, pair_channel: of issuing a causal pair's instructions, for each pair and head, for each factor of
    the power behind the first two, and for each of the D + E channels. pair_product: of a pair's matrix products, for
    each channel; the longer of the two counts.
    feature: of reading and writing states, for each token, head, feature and value, by power and head size; half of it
    is the update's, whose heads are those of the keys.
    channel: of the plain JAX around the chunked form, for each token, head and channel.
    launch: of a call, by form.
    both_passes: what both passes take together of what the forward pass takes, by form.
    xla_flops: FLOPs a second of the plain forms, bound by the bytes of scores or features.
    """

    pair: float
    pair_power: float
    pair_channel: float
    pair_product: float
    feature: Mapping[tuple[int, int], float]
    channel: float
    launch: Mapping[str, float]
    both_passes: Mapping[str, float]
    xla_flops: float

    def pairs(self, count: float, power: int, channels: int) -> float:
        """Seconds of so many pairs of a head."""
        issued = self.pair + self.pair_power * (power // 2 - 1) + self.pair_channel * channels
        return count * max(issued, self.pair_product * channels)

    def states(self, tokens: float, power: int, head_dim: int, value_dim: int) -> float:
        """Seconds of the states of so many tokens, at the sizes that the kernels fill these up to."""
        sizes = sorted(size for of_power, size in self.feature if of_power == power)
        head_dim = next(size for size in sizes if size >= head_dim)
        # Values have the larger two of the sizes.
        value_dim = next(size for size in sizes[-2:] if size >= value_dim)
        features = feature_maps.symmetric_power_dim(head_dim, power)
        return tokens * self.feature[power, head_dim] * features * value_dim


# Fitted to the predictions for an H100 in pallas_kernels/README.md: of each kernel, and of the chunked form as
# a whole, for b1 n8 T = 65,536.
HOPPER = _Kernels(
    pair=1.59e-13,
    pair_power=2.0e-14,
    pair_channel=1.40e-15,
    pair_product=2.53e-15,
    feature={(2, 32): 1.6e-14, (2, 64): 9.7e-15, (2, 128): 6.8e-15, (4, 16): 3.8e-14, (4, 32): 1.05e-14},
    channel=3.0e-12,
    launch={"attention": 10e-6, "chunked": 40e-6},
    both_passes={"attention": 5.3, "chunked": 3.1},
    xla_flops=5e13,
)


def cheapest_form(
    *,
    time: int,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    power: int,
    chunk: int | None,
    window: int,
    kernels: Collection[str] = (),
) -> str:
    """The form that is done first; the attention form where the state would not fit in memory.

    Without kernels that is the form with fewer FLOPs. `kernels` names the forms that kernels on a Hopper GPU would
    compute: then predicted times of both passes decide, of a kernel by `HOPPER`, since where forms differ it is
    training that costs. `chunk` None is what each does best.
    """
    sizes: dict = {"head_dim": head_dim, "value_dim": value_dim, "power": power}
    # The scan holds the state, its decayed copy and its update.
    if 3 * state_bytes(batch=batch, kv_heads=kv_heads, **sizes) > _memory_bytes():
        return "attention"
    shape = {"time": time, "window": window, **sizes}
    costs = {}
    for form in ("attention", "chunked"):
        if form in kernels:
            seconds = kernel_seconds(form, batch=batch, heads=heads, kv_heads=kv_heads, chunk=chunk, **shape)
            costs[form] = HOPPER.both_passes[form] * seconds
        else:
            flops = flops_per_token(
                form, chunk=chunk or default_chunk("chunked"), backward=bool(kernels), **shape
            )
            costs[form] = batch * heads * time * flops / HOPPER.xla_flops
    return min(costs, key=costs.__getitem__)


def kernel_seconds(
    form: str,
    *,
    time: int,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    power: int,
    chunk: int | None,
    window: int,
) -> float:
    """Predicted seconds of a kernel's forward pass on an H100, with the plain JAX around it."""
    tokens, channels = batch * time, head_dim + value_dim
    if form == "attention":
        pairs = tokens * heads * time / 2
        return HOPPER.launch[form] + HOPPER.pairs(pairs, power, channels)
    if chunk is None:
        # Pallas takes a second to import: only where a kernel may run.
        power_state = importlib.import_module("pallas_kernels.power_state")
        chunk = power_state.choose(
            power=power,
            head_dim=head_dim,
            value_dim=value_dim,
            time=time,
            heads=batch * kv_heads,
            dtype=jnp.bfloat16,
            window=window,
        ).chunk
    pairs = tokens * heads * (chunk / 2 + window)
    states = HOPPER.states(tokens * (heads + kv_heads) / 2, power, head_dim, value_dim)
    around = HOPPER.channel * tokens * heads * channels
    return HOPPER.launch[form] + HOPPER.pairs(pairs, power, channels) + states + around


def default_chunk(form: str) -> int:
    """Tokens of a chunk, or of a block of the attention form: what measured fastest on two cores at T = 4,096."""
    return {"attention": 256, "chunked": 128, "recurrent": 1}[form]


def state_bytes(
    *, batch: int, kv_heads: int, head_dim: int, value_dim: int, power: int, itemsize: int = 4
) -> int:
    """Bytes of the folded state and its normaliser."""
    return batch * kv_heads * feature_maps.symmetric_power_dim(head_dim, power) * (value_dim + 1) * itemsize


def require_memory(**sizes) -> None:
    """Raises ValueError where the state of these sizes (those of `state_bytes`) exceeds the device's memory."""
    needed, available = state_bytes(**sizes), _memory_bytes()
    if needed > available:
        raise ValueError(
            f"the state takes {needed:,} bytes ({sizes}) and the device has {available:,}; use a smaller power or "
            f"head_dim, or the attention form without a state"
        )


def _memory_bytes() -> int:
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
