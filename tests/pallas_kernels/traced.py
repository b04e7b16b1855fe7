"""What a program on a Hopper GPU would run, found by tracing it for one without running anything."""

import dataclasses
import re

from jax.experimental.pallas import mosaic_gpu as plgpu

from sympow_jax.ops._shared import target


@dataclasses.dataclass(frozen=True)
class Program:
    """forms: forms of attention with their implementations, as named scopes say. kernels: names of kernels."""

    forms: set[str]
    kernels: set[str]


def on_hopper(function, *arguments) -> Program:
    """Of a jitted function and abstract arguments."""
    with target.interpreted(plgpu.InterpretGPUParams()):
        text = function.trace(*arguments).jaxpr.pretty_print(name_stack=True)
    return Program(
        set(
            re.findall(
                r"\b(?:attention|chunked|recurrent|softmax)_(?:reference|xla|mosaic_gpu|cudnn)\b", text
            )
        ),
        # Of what has such a name, results that a checkpoint may keep are no kernels.
        set(re.findall(r"\bname=(power_(?:attention|state)_(?!out\b|states\b)\w+)", text)),
    )
