"""Checks of the kernels on the local GPU: `python -m pallas_kernels.check`."""
