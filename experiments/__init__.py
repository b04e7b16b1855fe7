"""The papers' experiments, one module each: `python -m experiments.NAME --help`; results in README.md."""
