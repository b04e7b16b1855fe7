"""The papers' experiments as commands: `python -m experiments.NAME --help`."""
