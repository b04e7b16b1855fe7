"""Prints the XLA launches around the kernels of `ops.power_attention`, with the bytes that each moves.

    uv run --group h100 python -m tools.launches [--form=chunked] [--time=65536] [--head-dim=64] [--power=2]
        [--rows=12] [--passes=forward|both] [--batch=1]

Compiles the forward pass and both passes with 8 heads for an H100; no GPU is needed. `--form=step` compiles
`ops.power_attention_step` with a donated state, and prints a step that folds no token and one that does. Bytes are
those of the operands and results of each launch. They are an upper bound, since they assume that nothing stays in the
cache and that every operand is read whole. A loop counts as one launch without bytes; in a step that folds, it counts
as those of one iteration. Kernels of this project are left out.
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


def parse(program: str, computation: str = "ENTRY", inside_loops: bool = False) -> list[Launch]:
    """Returns the launches of a compiled program outside Mosaic GPU kernels, sorted by descending bytes.

    With `inside_loops`, the launches of one iteration of a loop take the place of the loop.
    """
    shapes: dict[str, str] = {}
    launches = []
    begin = program.index(f"\n{computation} ")
    for line in program[begin : program.index("\n}", begin)].splitlines():
        if (found := _INSTRUCTION.match(line)) is None:
            continue
        name, result, operation, rest = found.groups()
        shapes[name] = re.sub(r"/\*.*?\*/", "", result)
        if operation in _FREE or 'custom_call_target="mosaic_gpu' in rest:
            continue
        if inside_loops and operation == "while":
            for part in re.findall(r"(?:condition|body)=(%[\w.\-]+)", rest):
                launches += parse(program, part, inside_loops)
            continue
        operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
        moved = _bytes_of(shapes[name]) + sum(_bytes_of(shapes.get(operand, "")) for operand in operands)
        moved *= operation != "while"
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
    for name, default in (
        ("--time", 65_536),
        ("--head-dim", 64),
        ("--power", 2),
        ("--rows", 12),
        ("--batch", 1),
    ):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--form", choices=("attention", "chunked", "step"), default="chunked")
    parser.add_argument("--passes", choices=("forward", "both"), action="append")
    options = parser.parse_args()
    kernels = {"power": options.power, "implementation": "mosaic_gpu"}

    def show(title, launches):
        print(f"{title}: {len(launches)} launches, {sum(x.bytes for x in launches) / 1e9:.2f} GB")
        for launch in launches[: options.rows]:
            print(f"{launch.bytes / 1e6:9.1f} MB  {launch.name}  {launch.result[:70]}  {launch.source[-60:]}")

    if options.form == "step":
        sizes = options.batch, HEADS, options.head_dim
        state = jax.eval_shape(lambda: ops.PowerState.zeros(*sizes, options.head_dim, power=options.power))

        def step(query, key, value, log_decay, state):
            return ops.power_attention_step(query, key, value, state, log_decay=log_decay, **kernels)

        vector, gate = (
            jax.ShapeDtypeStruct(sizes[:n], dtype) for n, dtype in ((3, jnp.bfloat16), (2, jnp.float32))
        )
        arguments = vector, vector, vector, gate, state
        program = h100.compile_for(h100.mesh(), step, *arguments, donated=(4,)).as_text()
        show("step", parse(program))
        show("step that folds", parse(program, inside_loops=True))
        return

    def forward(query, key, value, log_decay):
        return ops.power_attention(query, key, value, log_decay=log_decay, form=options.form, **kernels)

    def both(*arrays):
        out, vjp = jax.vjp(forward, *arrays[:4])
        return out, vjp(arrays[4])

    vector = jax.ShapeDtypeStruct((options.batch, options.time, HEADS, options.head_dim), jnp.bfloat16)
    gate = jax.ShapeDtypeStruct((options.batch, options.time, HEADS), jnp.float32)
    for passes in options.passes or ("forward", "both"):
        function, dout = (forward, []) if passes == "forward" else (both, [vector])
        program = h100.compile_for(h100.mesh(), function, vector, vector, vector, gate, *dout).as_text()
        show(passes, parse(program))


def _bytes_of(types: str) -> int:
    return sum(
        _ITEM_BYTES.get(kind, 8) * math.prod(int(size) for size in sizes.split(",") if size)
        for kind, sizes in _ARRAY.findall(types)
    )


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    main()
