"""Plain JAX and the kernels for Hopper GPUs, which run the forms of power attention for a plan."""
