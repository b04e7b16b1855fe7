"""Trains a model: `uv run train.py --config=configs/quickstart.py --workdir=runs/quickstart`.

Running the same command again resumes the run in the workdir, bit for bit.
"""

import sys

from sympow_jax import commands

if __name__ == "__main__":
    sys.exit(commands.run("train", sys.argv[1:], program="train.py"))
