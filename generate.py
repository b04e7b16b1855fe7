"""Continues prompts with a trained model: `uv run generate.py --workdir=runs/quickstart --prompt="def "`."""

import sys

from sympow_jax import commands

if __name__ == "__main__":
    sys.exit(commands.run("generate", sys.argv[1:], program="generate.py"))
