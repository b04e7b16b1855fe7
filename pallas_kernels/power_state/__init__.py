"""Power attention through states: the chunked recurrence for Hopper GPUs, forward."""

from pallas_kernels.power_state.config import choose, chunk_for
from pallas_kernels.power_state.forward import power_state

__all__ = ["choose", "chunk_for", "power_state"]
