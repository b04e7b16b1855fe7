"""Measures the rates that the cost model of the kernels assumes: of matrix products and of reads from L2.

    python -m benchmarks.hopper.hardware [--out=FILE]

`wgmma`: every multiprocessor adds m64nNk16 products to the accumulators of one warpgroup or of two, with the first
operand in registers or in shared memory. The model assumes N / 2 cycles for each, also where N is not a multiple of 16.
`cache`: every multiprocessor copies the same few megabytes into shared memory by TMA, again and again. Cycles are those
of the model's clock (`tools.h100.SUSTAINED_HERTZ`), so that they replace its constants as they are. Results are
compared with plain JAX.
"""

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks import _contenders, _rows, _timing
from pallas_kernels.check import supervisor
from pallas_kernels.hopper import launch, ring, tensor_core
from tools import h100

__all__ = ["cache", "main", "wgmma"]

COLUMNS = (32, 40, 48, 64, 96, 128, 160)
# Of the 50 MB of L2, half of which are closer to a multiprocessor than the others.
MEGABYTES = (4, 16, 32)
DEPTH = 64
# Products of depth 64 in one iteration, after which the warpgroup waits; four instructions each.
UNROLLED, INSTRUCTIONS = 16, DEPTH // 16
STAGES = 6
# Rows of 128 bytes in one copy of 16 KB.
TILE = 128
ITERATIONS, PASSES = 2048, 64
ROW_SECONDS = 120.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table and writes the JSON. Exits with status 1 and one line if there is no Hopper GPU."""
    parser = _rows.make_parser(__doc__)
    options = _rows.read_options(parser, arguments)
    described: list[dict] = [
        {"rate": "wgmma", "columns": columns, "left_in": left_in, "warpgroups": warpgroups}
        for columns in COLUMNS
        for left_in in ("registers", "memory")
        for warpgroups in ((2, 1) if columns in (64, 128) else (2,))
    ]
    described += [{"rate": "cache", "megabytes": megabytes} for megabytes in MEGABYTES]
    if options.smoke:
        described = [*described[:2], {"rate": "cache", "megabytes": 1 / 32}]
    report = _rows.measure_rows(
        "benchmarks.hopper.hardware",
        described,
        functools.partial(measure, smoke=options.smoke),
        options,
        seconds=ROW_SECONDS,
    )
    for row in report["rows"]:
        row["of"] = f"{row.get('megabytes', 0):g} MB"
        if row["rate"] == "wgmma":
            row["of"] = f"N = {row['columns']}, {row['warpgroups']} warpgroups, left in {row['left_in']}"
        row.setdefault("note", row.get("unit"))
    _rows.print_machine(report)
    numbers = {name: (name, "{:.4g}") for name in ("measured", "assumed", "spread")}
    columns = {"rate": ("rate", ""), "of": ("of", "{}"), **numbers, "unit or note": ("note", "")}
    _rows.print_table("rates", report["rows"], columns)


def measure(row: dict, *, smoke: bool = False) -> dict:
    """Measures a row. `smoke` interprets one block on any device."""
    if not smoke:
        _rows.require_hopper()
        if (found := jax.devices()[0].core_count) != h100.MULTIPROCESSORS:
            raise NotImplementedError(
                f"it needs {h100.MULTIPROCESSORS} multiprocessors, as of an H100 SXM, not {found}"
            )
    random = np.random.default_rng(0)
    kernel: Callable[..., jax.Array]
    if row["rate"] == "wgmma":
        columns, warpgroups, repeats = row["columns"], row["warpgroups"], 1 if smoke else ITERATIONS
        kernel = functools.partial(wgmma, warpgroups=warpgroups, left_in=row["left_in"])
        arrays = [jnp.asarray(random.standard_normal((n, DEPTH)), jnp.bfloat16) for n in (64, columns)]
        first, right = (x.astype(jnp.float32) for x in arrays)
        expected, assumed, unit = UNROLLED * first @ right.T, columns / 2, "cycles per m64nNk16"
        # All warpgroups share the tensor cores of their multiprocessor.
        work = warpgroups * repeats * UNROLLED * INSTRUCTIONS
    else:
        tiles = int(row["megabytes"] * 2**20) // (TILE * 128)
        kernel, repeats = cache, 1 if smoke else PASSES
        arrays = [jnp.asarray(random.standard_normal((tiles * TILE, 64)), jnp.bfloat16)]
        expected, assumed = arrays[0][-64:].astype(jnp.float32), h100.CACHE_BYTES
        work, unit = repeats * arrays[0].nbytes, "bytes per cycle of one multiprocessor"
    blocks, interpret = (1, plgpu.InterpretGPUParams()) if smoke else (h100.MULTIPROCESSORS, None)
    kernel = functools.partial(kernel, blocks=blocks, interpret=interpret)
    # One repeat is checked: a sum of many equal products would err by its own length.
    result = jax.jit(functools.partial(kernel, repeats=1))(*arrays)
    error = float(_contenders.rms_error(result, jnp.broadcast_to(expected, result.shape)))
    _contenders.require_close("the result", error, _contenders.VALUE_BOUND)
    program = jax.jit(functools.partial(kernel, repeats=repeats)).lower(*arrays).compile()
    with supervisor.exclusive():
        samples = _timing.samples(functools.partial(_timing.queued, program, [tuple(arrays)]))
    seconds = [sample.seconds for sample in samples]
    median = statistics.median(seconds)
    cycles = median * h100.SUSTAINED_HERTZ
    return {
        "measured": cycles / work if row["rate"] == "wgmma" else work / cycles,
        "assumed": assumed,
        "unit": unit,
        "seconds": median,
        "spread": _timing.spread(seconds),
        "error": error,
    }


def wgmma(
    left,
    right,
    *,
    repeats: int,
    blocks: int,
    warpgroups: int,
    left_in: str,
    interpret: Any = None,
) -> jax.Array:
    """Returns the sum of repeats * UNROLLED products left @ right^T of every block and warpgroup.

    Args are left, bfloat16 [64, DEPTH], which is read from `left_in`, "registers" or "memory", and right, bfloat16
    [N, DEPTH], which is read from shared memory. There is a thread block for each multiprocessor. The result is float32
    [blocks, warpgroups, 64, N].
    """
    columns = right.shape[0]

    def body(gmem, smem):
        block = lax.axis_index("block")

        def copy():
            plgpu.copy_gmem_to_smem(gmem["left"], smem["left_smem"], smem["full"])
            plgpu.copy_gmem_to_smem(gmem["right"], smem["right_smem"], smem["full"])

        def compute(warpgroup, core):
            plgpu.barrier_wait(smem["full"])
            first = smem["left_smem"]
            if left_in == "registers":
                first = plgpu.load(first, layout=plgpu.Layout.WGMMA)

            def add(accumulator):
                @pl.loop(jnp.int32(0), jnp.int32(repeats))
                def _iteration(_):
                    # Straight-line code with one product in flight, as in the kernels.
                    for _ in range(UNROLLED):
                        core.add(accumulator, first, smem["right_smem"].T, wait=1)
                    core.wait()

                gmem["out"][block, warpgroup] = accumulator[...]

            core.accumulators(add, columns)

        return copy, compute

    return launch.launch(
        body,
        {"left": left, "right": right},
        {"out": jax.ShapeDtypeStruct((blocks, warpgroups, 64, columns), jnp.float32)},
        {
            "left_smem": tensor_core.operand((), 64, DEPTH, left.dtype),
            "right_smem": tensor_core.operand((), columns, DEPTH, right.dtype),
            "full": plgpu.Barrier(num_arrivals=2),
        },
        grid={"block": blocks},
        warpgroups=warpgroups,
        name="measure_wgmma",
        interpret=interpret,
    )["out"]


def cache(source, *, repeats: int, blocks: int, interpret: Any = None) -> jax.Array:
    """Copies all of `source` into the shared memory of every block, `repeats` times; returns its last 64 rows.

    source: bfloat16 [rows, 64], rows a multiple of TILE. The result is float32 [blocks, 64, 64].
    """
    tiles = source.shape[0] // TILE
    steps = tiles * repeats

    def body(gmem, smem):
        block = lax.axis_index("block")

        def copy():
            def copy_tile(step, slot):
                rows = pl.ds(lax.rem(step, jnp.int32(tiles)) * TILE, TILE)
                plgpu.copy_gmem_to_smem(
                    gmem["source"].at[rows], smem["source_smem"].at[slot], smem["full"].at[slot]
                )

            ring.fill(jnp.int32(steps), STAGES, smem["free"], copy_tile)

        def compute(warpgroup, core):
            @pl.loop(jnp.int32(0), jnp.int32(steps))
            def _step(step):
                slot = ring.slot_of(step, STAGES)
                plgpu.barrier_wait(smem["full"].at[slot])

                # The last tile is written, so that the result shows that copies arrived.
                @pl.when(step == steps - 1)
                def _write():
                    last = smem["source_smem"].at[slot, pl.ds(TILE - 64, 64)]
                    gmem["out"][block] = plgpu.load(last, layout=plgpu.Layout.WGMMA).astype(jnp.float32)

                plgpu.barrier_arrive(smem["free"].at[slot])

        return copy, compute

    return launch.launch(
        body,
        {"source": source},
        {"out": jax.ShapeDtypeStruct((blocks, 64, 64), jnp.float32)},
        {
            "source_smem": tensor_core.operand((STAGES,), TILE, 64, source.dtype),
            "full": plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
            "free": plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        },
        grid={"block": blocks},
        warpgroups=1,
        name="measure_cache",
        interpret=interpret,
    )["out"]


if __name__ == "__main__":
    main()
