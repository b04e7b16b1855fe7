"""Parts of every Hopper kernel: its launch, matrix products, rings of copies, results, and exact powers of two."""
