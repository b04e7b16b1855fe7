"""Traces a program for a Hopper GPU without running it, and lists the forms and kernels it would use."""

import dataclasses
import re

from jax.experimental.pallas import mosaic_gpu as plgpu

from sympow_jax.ops import target


@dataclasses.dataclass(frozen=True)
class Program:
    """Forms and kernels of a program.

    forms: forms of attention with their implementations, from named scopes. kernels: names of kernels.
    """

    forms: set[str]
    kernels: set[str]


def on_hopper(function, *arguments) -> Program:
    with target.interpreted(plgpu.InterpretGPUParams()):
        text = function.trace(*arguments).jaxpr.pretty_print(name_stack=True)
    return Program(
        set(
            re.findall(
                r"\b(?:attention|chunked|recurrent|softmax)_(?:reference|xla|mosaic_gpu|cudnn)\b", text
            )
        ),
        # Among these names, results that a checkpoint may save are not kernels.
        set(re.findall(r"\bname=(power_(?:attention|state)_(?!out\b|states\b)\w+)", text)),
    )
