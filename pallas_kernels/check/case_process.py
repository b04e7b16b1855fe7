"""Runs one case of the check in this process: `python -m pallas_kernels.check.case_process NAME`.

Prints one line, `RESULT` and the result as JSON, or nothing if the kernel hangs or crashes the process.
"""

import json
import os
import sys
import time

# Set before JAX is imported. Other processes need memory too, a kernel inside a CUDA graph is harder to find, and XLA's
# autotuning of its own kernels would double the compilation time.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
_FLAGS = "--xla_gpu_enable_command_buffer=", "--xla_gpu_autotune_level=0"
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS])

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from pallas_kernels.check import cases, supervisor  # noqa: E402

RUNS = 3
_TIMED_RUNS = 5


def measure(case: cases.Case, interpret=None) -> dict:
    """Compiles and runs a case several times and compares its results with the formula.

    Args:
        case: case to run.
        interpret: parameters of the GPU interpreter, or None to run on a GPU.

    Returns:
        `errors` and `bounds` by result, `different` (the results that differed between runs), `compile_seconds`, and
        for a real shape `call_milliseconds` and `kernels`, milliseconds by name.
    """
    prepared = cases.prepare(case, interpret)
    begin = time.perf_counter()
    call = jax.jit(prepared.call).lower(prepared.arrays).compile()
    result: dict = {"compile_seconds": round(time.perf_counter() - begin, 2), "bounds": prepared.bounds}
    runs = []
    with supervisor.exclusive():
        for _ in range(RUNS):
            if interpret is None:
                _poison()
            runs.append(jax.device_get(call(prepared.arrays)))
        if case.real and interpret is None:
            result |= _times(call, prepared.arrays)
    result["different"] = sorted(
        {name for run in runs for name in run if run[name].tobytes() != runs[0][name].tobytes()}
    )
    compared = prepared.compare(runs[0])
    result["errors"] = {
        name: _relative_error(compared[name], expected) for name, expected in prepared.expected.items()
    }
    return result


def _poison() -> None:
    """Fills free memory with NaN, so that unwritten outputs of a kernel become visible."""
    blocks = [jnp.full((2**n, 2**20), jnp.nan, jnp.float32) for n in range(9)]
    jax.block_until_ready(blocks)
    for block in blocks:
        block.delete()


def _relative_error(actual, expected) -> float:
    """Returns RMS(actual - expected) / RMS(expected)."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    scale = np.sqrt(np.mean(expected**2))
    return float(np.sqrt(np.mean((actual - expected) ** 2)) / (scale or 1))


def _times(call, arrays) -> dict:
    """Returns the milliseconds of a call and of each of its kernels."""
    jax.block_until_ready(call(arrays))
    begin = time.perf_counter()
    for _ in range(_TIMED_RUNS):
        last = call(arrays)
    jax.block_until_ready(last)
    found: dict = {"call_milliseconds": 1e3 * (time.perf_counter() - begin) / _TIMED_RUNS}
    try:
        from jax.experimental.mosaic.gpu import profiler

        _, kernels = profiler.measure(call, aggregate=False)(arrays)
    except Exception as error:  # CUPTI may be missing or in use: the case itself has passed
        return found | {"kernels_note": str(error).splitlines()[0][:200]}
    found["kernels"] = {}
    for name, milliseconds in kernels or ():
        found["kernels"][name] = found["kernels"].get(name, 0.0) + milliseconds
    return found


def main(name: str) -> None:
    """Prints the result of the case with that name."""
    case = next(case for case in cases.CASES if case.name == name)
    print(supervisor.RESULT + json.dumps(measure(case)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
