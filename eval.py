"""Evaluates trained runs on held-out data, by context length or with the metrics of their task.

uv run eval.py --workdir=runs/a,runs/b --context_lengths=64,...,65536 --out=runs/comparison
"""

import sys

from sympow_jax import commands

if __name__ == "__main__":
    sys.exit(commands.run("eval", sys.argv[1:], program="eval.py"))
