"""Kernels for one token of power attention on Hopper GPUs: reading the state, and updating it."""

from pallas_kernels.power_step.configs import choose
from pallas_kernels.power_step.folding import Window, fold
from pallas_kernels.power_step.reading import Operands, read

__all__ = ["Operands", "Window", "choose", "fold", "read"]
