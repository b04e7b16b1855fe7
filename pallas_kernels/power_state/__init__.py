"""Power attention through states: the chunked recurrence for Hopper GPUs, forward and backward."""

from pallas_kernels.power_state.backward import Gradients, power_state_vjp
from pallas_kernels.power_state.config import choose, chunk_for
from pallas_kernels.power_state.forward import Saved, power_state, power_state_fwd

__all__ = [
    "Gradients",
    "Saved",
    "choose",
    "chunk_for",
    "power_state",
    "power_state_fwd",
    "power_state_vjp",
]
