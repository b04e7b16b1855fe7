"""Compiles kernels for an H100 on a machine without a GPU, and reads what the assembler made of them.

Each job runs in a process of its own, since LLVM may end it: `python -m tests.pallas_kernels.h100 forward CASE`
prints what became of a kernel. Needs the packages of the dependency group `h100`.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

TARGET = pathlib.Path(__file__).with_name("h100.txtpb")
PACKAGES = ("jax_cuda13_plugin", "nvidia.cu13", "triton.backends.nvidia")
TIMEOUT = 200

# Of the prediction: dense matrix products sustain about 0.8 of the data sheet's 989 TFLOP/s, by their clock under load.
SUSTAINED_HERTZ = 0.8 * 1.83e9
MULTIPROCESSORS = 132
# Latency of the last wgmma of each product, of barriers and of row sums, per step; a guess, not a measurement.
WAITING_CYCLES = 250

# Configurations that `pytest -m h100` compiles: power, head size, value size, dtype.
CASES = [
    f"p{power}-d{head_dim}-e{value_dim}-bfloat16"
    for power in (2, 4)
    for head_dim, value_dim in ((16, 16), (32, 32), (64, 64), (128, 128), (64, 128))
] + ["p6-d64-e64-bfloat16", "p8-d128-e128-bfloat16", "p2-d64-e64-float16", "p2-d80-e40-bfloat16"]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel after assembly. Bytes of spills are per thread, of shared memory per block."""

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    serialised: bool  # the assembler gave up on asynchronous wgmma
    hgmma: int
    tma_loads: int
    instructions: int
    loop: dict[str, int]  # instructions by kind of the loop over full blocks
    short_dots: int  # 16-bit mma.sync whose K halves are one register: K < 16, wrong on the device
    tf32: int


def missing() -> list[str]:
    """Packages that compiling needs and this environment lacks."""

    def found(name):
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            return False

    return [name for name in PACKAGES if not found(name)]


def report(case: str) -> list[Kernel]:
    """The kernels of a case of `forward`."""
    return [Kernel(**kernel) for kernel in json.loads(run("forward", case))]


def run(job: str, *arguments: str) -> str:
    """What a job prints, from a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.pallas_kernels.h100", job, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        cwd=pathlib.Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def mesh(shape=(1,), axis_names=("data",)):
    """A mesh of H100s of one host that need not exist."""
    import jax
    from jax.experimental import topologies

    count = 1
    for size in shape:
        count *= size
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.read_text(), topology=f"1x1x{count}"
    )
    auto = (jax.sharding.AxisType.Auto,) * len(shape)
    devices = topologies.make_mesh(topology, shape, axis_names).devices
    return jax.sharding.Mesh(devices, axis_names, axis_types=auto)


def compile_for(on, f, *arguments, specs=None, options=None):
    """f compiled for the mesh `on`; arguments are ShapeDtypeStructs, replicated or as `specs` say."""
    import jax

    specs = specs or [jax.sharding.PartitionSpec()] * len(arguments)
    placed = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.NamedSharding(on, spec))
        for x, spec in zip(arguments, specs)
    ]
    with jax.sharding.use_abstract_mesh(on.abstract_mesh):
        return jax.jit(f).trace(*placed).lower().compile(compiler_options=options)


def kernels(f, *arguments) -> list[Kernel]:
    """The Mosaic GPU kernels of f."""
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
    resources = path.with_name(path.stem + ".resources.txt")
    shared = re.search(r"smem_scratch_bytes=(\d+)", resources.read_text()) if resources.exists() else None
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", ptxas.stderr)
    code = _instructions(sass)
    return Kernel(
        name=re.search(r"\.entry (\w+)", ptx)[1],
        registers=int(re.search(r"Used (\d+) registers", ptxas.stderr)[1]),
        spill_bytes=sum(map(int, spills)),
        shared_bytes=int(shared[1]) if shared else 0,
        serialised=bool(re.search(r"C75(10|11|12|15)", ptxas.stderr)),
        hgmma=sum(text.startswith("HGMMA") for _, text in code),
        tma_loads=sum(text.startswith("UTMALDG") for _, text in code),
        instructions=len(code),
        loop=_main_loop(code, sass),
        short_dots=_short_dots(ptx),
        tf32=ptx.count("tf32"),
    )


def _instructions(sass: str) -> list[tuple[int, str]]:
    """Address and text of each instruction, predicates left out."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*);", sass)
    return [(int(address, 16), text) for address, text in found]


def _main_loop(code, sass) -> dict[str, int]:
    """The shortest loop that multiplies matrices and rounds weights, by its backward branch."""
    labels = {
        label: int(address, 16)
        for label, address in re.findall(r"(\.L_x_\d+):\s*\n\s*/\*([0-9a-f]{4,})\*/", sass)
    }
    bodies = []
    for address, text in code:
        target = re.match(r"BRA\S*\s.*?`\((\.L_x_\d+)\)", text)
        if target and (begin := labels.get(target[1], address + 1)) <= address:
            bodies.append([text for at, text in code if begin <= at <= address])
    bodies = [body for body in bodies if all(any(x.startswith(k) for x in body) for k in ("HGMMA", "F2FP"))]
    body = min(bodies, key=len, default=[])
    kinds = ("HGMMA", "FMUL", "FFMA", "FADD", "F2FP", "MUFU", "LDS", "BAR")
    return {kind: sum(x.startswith(kind) for x in body) for kind in kinds} | {"instructions": len(body)}


