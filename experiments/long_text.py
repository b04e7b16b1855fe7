"""Loss by position in long files, for models of constant memory and for softmax, trained at a short context.

    python -m experiments.long_text --data='linux-source-6.1/**/*.c' --variants=window,gated,conformal

Models are trained at 256 and evaluated at positions up to 65,536, 256 times as far, of held-out files that are as long.
Softmax, which the command leaves out, takes most of an hour for each run. `gated` and `conformal` are the presets.
`window` is softmax over half the training context, whose memory has a constant size too, and `gated with window` has
both in each layer.
"""

import functools
import sys

from experiments import _shared, evaluation_context
from sympow_jax import config

PLANS = {
    "toy": _shared.Plan(
        seeds=(0, 1, 2),
        steps=300,
        contexts=(256,),
        lengths=tuple(2**exponent for exponent in range(6, 17)),
        documents=6,
    ),
    "tiny": _shared.Plan(seeds=(0,), steps=2, contexts=(16,), lengths=(8, 16, 32), documents=2),
}
VARIANTS = ("softmax", "window", "gated", "gated with window", "conformal")
_PAIRS = (
    ("softmax", "gated"),
    ("window", "gated"),
    ("gated with window", "gated"),
    ("conformal", "gated"),
)


def _experiment(options: _shared.Options) -> None:
    (context,) = options.plan.contexts
    attentions = _shared.power_variants(options.power, start="preset")
    attentions |= {
        "window": config.preset("sliding_window", window=context // 2),
        "gated with window": config.preset("sympow_gated_window", window=context // 2),
    }
    folders = _shared.train(options, attentions, lambda variant: f"preset_{variant}")
    evaluation_context.report(options, folders, "Loss by position in long files")


tables = functools.partial(evaluation_context.position_tables, _PAIRS)
main = _shared.Experiment(
    name="long_text", description=__doc__, plans=PLANS, variants=VARIANTS, run=_experiment, tables=tables
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
