"""Power attention through states: the chunked recurrence for Hopper GPUs, forward."""

from pallas_kernels.power_state.config import choose, default_chunk
from pallas_kernels.power_state.forward import power_state

__all__ = ["choose", "default_chunk", "power_state"]
