"""What every kernel is made of on Hopper GPUs: matrix products, rings of copies, warps, and exact powers of two."""
