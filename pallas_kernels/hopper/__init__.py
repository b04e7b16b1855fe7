"""Parts of every Hopper kernel: matrix products, rings of copies, warps, and exact powers of two."""
