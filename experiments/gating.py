"""Per-channel gates and per-pair rotation rates, against the conformal paper's one gate and one rate per head.

"Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025, section 5) leaves these as future work.
A per-channel gate is a vector over the value channels. It is fixed, or learned but independent of the data, or learned
from the data; the gate of a head is also learned independently of the data. Rotation rates are learned for every pair.
Models are trained and evaluated as in `evaluation_context`, and the two experiments share runs.
"""

import dataclasses
import functools
import sys

from experiments import _shared, evaluation_context
from sympow_jax import config

PLANS = evaluation_context.PLANS | {
    "tiny": dataclasses.replace(evaluation_context.PLANS["tiny"], seeds=(0,)),
}
VARIANTS = (
    "sympow",
    "gated",
    "constant",
    "channel fixed",
    "channel constant",
    "channel learned",
    "conformal",
    "conformal pairs",
)
_PAIRS = (
    *((name, "gated") for name in VARIANTS if name != "gated"),
    ("channel constant", "constant"),
    ("conformal pairs", "conformal"),
)


def _experiment(options: _shared.Options) -> None:
    evaluation_context.report(
        options,
        _shared.train(options, attentions(options.power)),
        "Gates by channel, rotation rates by pair",
        # Sympow is far above all others.
        differences=[pair for pair in _PAIRS if pair[1] == "gated" and pair[0] != "sympow"],
    )


def attentions(power: int) -> dict[str, config.AttentionConfig]:
    """Returns the variants: gates with fixed rotations, and learned rotations with the paper's gate."""
    scalar = _shared.power_variants(power)
    decays = ("constant", "channel_fixed", "channel_constant", "channel_learned")
    gates = {decay.replace("_", " "): dataclasses.replace(scalar["gated"], decay=decay) for decay in decays}
    pairs = dataclasses.replace(scalar["conformal"], position="learned_rope_pairs")
    return scalar | gates | {"conformal pairs": pairs}


tables = functools.partial(evaluation_context.position_tables, _PAIRS)
main = _shared.Experiment(
    name="gating",
    description=__doc__,
    plans=PLANS,
    variants=VARIANTS,
    base="gated",
    powers=(2, 4, 6),
    run=_experiment,
    tables=tables,
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
