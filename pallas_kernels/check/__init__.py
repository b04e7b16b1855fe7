"""Checks the kernels on the GPU at hand: `python -m pallas_kernels.check`."""
