"""Compiles kernels for an H100 on a machine without a GPU, and reads the assembler's output.

Each compilation runs in a separate process, since LLVM may crash it:

    python -m tools.h100 report power_attention p2-d64-e64-bfloat16
    python -m tools.h100 table

A module `tools.compiled.KERNEL` has CASES, by name, and RARE ones, which the table leaves out, and build(case), which
returns a function of one kernel and the shapes it is compiled for. Needs the packages of the dependency group `h100`.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile

TARGET = pathlib.Path(__file__).with_name("h100.txtpb")
PACKAGES = ("jax_cuda13_plugin", "nvidia.cu13", "triton.backends.nvidia")
TIMEOUT = 200

KERNELS = sorted(
    path.stem for path in (pathlib.Path(__file__).parent / "compiled").glob("*.py") if path.stem != "__init__"
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Properties of one kernel after assembly.

    Bytes of spills are per thread, of shared memory per block.
    """

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    serialized: bool  # the assembler gave up on asynchronous wgmma
    hgmma: int
    tma_loads: int
    # Contiguous copies to and from global memory, clipped only at the end of the whole array.
    bulk_stores: int
    bulk_loads: int
    short_dots: int  # 16-bit mma.sync whose K halves are one register: K < 16, wrong on the device
    tf32: int


def missing() -> list[str]:
    """Returns the packages that compiling needs and this environment lacks."""

    def found(name: str) -> bool:
        with contextlib.suppress(ModuleNotFoundError):  # of the package around it
            return importlib.util.find_spec(name) is not None
        return False

    return [name for name in PACKAGES if not found(name)]


def compiled(name: str):
    """Returns the module that defines how a kernel is compiled."""
    return importlib.import_module(f"tools.compiled.{name}")


def parsed(case: str) -> dict[str, int]:
    """Returns the numbers of a case's name by their letters: those of "p2-d64-e128-c768" by p, d, e and c."""
    return {letter: int(number) for letter, number in re.findall(r"\b([a-z])(\d+)\b", case)}


def report(name: str, case: str) -> list[Kernel]:
    """Returns the kernels of a case."""
    return [Kernel(**kernel) for kernel in json.loads(run("tools.h100", "report", name, case))]


def run(module: str, *arguments: str, timeout: float = TIMEOUT) -> str:
    """Returns the output of `python -m MODULE`, from a separate process."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        cwd=pathlib.Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def mesh(shape=(1,), axis_names=("data",)):
    """Returns a mesh of H100s of one host that need not exist."""
    import jax
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.read_text(), topology=f"1x1x{math.prod(shape)}"
    )
    auto = (jax.sharding.AxisType.Auto,) * len(shape)
    devices = topologies.make_mesh(topology, shape, axis_names).devices
    return jax.sharding.Mesh(devices, axis_names, axis_types=auto)


def compile_for(on, f, *arguments, specs=None, donated=()):
    """Compiles f for the mesh `on`; arguments are trees of ShapeDtypeStructs, replicated or sharded as in `specs`.

    donated: positions of the arguments whose memory the results may take.
    """
    import jax

    def place(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.NamedSharding(on, spec))

    specs = specs or jax.tree.map(lambda _: jax.sharding.PartitionSpec(), arguments)
    placed = jax.tree.map(place, arguments, tuple(specs))
    with jax.sharding.use_abstract_mesh(on.abstract_mesh):
        return jax.jit(f, donate_argnums=donated).trace(*placed).lower().compile()


def kernels(f, *arguments) -> list[Kernel]:
    """Returns the Mosaic GPU kernels of f."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        try:
            compile_for(mesh(), f, *arguments)
        finally:
            del os.environ["MOSAIC_GPU_DUMP_TO"]
        return [_assemble(path) for path in sorted(pathlib.Path(folder).glob("*.ptx"))]


def _assemble(path: pathlib.Path) -> Kernel:
    ptx = path.read_text()
    cubin = path.with_suffix(".test.cubin")
    ptxas = subprocess.run(
        [_tool("ptxas"), "-v", "-arch=sm_90a", str(path), "-o", str(cubin)], capture_output=True, text=True
    )
    assert ptxas.returncode == 0, ptxas.stderr
    sass = subprocess.run([_tool("nvdisasm"), str(cubin)], capture_output=True, text=True, check=True).stdout
    # The dumps of resources are numbered apart from those of PTX.
    resources = next(path.parent.glob(f"{path.stem.rpartition('_')[0]}_*.resources.txt"), None)
    shared = re.search(r"smem_scratch_bytes=(\d+)", resources.read_text()) if resources else None
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", ptxas.stderr)

    # Instructions without their addresses and predicates.
    code = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*);", sass)
    short_dots = 0
    operands = r"mma\.sync\.aligned\.m16n8k\d+\S+\s+\{[^}]*\},\s*\{([^}]*)\},\s*\{([^}]*)\}"
    for left, right in re.findall(operands, ptx):
        a, b = (x.replace(" ", "").split(",") for x in (left, right))
        short_dots += len(a) == 4 and a[:2] == a[2:] and len(b) == 2 and b[0] == b[1]
    return Kernel(
        name=re.findall(r"\.entry (\w+)", ptx)[0].removesuffix("_mosaic_gpu_kernel"),
        registers=int(re.findall(r"Used (\d+) registers", ptxas.stderr)[0]),
        spill_bytes=sum(map(int, spills)),
        shared_bytes=int(shared[1]) if shared else 0,
        serialized=bool(re.search("instructions are serialized|C75(10|11|12|15|20)", ptxas.stderr)),
        hgmma=sum(text.startswith("HGMMA") for text in code),
        tma_loads=sum(text.startswith("UTMALDG") for text in code),
        bulk_stores=len(re.findall(r"cp\.async\.bulk\.global\.shared::cta\.bulk_group", ptx)),
        bulk_loads=len(re.findall(r"cp\.async\.bulk\.shared::\w+\.global", ptx)),
        short_dots=short_dots,
        tf32=ptx.count("tf32"),
    )


def _tool(name: str) -> str:
    for package in PACKAGES[1:]:
        spec = importlib.util.find_spec(package)
        for root in (spec and spec.submodule_search_locations) or []:
            if (path := pathlib.Path(root, "bin", name)).exists():
                return str(path)
    raise FileNotFoundError(name)


def main(command: str, *names: str) -> None:
    """Prints the kernels of a case as JSON or, as Markdown, those of every case."""
    if command == "report":
        name, case = names
        function, arguments = compiled(name).build(case)
        print(json.dumps([dataclasses.asdict(kernel) for kernel in kernels(function, *arguments)]))
        return
    if command != "table":
        raise SystemExit(f"there is no command {command!r}; there are report and table")
    columns = ["kernel", "case", "registers", "spills", "shared KB", "HGMMA"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name in names or KERNELS:
        for case in compiled(name).CASES:
            rows = []
            for kernel in report(name, case):
                # Kernels of passes that only prepare operands or join results have no products.
                if not kernel.hgmma and name != "power_step":
                    continue
                row = [kernel.name, case, kernel.registers, kernel.spill_bytes]
                row += [round(kernel.shared_bytes / 1024), kernel.hgmma]
                rows.append(f"| {' | '.join(map(str, row))} |")
            # Kernels that differ in no column share a row.
            print(*dict.fromkeys(rows), sep="\n", flush=True)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    main(*sys.argv[1:])
