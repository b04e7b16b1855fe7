"""Prints the XLA launches around the kernels of `ops.power_attention`, with the bytes that each moves.

    uv run --group h100 python -m tools.launches [--form=chunked] [--time=65536] [--head-dim=64] [--power=2]
        [--rows=12] [--passes=forward|both]

Compiles the forward pass and both passes at batch 1 with 8 heads for an H100; no GPU is needed. Bytes are those of the
operands and results of each launch. They are an upper bound, since they assume that nothing stays in the cache and that
every operand is read whole. A loop counts as one launch. Kernels of this project are left out.
"""

import argparse
import math
import os
import re
from typing import NamedTuple

HEADS = 8
_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2} | dict.fromkeys(
    ("f32", "s32", "u32"), 4
)
_ARRAY = re.compile(rf"\b({'|'.join(_ITEM_BYTES)}|f64|s64|u64)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
# Instructions that launch nothing: they rename memory, or their data exists from the start.
_FREE = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant")


class Launch(NamedTuple):
    """One launch of the entry computation, with the bytes of its operands and results."""

    name: str
    operation: str
    bytes: int
    result: str
    source: str


def parse(program: str) -> list[Launch]:
    """Returns the launches of a compiled program outside Mosaic GPU kernels, sorted by descending bytes."""
    shapes: dict[str, str] = {}
    launches = []
    for line in program[program.index("\nENTRY") :].splitlines():
        if (found := _INSTRUCTION.match(line)) is None:
            continue
        name, result, operation, rest = found.groups()
        shapes[name] = re.sub(r"/\*.*?\*/", "", result)
        if operation in _FREE or 'custom_call_target="mosaic_gpu' in rest:
            continue
        operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
        moved = _bytes_of(shapes[name]) + sum(_bytes_of(shapes.get(operand, "")) for operand in operands)
        source = re.search(r'op_name="([^"]*)"', rest)
        launches.append(Launch(name, operation, moved, shapes[name], source[1] if source else ""))
    return sorted(launches, key=lambda launch: -launch.bytes)


def main() -> None:
    """Prints totals of both programs and the launches that move the most bytes."""
    import jax
    import jax.numpy as jnp

    from sympow_jax import ops
    from tools import h100

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("--time", 65_536), ("--head-dim", 64), ("--power", 2), ("--rows", 12)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--form", choices=("attention", "chunked"), default="chunked")
    parser.add_argument("--passes", choices=("forward", "both"), action="append")
    options = parser.parse_args()
    kernels = {"power": options.power, "form": options.form, "implementation": "mosaic_gpu"}

    def forward(query, key, value, log_decay):
        return ops.power_attention(query, key, value, log_decay=log_decay, **kernels)

    def both(*arrays):
        out, vjp = jax.vjp(forward, *arrays[:4])
        return out, vjp(arrays[4])

    vector = jax.ShapeDtypeStruct((1, options.time, HEADS, options.head_dim), jnp.bfloat16)
    gate = jax.ShapeDtypeStruct((1, options.time, HEADS), jnp.float32)
    for passes in options.passes or ("forward", "both"):
        function, dout = (forward, []) if passes == "forward" else (both, [vector])
        program = h100.compile_for(h100.mesh(), function, vector, vector, vector, gate, *dout).as_text()
        launches = parse(program)
        print(f"{passes}: {len(launches)} launches, {sum(x.bytes for x in launches) / 1e9:.2f} GB")
        for launch in launches[: options.rows]:
            print(f"{launch.bytes / 1e6:9.1f} MB  {launch.name}  {launch.result[:70]}  {launch.source[-60:]}")


def _bytes_of(types: str) -> int:
    return sum(
        _ITEM_BYTES.get(kind, 8) * math.prod(int(size) for size in sizes.split(",") if size)
        for kind, sizes in _ARRAY.findall(types)
    )


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    main()
