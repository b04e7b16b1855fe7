"""Hybrids: loss by position of models with another attention in one layer of four.

The toy scale trains four layers at a context of 256 and evaluates up to 4,096. With softmax in every fourth layer, the
KV cache is a quarter of softmax's. With a sliding window there instead, the memory between tokens has a fixed size.
`window and softmax` has no power attention.
"""

import functools
import sys

from experiments import _shared, evaluation_context
from sympow_jax import config
from sympow_jax.config import loading

PLANS = {
    "toy": _shared.Plan(
        seeds=(0, 1, 2), steps=300, contexts=(256,), lengths=(64, 128, 256, 512, 1024, 2048, 4096)
    ),
    "paper": _shared.Plan(
        seeds=(0,),
        steps=100_000,
        contexts=(4096,),
        lengths=tuple(2**exponent for exponent in range(8, 17)),
        documents=64,
    ),
    "tiny": _shared.Plan(seeds=(0, 1), steps=2, contexts=(16,), lengths=(8, 16, 32), documents=2),
}
# The number of layers is a multiple of four at every scale.
PATTERNS = {
    "softmax": ("softmax",),
    "gated": ("sympow_gated_paper",),
    "conformal": ("conformal_paper",),
    "gated and softmax": ("3*sympow_gated_paper", "softmax"),
    "conformal and softmax": ("3*conformal_paper", "softmax"),
    "conformal and window": ("3*conformal_paper", "sliding_window"),
    "window and softmax": ("3*sliding_window", "softmax"),
}
_LAYERS = 4
_CONTEXT_PER_WINDOW = 4
_PAIRS = (
    ("gated and softmax", "softmax"),
    ("conformal and softmax", "softmax"),
    ("window and softmax", "softmax"),
    ("gated and softmax", "gated"),
    ("conformal and softmax", "conformal"),
    ("conformal and window", "conformal"),
    ("conformal", "gated"),
)


def _experiment(options: _shared.Options) -> None:
    def change(found: config.Config, variant: str) -> config.Config:
        window = found.data.context_length // _CONTEXT_PER_WINDOW
        layers = {} if options.scale == "paper" else {"model.layers": _LAYERS}
        attention = {"model.attention.window": window, "model.attention_pattern": PATTERNS[variant]}
        return loading.replace(found, layers | attention)

    attentions = dict.fromkeys(PATTERNS, config.preset("conformal_paper"))
    folders = _shared.train(options, attentions, lambda variant: f"hybrid {variant}", change)
    evaluation_context.report(options, folders, "Hybrids within and beyond the training context")


tables = functools.partial(evaluation_context.position_tables, _PAIRS)
main = _shared.Experiment(
    name="hybrids", description=__doc__, plans=PLANS, variants=tuple(PATTERNS), run=_experiment, tables=tables
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
