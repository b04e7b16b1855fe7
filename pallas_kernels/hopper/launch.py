"""Skeleton of the kernels that multiply matrices: one warpgroup copies, the others compute."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import tensor_core

__all__ = ["Registers", "launch"]


class Registers(NamedTuple):
    """Registers per thread of the warpgroup that copies, which releases some of its own, and of the others."""

    copying: int
    computing: int


def launch(
    body: Callable[..., tuple[Callable[[], None], Callable[..., None]]],
    inputs: Mapping[str, jax.Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
    *,
    grid: Mapping[str, int],
    computing: int,
    registers: Registers | None,
    name: str,
    interpret: Any,
    approximate: bool = True,
) -> dict[str, jax.Array]:
    """Runs a kernel and returns its results by name.

    Args:
        body: body(gmem, smem) returns copy() and compute(warpgroup, core), which run in their own warpgroups. gmem has
            the inputs and outputs by name, smem the scratch; core is a `tensor_core.TensorCore`.
        inputs: arrays in global memory.
        outputs: types of the results.
        scratch: types of shared memory and barriers.
        grid: numbers of thread blocks along each named axis.
        computing: number of warpgroups that compute, with indices from 0 on.
        registers: registers per thread, or None if every warpgroup keeps those of the launch.
        name: name of the kernel in profiles.
        interpret: parameters of the GPU interpreter, or None.
        approximate: whether exponentials and divisions may be approximate.
    """
    names = (*inputs, *outputs)

    def kernel(*refs, accumulators=None, **smem):
        copy, compute = body(dict(zip(names, refs, strict=True)), smem)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == computing)
        def _copy():
            if registers:
                plgpu.set_max_registers(registers.copying, action="decrease")
            copy()

        @pl.when(warpgroup < computing)
        def _compute():
            if registers:
                plgpu.set_max_registers(registers.computing, action="increase")
            memory = None if accumulators is None else accumulators.at[warpgroup]
            compute(warpgroup, tensor_core.TensorCore(memory))

    options: dict[str, Any] = {}
    if interpret is not None:
        scratch = {**scratch, "accumulators": tensor_core.TensorCore.interpreted_memory(computing)}
        options["interpret"] = interpret
    if approximate:
        options["compiler_params"] = plgpu.CompilerParams(approx_math=True)
    results = plgpu.kernel(
        kernel,
        out_type=tuple(outputs.values()),
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=computing + 1,
        thread_name="warpgroup",
        kernel_name=name,
        **options,
    )(*inputs.values())
    return dict(zip(outputs, results, strict=True))
