"""Skeleton of the kernels that multiply matrices: one warpgroup copies, the others compute."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import tensor_core

# Bytes that all blocks that run at once may read repeatedly: most of an H100's L2 of 50 MB. With 201 MB, 192 heads
# at 4,096 tokens, the forward kernel took 1.3 times as long.
_CACHED_BYTES = 32 << 20

# Registers of a multiprocessor, and the unit in which warpgroups exchange them.
_REGISTERS, _UNIT = 65_536, 8
_THREADS = 128
# Registers per thread of the warpgroup that copies, by the number of the others. With fewer, it would spill.
_COPYING = {2: 40, 3: 32}


def heads_grid(batch: int, heads: int, blocks: int, head_bytes: float) -> dict[str, int]:
    """Returns the grid of a kernel with a thread block for each head and each of its `blocks`.

    A head's longest block must be number 0. Thread blocks start in the order of the grid, its last axis fastest. If
    heads came first, the longest blocks of the last heads would start last and determine the time. So all heads of a
    section start their longest blocks together; a section is as many heads as fit in the cache, each with `head_bytes`
    that all its blocks read.
    """
    section = max(
        n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * head_bytes <= _CACHED_BYTES)
    )
    return {"batch": batch, "section": heads // section, "block": blocks, "head": section}


def head_index(grid: Mapping[str, int]) -> jax.Array:
    """Returns the head of this thread block of a `heads_grid`."""
    return lax.axis_index("section") * grid["head"] + lax.axis_index("head")


def interpreted(interpret: Any) -> dict[str, Any]:
    """Returns the argument of `plgpu.kernel` for parameters of the GPU interpreter, or none for None."""
    return {} if interpret is None else {"interpret": interpret}


def require(kernels: str, supported: Mapping[str, bool]) -> None:
    """Raises NotImplementedError naming the first constraint that does not hold."""
    for constraint, holds in supported.items():
        if not holds:
            raise NotImplementedError(f"the {kernels} kernels need {constraint}")


def store(destination, value):
    """Stores to global memory, also if rows of 16 values do not fill cache lines."""
    if hasattr(plgpu, "store"):
        plgpu.store(destination, value, optimized=False)
    else:  # before jax 0.12, which has no `plgpu.store`
        destination[...] = value


def launch(
    body: Callable[..., tuple[Callable[[], None], Callable[..., None]]],
    inputs: Mapping[str, jax.Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
    *,
    grid: Mapping[str, int],
    warpgroups: int,
    name: str,
    interpret: Any,
    approximate: bool = True,
    copying_registers: int | None = None,
) -> dict[str, jax.Array]:
    """Runs a kernel and returns its results by name.

    Args:
        body: body(gmem, smem) returns copy(), for the last warpgroup, and compute(warpgroup, core), for the others.
            `body` is traced once for the copying branch and once for the computing one: values computed before the
            branch would stay in registers in both, and spill. gmem has the inputs and outputs by name, smem the
            scratch; core is a `tensor_core.TensorCore`.
        inputs: arrays in global memory.
        outputs: types of the results.
        scratch: types of shared memory and barriers.
        grid: numbers of thread blocks along each named axis.
        warpgroups: number of warpgroups that compute, with indices from 0 on.
        name: name of the kernel in profiles.
        interpret: parameters of the GPU interpreter, or None.
        approximate: whether exponentials and divisions may be approximate.
        copying_registers: registers per thread of the warpgroup that copies, if not the usual number. The others share
            the rest.
    """
    names = (*inputs, *outputs)
    assert len({*names}) == len(names)
    # With one computing warpgroup, every thread already has the most registers that it can use.
    copying = (copying_registers or _COPYING.get(warpgroups)) if warpgroups > 1 else None

    def kernel(*refs, accumulators=None, **smem):
        gmem = dict(zip(names, refs, strict=True))
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == warpgroups)
        def _copy():
            if copying:
                plgpu.set_max_registers(copying, action="decrease")
            copy, _ = body(gmem, smem)
            copy()

        @pl.when(warpgroup < warpgroups)
        def _compute():
            if copying:
                # Each computing warpgroup has an equal share of what the copying one leaves.
                launched = _REGISTERS // (_THREADS * (warpgroups + 1)) // _UNIT * _UNIT
                share = ((warpgroups + 1) * launched - copying) // warpgroups // _UNIT * _UNIT
                plgpu.set_max_registers(share, action="increase")
            memory = None if accumulators is None else accumulators.at[warpgroup]
            _, compute = body(gmem, smem)
            compute(warpgroup, tensor_core.TensorCore(memory))

    options = interpreted(interpret)
    if interpret is not None:
        scratch = {**scratch, "accumulators": tensor_core.TensorCore.interpreted_memory(warpgroups)}
    if approximate:
        options["compiler_params"] = plgpu.CompilerParams(approx_math=True)
    results = plgpu.kernel(
        kernel,
        out_type=tuple(outputs.values()),
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=name,
        **options,
    )(*inputs.values())
    return dict(zip(outputs, results, strict=True))
