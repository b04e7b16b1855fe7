"""Per-channel gates and per-pair rotation rates, against the conformal paper's one gate and one rate per head.

"Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025, section 5) leaves these as future work.
A per-channel gate is a vector over the value channels. It is fixed, or learned but independent of the data, or learned
from the data. Rotation rates are learned for every pair. Models are trained and evaluated as in `evaluation_context`,
and the two experiments share runs.
"""

import dataclasses
import sys
from collections.abc import Sequence

from experiments import _shared, evaluation_context
from sympow_jax import config

PLANS = evaluation_context.PLANS | {
    "toy": dataclasses.replace(evaluation_context.PLANS["toy"], seeds=(0,)),
    "tiny": dataclasses.replace(evaluation_context.PLANS["tiny"], seeds=(0,)),
}
VARIANTS = (
    "sympow",
    "gated",
    "channel fixed",
    "channel constant",
    "channel learned",
    "conformal",
    "conformal pairs",
)


def main(arguments: Sequence[str]) -> int:
    """Runs the experiment with the arguments after its name; returns the exit code."""
    return _shared.run(
        "gating",
        __doc__,
        arguments,
        lambda options: evaluation_context.report(
            options, attentions(options.power), title="Gates by channel, rotation rates by pair"
        ),
        plans=PLANS,
        variants=VARIANTS,
        powers=(2, 4, 6),
    )


def attentions(power: int) -> dict[str, config.AttentionConfig]:
    """Returns the variants: gates with fixed rotations, and learned rotations with the paper's gate."""
    scalar = _shared.power_variants(power)
    channels = {
        f"channel {kind}": dataclasses.replace(scalar["gated"], decay=f"channel_{kind}")
        for kind in ("fixed", "constant", "learned")
    }
    pairs = dataclasses.replace(scalar["conformal"], position="learned_rope_pairs")
    return scalar | channels | {"conformal pairs": pairs}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
