"""All measurements on one Hopper GPU in the order of their importance: `python -m benchmarks.hopper`."""
