"""Parser of the collectives in a compiled program."""

import collections
import dataclasses
import math
import re

import jax
import numpy as np

__all__ = ["Collective", "called", "collectives", "instructions"]

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u8": 1, "s8": 1}


@dataclasses.dataclass(frozen=True, order=True)
class Collective:
    """Array of a collective: its kind, the mesh axes it covers, and the dtype and shape of the result."""

    kind: str
    axes: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the result on each device."""
        return math.prod(self.shape) * _BYTES[self.dtype]


def collectives(program: str, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> list[Collective]:
    """Returns the collectives of a compiled program's text for this mesh.

    There is an entry for each array and each time that it is exchanged.
    """
    found = []
    for line, times in instructions(program):
        kind, arrays = called(line)
        axes = _axes(line, mesh) if arrays else ()
        for dtype, shape in arrays:
            found += [Collective(kind, axes, dtype, shape)] * times
    return found


def called(line: str) -> tuple[str, list[tuple[str, tuple[int, ...]]]]:
    """Returns the kind of the collective in a line of a program, with the dtypes and shapes of its results.

    Returns an empty kind and no results for other lines.
    """
    match = re.search(rf"= (\S.*?) ({'|'.join(_KINDS)})(-start)?\(", line)
    if not match:
        return "", []
    types, kind, started = match.groups()
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", types)
    if started:
        # The type of an asynchronous collective has its operands before its results.
        arrays = arrays[len(arrays) // 2 :] if len(arrays) > 1 else arrays
    return kind, [(dtype, tuple(int(n) for n in shape.split(",") if n)) for dtype, shape in arrays]


def instructions(program: str) -> list[tuple[str, int]]:
    """Returns each line of a compiled program, and the number of times that it runs.

    Lines of a loop run as often as its known trip count says.
    """
    name, bodies = "", {"": []}
    for line in program.splitlines():
        if opened := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name = opened[1]
        bodies.setdefault(name, []).append(line)
    # Called computations come before their callers, and the entry last.
    times = collections.Counter({name: 1})
    for caller in reversed(bodies):
        for line in bodies[caller]:
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            listed = re.search(r"branch_computations=\{(.*?)\}", line)
            called = re.findall(r"(\w+)=%([\w.-]+)", line)
            called += [("", branch) for branch in re.findall(r"%([\w.-]+)", listed[1] if listed else "")]
            for role, callee in called:
                if callee in bodies:
                    times[callee] += times[caller] * (int(trips[1]) if trips and role == "body" else 1)
    return [(line, times[body]) for body, lines in bodies.items() for line in lines]


def _axes(line: str, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> tuple[str, ...]:
    """Returns the mesh axes along which devices of one group differ."""
    if named := re.search(r"replica_groups=mesh\[[^\]]*\] \{(.*?)\}", line):
        return tuple(name for name in mesh.axis_names if f"'{name}'" in named[1])
    places = np.arange(mesh.size).reshape(mesh.axis_sizes)
    differ = set()
    for group in _groups(line, mesh.size):
        positions = np.array([np.argwhere(places == device)[0] for device in group])
        differ |= {name for name, of in zip(mesh.axis_names, positions.T) if len(set(of)) > 1}
    return tuple(name for name in mesh.axis_names if name in differ)


def _groups(line: str, devices: int) -> list[list[int]]:
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        return [[int(x) for x in pair.split(",")] for pair in re.findall(r"\{?(\d+,\d+)", pairs[1])]
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", line):
        return [[int(x) for x in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, dimensions, order = ([int(x) for x in (part or "").split(",") if x] for part in iota.groups())
        numbers = np.arange(math.prod(dimensions)).reshape(dimensions)
        return (numbers.transpose(order) if order else numbers).reshape(shape).tolist()
    return [list(range(devices))]
