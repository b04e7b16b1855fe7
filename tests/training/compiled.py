"""Compiles whole training steps for eight H100s of one node, and reads their memory and collectives.

    python -m tests.training.compiled report 124m-p2-4096-data8
    python -m tests.training.compiled table [CASE ...]

Nothing is run, and no GPU is needed. Each case has a separate process, since LLVM may crash it, and takes minutes.
Needs the packages of the dependency group `h100`.
"""

import collections
import dataclasses
import json
import math
import re
import sys

import jax
import jax.numpy as jnp

from sympow_jax import config, training
from sympow_jax.layers import partitioning
from sympow_jax.training import sharding
from tests.training import collectives
from tools import h100

MEMORY = 80e9  # bytes of an H100
TIMEOUT = 1500  # seconds for a case on two busy cores
# The table leaves out sums of norms' gradients, scalars, and collectives for documents and positions.
SMALL = 5e6


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its batch and the sharding layout of the devices."""

    size: str
    power: int
    context: int
    sharding: dict[str, int]
    tokens: int = 524_288
    remat: str = "none"

    def settings(self) -> config.Config:
        """Config of a run of the conformal model."""
        return config.Config(
            model=config.ModelConfig(
                **config.MODEL_SIZES[self.size],
                remat=self.remat,
                attention=dataclasses.replace(
                    config.preset("conformal_paper", power=self.power), implementation="mosaic_gpu"
                ),
            ),
            data=config.DataConfig(context_length=self.context, batch_tokens=self.tokens),
            sharding=config.ShardingConfig(**self.sharding),
        )


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Collectives of one kind over the same axes in a step.

    Fields are the number of arrays, the bytes that a device sends, and the largest result. Bytes are those of rings: of
    an array on n devices, each sends (n - 1) / n if it is gathered, exchanged all to all or scattered, and twice that
    if it is all-reduced.
    """

    kind: str
    axes: tuple[str, ...]
    arrays: int
    sent: float
    largest: int


@dataclasses.dataclass(frozen=True)
class Report:
    """Bytes on each device, collectives, and the kernels of a step with their number."""

    peak: int
    arguments: int
    exchanges: list[Exchange]
    forms: list[str]
    kernels: dict[str, int]


CASES = {
    **{
        f"124m-p{power}-{context}-data8": Case("gpt2_124m", power, context, {"data": 8})
        for power in (2, 4)
        for context in (4096, 16384, 65536)
    },
    "124m-p2-65536-context8": Case("gpt2_124m", 2, 65536, {"context": 8}),
    # A row that no device has.
    "124m-p2-1048576-context8": Case(
        "gpt2_124m", 2, 1048576, {"context": 8}, tokens=1048576, remat="attention"
    ),
    "1311m-p2-4096-fsdp8": Case("gpt3_1311m", 2, 4096, {"fsdp": 8}, remat="attention"),
}


def compile_step(case: Case):
    """Compiles an update of the case."""
    settings = case.settings()
    sizes = {axis: case.sharding.get(axis, 1) for axis in partitioning.AXES}
    mesh = h100.mesh(tuple(sizes.values()), tuple(sizes))
    tokens = jax.ShapeDtypeStruct(
        (settings.data.batch_size, case.context), jnp.int32, sharding=sharding.batch_sharding(mesh)
    )
    program, batch = training.Program(settings, mesh), {"inputs": tokens, "targets": tokens}
    return program.update.trace(program.abstract, batch).lower().compile(), mesh


def read(case: Case) -> Report:
    """Compiles the case in this process and returns its report."""
    compiled, mesh = compile_step(case)
    memory, program = compiled.memory_analysis(), compiled.as_text()
    return Report(
        peak=memory.peak_memory_in_bytes,
        arguments=memory.argument_size_in_bytes,
        exchanges=exchanges(collectives.collectives(program, mesh), mesh),
        forms=_forms(program),
        kernels=_kernels(program),
    )


def _forms(program: str) -> list[str]:
    names = r"\b(?:attention|chunked|recurrent)_(?:reference|xla|mosaic_gpu)\b"
    return sorted(set(re.findall(names, program)))


def _kernels(program: str) -> dict[str, int]:
    found = collections.Counter()
    for line, times in collectives.instructions(program):
        for name in re.findall(r"(power_[a-z_]+?)_mosaic_gpu", line):
            found[name] += times
    return dict(found)


def report(name: str) -> Report:
    """Returns the report of a case, compiled in a separate process."""
    found = json.loads(h100.run("tests.training.compiled", "report", name, timeout=TIMEOUT))
    found["exchanges"] = [Exchange(**x | {"axes": tuple(x["axes"])}) for x in found["exchanges"]]
    return Report(**found)


def exchanges(
    found: list[collectives.Collective], mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
) -> list[Exchange]:
    """Sums the collectives by kind and axes."""
    groups = collections.defaultdict(list)
    for collective in found:
        groups[collective.kind, collective.axes].append(collective)
    return [
        Exchange(kind, axes, len(of), sum(_sent(x, mesh) for x in of), max(x.nbytes for x in of))
        for (kind, axes), of in sorted(groups.items())
    ]


def _sent(collective: collectives.Collective, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> float:
    devices = math.prod(mesh.shape[axis] for axis in collective.axes)
    times = {
        "all-reduce": 2 * (devices - 1) / devices,
        # The result is one of `devices` parts.
        "reduce-scatter": devices - 1,
        "collective-permute": 1,
    }
    return times.get(collective.kind, (devices - 1) / devices) * collective.nbytes


def _print_report(name: str) -> None:
    print(json.dumps(dataclasses.asdict(read(CASES[name]))))


def _print_table(*names: str) -> None:
    """Prints a Markdown table, one row per case as soon as it is done."""
    columns = {
        "model": "---",
        "p": "---:",
        "context": "---:",
        "tokens per batch": "---:",
        "devices": "---",
        "remat": "---",
        "form": "---",
        "state, GB": "---:",
        "peak, GB": "---:",
        "GB sent per device and step": "---",
    }
    print(f"| {' | '.join(columns)} |\n| {' | '.join(columns.values())} |", flush=True)
    for name in names or CASES:
        print(_row(CASES[name], report(name)), flush=True)


def _row(case: Case, found: Report) -> str:
    sent = [
        f"{x.kind} over {' and '.join(x.axes)}: {x.sent / 1e9:.2f} in {x.arrays}"
        for x in found.exchanges
        if x.sent > SMALL
    ]
    cells = [
        case.size,
        case.power,
        f"{case.context:,}",
        f"{case.tokens:,}",
        " x ".join(f"{axis} {size}" for axis, size in case.sharding.items()),
        case.remat,
        ", ".join(form.removesuffix("_mosaic_gpu") for form in found.forms),
        f"{found.arguments / 1e9:.2f}",
        f"{found.peak / 1e9:.1f}",
        "; ".join(sent),
    ]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    {"table": _print_table, "report": _print_report}[sys.argv[1]](*sys.argv[2:])
