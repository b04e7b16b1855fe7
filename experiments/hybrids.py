"""Hybrids: loss by position of models whose last layer of four is softmax, or has a window.

Models of four layers are trained at a context of 256 and evaluated to 16 times that. A pattern of three layers of power
attention and one of softmax has a quarter of the KV cache of softmax. With a sliding window in place of softmax, the
memory between tokens has a fixed size.
"""

import dataclasses
import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import _shared, evaluation_context
from sympow_jax import config

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
# Patterns of the toy and tiny scale, which have four layers, and of the paper's model, whose number is a multiple.
PATTERNS = {
    "softmax": ("softmax",),
    "gated": ("sympow_gated",),
    "conformal": ("conformal",),
    "gated and softmax": ("3*sympow_gated", "softmax"),
    "conformal and softmax": ("3*conformal", "softmax"),
    "conformal and window": ("3*conformal", "sliding_window"),
    "window and softmax": ("3*sliding_window", "softmax"),
}
_LAYERS = 4
# Windows are a quarter of the training context.
_WINDOWS = 4
_PAIRS = (
    ("gated and softmax", "softmax"),
    ("conformal and softmax", "softmax"),
    ("window and softmax", "softmax"),
    ("gated and softmax", "gated"),
    ("conformal and softmax", "conformal"),
    ("conformal and window", "conformal"),
    ("conformal", "gated"),
)


def main(arguments: Sequence[str]) -> int:
    """Runs the experiment with the arguments after its name; returns the exit code."""
    return _shared.run(
        "hybrids",
        __doc__,
        arguments,
        lambda options: evaluation_context.report(
            options, _train(options), tables, title="Hybrids within and beyond the training context"
        ),
        plans=PLANS,
        variants=tuple(PATTERNS),
    )


def _train(options: _shared.Options) -> _shared.Folders:
    (context,) = options.plan.contexts
    keys = [
        (variant, context, seed) for seed, variant in itertools.product(options.plan.seeds, options.variants)
    ]
    runs = {
        f"hybrid_{variant.replace(' ', '_')}_context{context}_steps{options.plan.steps}_seed{seed}": settings(
            options, PATTERNS[variant], context=context, seed=seed
        )
        for variant, _, seed in keys
    }
    return dict(zip(keys, _shared.train_all(options, runs), strict=True))


def settings(options: _shared.Options, pattern: tuple[str, ...], *, context: int, seed: int) -> config.Config:
    """Returns the config of a run of an evaluated model with this pattern."""
    shared = config.AttentionConfig(window=context // _WINDOWS)
    found = _shared.settings(options, shared, context=context, seed=seed, evaluated=True)
    layers = found.model.layers if options.scale == "paper" else _LAYERS
    model = dataclasses.replace(found.model, layers=layers, attention_pattern=pattern)
    return dataclasses.replace(found, model=model)


def tables(content: Mapping[str, Any]) -> Sequence[_shared.Table]:
    """Returns the tables of an experiment's JSON."""
    return evaluation_context.position_tables(content["rows"], _PAIRS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
