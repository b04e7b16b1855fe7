"""The kernels and decays of attention: a table of each."""

import dataclasses
import enum
from collections.abc import Mapping

IMPLEMENTATIONS = ("reference", "xla", "mosaic_gpu")


class DecaySource(enum.Enum):
    """Source of the per-token decays."""

    NONE = enum.auto()
    FIXED = enum.auto()  # ALiBi's slopes
    RATIO = enum.auto()  # PermuteFormer's r = sigmoid(2 + 3 h / K) of head h = 0 ... K - 1
    PARAMETER = enum.auto()  # learned, the same for all tokens
    DATA = enum.auto()  # sigmoid(W x)
    DATA_FROM_ALIBI = enum.auto()  # sigmoid(W x + b), where b starts at ALiBi's slopes


@dataclasses.dataclass(frozen=True)
class Decay:
    """Source of a value of `attention.decay`, and whether there is one per value channel instead of per head."""

    source: DecaySource
    per_channel: bool = False

    @property
    def is_projected(self) -> bool:
        """Whether decays are projections of each token, to which `attention.decay_bias` is added."""
        return self.source in (DecaySource.DATA, DecaySource.DATA_FROM_ALIBI)


DECAYS: Mapping[str, Decay] = {
    "none": Decay(DecaySource.NONE),
    "alibi": Decay(DecaySource.FIXED),
    "permuteformer": Decay(DecaySource.RATIO),
    "constant": Decay(DecaySource.PARAMETER),
    "learned": Decay(DecaySource.DATA),
    "learned_alibi": Decay(DecaySource.DATA_FROM_ALIBI),
    "channel_fixed": Decay(DecaySource.FIXED, per_channel=True),
    "channel_constant": Decay(DecaySource.PARAMETER, per_channel=True),
    "channel_learned": Decay(DecaySource.DATA, per_channel=True),
}
"""Decays by name, the choices of `AttentionConfig.decay`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """Class of a value of `attention.kernel`, and the options that it supports.

    `target` is "module:class" of a subclass of `sympow_jax.layers.attention.kernels.Kernel`. It is a string, because
    the config package imports no layers.
    """

    target: str
    implementations: tuple[str, ...] = IMPLEMENTATIONS  # choices of `attention.implementation`
    even_power: bool = False  # whether `attention.power` must be even
    per_channel_decay: bool = False
    bidirectional: bool = True  # whether `causal=False` is supported
    divides_time: bool = True  # whether a sequence can be divided over devices


_MODULES = "sympow_jax.layers.attention.kernels"
KERNELS: dict[str, Kernel] = {
    "softmax": Kernel(target=f"{_MODULES}.softmax:SoftmaxKernel", implementations=("xla", "cudnn")),
    "power": Kernel(
        target=f"{_MODULES}.power:PowerKernel", even_power=True, per_channel_decay=True, bidirectional=False
    ),
    "power_delta": Kernel(
        target=f"{_MODULES}.power_delta:PowerDeltaKernel",
        implementations=("xla",),
        bidirectional=False,
        divides_time=False,
    ),
    "linear": Kernel(target=f"{_MODULES}.linear:LinearKernel"),
    "expressive": Kernel(target=f"{_MODULES}.expressive:ExpressiveKernel", implementations=("xla",)),
    "sliding_window": Kernel(
        target=f"{_MODULES}.softmax:SlidingWindowKernel",
        implementations=("xla", "cudnn"),
        bidirectional=False,
    ),
}
"""Kernels by name, the choices of `AttentionConfig.kernel`. A new kernel is one more row."""
