"""All measurements on one Hopper GPU, which `run.sh` makes in the order of their importance."""
