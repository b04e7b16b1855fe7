"""Checks of the kernels on the local GPU: `sympow check`."""
