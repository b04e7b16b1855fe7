"""Power attention through states: the chunked recurrence for Hopper GPUs, forward and backward."""

from pallas_kernels.power_state.backward import Gradients, attend_vjp, fold_vjp, power_state_vjp
from pallas_kernels.power_state.configs import Call, Config
from pallas_kernels.power_state.degrees import call_for, choose
from pallas_kernels.power_state.forward import attend, fold, power_state_fwd
from pallas_kernels.power_state.incoming import add_incoming
from pallas_kernels.power_state.preparation import Arguments, Saved

__all__ = [
    "Arguments",
    "Call",
    "Config",
    "Gradients",
    "Saved",
    "add_incoming",
    "attend",
    "attend_vjp",
    "call_for",
    "choose",
    "fold",
    "fold_vjp",
    "power_state_fwd",
    "power_state_vjp",
]
