"""Gates by value channel and rotation rates by pair, against the conformal paper's one of each a head.

What "Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025, section 5) leaves as future
work: gates that are fixed, learned but independent of the data, or learned from the data, each a vector over the
channels of the values; and learned rotation rates of every pair. Trained and evaluated as in `evaluation_context`,
whose runs it shares.
"""

import dataclasses
import sys
from collections.abc import Sequence

from experiments import _command, _runs, evaluation_context
from sympow_jax import config
from sympow_jax.training import cli

NAME = "gating"
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
    with cli.user_errors():
        options = _command.parse(
            NAME, __doc__ or "", arguments, plans=PLANS, variants=VARIANTS, powers=(2, 4, 6)
        )
        evaluation_context.report(
            options, attentions(options.power), title="Gates by channel, rotation rates by pair"
        )
        return 0


def attentions(power: int) -> dict[str, config.AttentionConfig]:
    """The variants: a gate with fixed rotations, and learned rotations with the paper's gate."""
    scalar = _runs.power_variants(power)
    channels = {
        f"channel {kind}": dataclasses.replace(scalar["gated"], decay=f"channel_{kind}")
        for kind in ("fixed", "constant", "learned")
    }
    pairs = dataclasses.replace(scalar["conformal"], position="learned_rope_pairs")
    return scalar | channels | {"conformal pairs": pairs}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