def _short_dots(ptx: str) -> int:
    operands = r"mma\.sync\.aligned\.m16n8k\d+\S+\s+\{[^}]*\},\s*\{([^}]*)\},\s*\{([^}]*)\}"
    found = 0
    for left, right in re.findall(operands, ptx):
        a, b = (x.replace(" ", "").split(",") for x in (left, right))
        found += len(a) == 4 and a[:2] == a[2:] and len(b) == 2 and b[0] == b[1]
    return found


def _tool(name: str) -> str:
    for package in PACKAGES[1:]:
        spec = importlib.util.find_spec(package)
        for root in spec.submodule_search_locations or []:
            if (path := pathlib.Path(root, "bin", name)).exists():
                return str(path)
    raise FileNotFoundError(name)


def forward(case: str) -> None:
    """Prints the kernels of the case "p2-d64-e64-bfloat16" of power attention, with GQA, decay and documents."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.power_attention import config, operands
    from pallas_kernels.power_attention import forward as kernel

    power, head_dim, value_dim, dtype = re.fullmatch(r"p(\d+)-d(\d+)-e(\d+)-(\w+)", case).groups()
    sizes = {"head_dim": int(head_dim), "value_dim": int(value_dim)}
    chosen = config.choose(power=int(power), dtype=dtype, **sizes)

    def prepare(query, key, value, log_decay, segment_ids):
        arrays = {"log_decay": log_decay, "segment_ids": segment_ids}
        return operands.prepare(query, key, value, power=int(power), config=chosen, **arrays)[0]

    # What comes before the kernel is plain JAX, and most of what there is to compile.
    arguments = _arguments(batch=1, time=1000, heads=4, kv_heads=2, dtype=jnp.dtype(dtype), **sizes)
    prepared = jax.eval_shape(prepare, *arguments)

    def call(*prepared):
        return kernel.sums(operands.Operands(*prepared), power=int(power), config=chosen)

    found = kernels(call, *prepared)
    print(json.dumps([dataclasses.asdict(kernel) for kernel in found]))


def sharded() -> None:
    """Prints the program of the op on eight devices, batch and heads divided over them."""
    import jax
    import jax.numpy as jnp

    from sympow_jax import ops

    def call(query, key, value, log_decay, segment_ids):
        return ops.power_attention(
            query,
            key,
            value,
            log_decay=log_decay,
            segment_ids=segment_ids,
            form="attention",
            implementation="mosaic_gpu",
        )

    arguments = _arguments(
        batch=4, time=256, heads=4, kv_heads=2, head_dim=64, value_dim=64, dtype=jnp.dtype("bfloat16")
    )
    whole, tokens = (jax.sharding.PartitionSpec(*axes) for axes in (("data", None, "model"), ("data",)))
    on = mesh((4, 2), ("data", "model"))
    print(compile_for(on, call, *arguments, specs=[whole] * 4 + [tokens]).as_text())


def _arguments(*, batch, time, heads, kv_heads, head_dim, value_dim, dtype):
    import jax
    import jax.numpy as jnp

    return (
        jax.ShapeDtypeStruct((batch, time, heads, head_dim), dtype),
        jax.ShapeDtypeStruct((batch, time, kv_heads, head_dim), dtype),
        jax.ShapeDtypeStruct((batch, time, kv_heads, value_dim), dtype),
        jax.ShapeDtypeStruct((batch, time, kv_heads), jnp.float32),
        jax.ShapeDtypeStruct((batch, time), jnp.int32),
    )


def table() -> None:
    """Prints the table of `pallas_kernels/README.md`."""
    names = (
        "registers",
        "shared KB",
        "HGMMA",
        "in the loop",
        "instructions",
        "tensor",
        "predicted ms (at best)",
    )
    print("| case | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for case in CASES:
        (built,) = report(case)
        loop = built.loop
        tensor, milliseconds = _prediction(case, loop)
        row = (built.registers, round(built.shared_bytes / 1024), built.hgmma, loop["HGMMA"])
        print(
            f"| {case} | {' | '.join(map(str, row))} | {loop['instructions']} | {tensor} | {milliseconds:.1f} |"
        )


def _prediction(case, loop) -> tuple[int, float]:
    """Tensor cycles of a warpgroup's step over a block of keys, and the time for 65,536 tokens of 8 heads.

    Two warpgroups share a multiprocessor's tensor cores and schedulers. A step takes the longer of both their tensor
    cycles and one's tensor cycles, instructions and waits in a row.
    """
    from pallas_kernels.power_attention import config

    sizes = map(int, re.fullmatch(r"p(\d+)-d(\d+)-e(\d+)-\w+", case).groups())
    power, head_dim, value_dim = sizes
    chosen = config.choose(head_dim=head_dim, value_dim=value_dim, power=power, dtype="bfloat16")
    # m64nNk16 takes N / 2 cycles.
    tensor = chosen.head_dim // 16 * chosen.block // 2 + chosen.block // 16 * chosen.value_dim // 2
    step = max(2 * tensor, tensor + loop["instructions"] + WAITING_CYCLES)
    blocks = 65_536 // chosen.block
    steps = 8 * blocks * (blocks + 1) / 2 / MULTIPROCESSORS
    return tensor, 1e3 * steps * step / SUSTAINED_HERTZ


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    {"table": table, "forward": forward, "sharded": sharded}[sys.argv[1]](*sys.argv[2:])
