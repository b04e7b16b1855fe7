"""Times one of this project's attention kernels against JAX's softmax attention on this machine, in one run.

    uv run python -m benchmarks.attention [--kernel=power|linear|expressive|power_delta] [--out=FILE.json]

Inputs are float32, batch 1, 4 heads. It needs Linux. `power` has p = 2 and gates, `linear` the feature map elu + 1;
`expressive` has no options. `power_delta`, the delta rule with p = 2 and gates, is timed against `power`. Times are
medians of several calls of compiled functions. The two take turns, so a change of the machine's speed affects both.
Ratios are the other's time over the kernel's: above 1, the kernel is faster.
"""

import argparse
import functools
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _rows, _timing
from sympow_jax import ops

HEADS = 4
LENGTHS = {32: (1024, 2048, 4096, 8192, 65_536, 262_144), 64: (1024, 4096, 8192, 65_536, 262_144)}
# Beyond these lengths a call takes minutes; the T x T softmax scores of 4 heads would take 69 GB at 65,536.
LONGEST = {"softmax": 8192, "expressive": 8192, "power_delta": 8192, "power": 65_536, "linear": 262_144}
MILLION = 2**20


KERNELS = {
    "power": lambda query, key, value, log_decay: ops.power_attention(
        query, key, value, power=2, log_decay=log_decay
    ),
    "linear": lambda query, key, value, _: ops.linear_attention(query, key, value),
    "expressive": lambda query, key, value, _: ops.expressive_attention(query, key, value),
    "power_delta": lambda query, key, value, log_decay: ops.delta_attention(
        query, key, value, jax.nn.sigmoid(value[..., 0]), power=2, log_decay=log_decay
    ),
    "softmax": lambda query, key, value, _: jax.nn.dot_product_attention(query, key, value, is_causal=True),
}
OTHERS = {"power_delta": "power"}  # what a kernel is timed against, if not softmax
RECURRENT = ("power", "linear")


def main() -> None:
    """Prints the tables and writes the JSON."""
    parser = _rows.make_parser(__doc__)
    parser.add_argument("--kernel", choices=[name for name in KERNELS if name != "softmax"], default="power")
    parser.add_argument("--out", type=pathlib.Path, help="write the rows here as JSON")
    parser.add_argument("--million", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.million:
        print(json.dumps(_million_tokens(arguments.kernel)))
        return

    rows = []
    for head_dim, lengths in LENGTHS.items():
        for length in lengths:
            if length <= LONGEST[arguments.kernel]:
                rows.append(_compare(arguments.kernel, length, head_dim, repeats=15 if length <= 4096 else 3))
    settings = {"batch": 1, "heads": HEADS, "kernel": arguments.kernel}
    report = {"machine": _rows.machine(), "settings": settings, "rows": rows}
    if arguments.kernel in RECURRENT:
        command = [sys.executable, "-m", "benchmarks.attention", "--million", f"--kernel={arguments.kernel}"]
        report["million_tokens"] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    _print(report)
    _rows.write(arguments.out, report)


def _compare(kernel: str, length: int, head_dim: int, repeats: int) -> dict:
    keys = jax.random.split(jax.random.key(0), 5)
    query, key, value, dout = (jax.random.normal(k, (1, length, HEADS, head_dim)) for k in keys[:4])
    log_decay = jax.nn.log_sigmoid(4 + jax.random.normal(keys[4], (1, length, HEADS)))

    def with_backward(function):
        def loss(arguments):
            return jnp.vdot(function(*arguments), dout)

        return jax.jit(jax.grad(loss))

    calls, inputs = {}, (query, key, value, log_decay)
    for name in (kernel, OTHERS.get(kernel, "softmax")):
        if length <= LONGEST[name]:
            calls[name] = functools.partial(jax.jit(KERNELS[name]), *inputs)
            calls[name + "_grad"] = functools.partial(with_backward(KERNELS[name]), inputs)
    return {"length": length, "head_dim": head_dim, "seconds": _timing.medians(calls, repeats)}


def _million_tokens(kernel: str) -> dict:
    """Runs forward over 2^20 tokens with one head of 32; returns seconds and this process's peak memory."""
    # Drawn with NumPy, which needs no memory besides the arrays, so that the peak is that of attention.
    random = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(random.standard_normal((1, MILLION, 1, 32), np.float32)) for _ in range(3)
    )
    log_decay = jax.nn.log_sigmoid(4 + random.standard_normal((1, MILLION, 1), np.float32))
    call = functools.partial(jax.jit(KERNELS[kernel]), query, key, value, log_decay)
    seconds = _timing.medians({"forward": call}, rounds=1)["forward"]
    # Not getrusage, which would include the parent's.
    kilobytes = int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    return {"length": MILLION, "head_dim": 32, "seconds": seconds, "peak_bytes": 1024 * kilobytes}


def _print(report: dict) -> None:
    kernel = report["settings"]["kernel"]
    other = OTHERS.get(kernel, "softmax")
    columns: dict[str, tuple] = {"T": ("length", "{:,}"), "D": ("head_dim", "{}")}
    for title in ("fwd", "fwd+bwd"):
        columns[f"{kernel} {title}"] = (f"{kernel} {title}", "{:.4f}")
        columns[f"{other} {title}"] = (f"{other} {title}", "{:.4f}")
        columns[f"ratio {title}"] = (f"ratio {title}", "{:.1f}")
    columns["us/token fwd+bwd"] = ("per token", "{:.1f}", 1e6)
    rows = []
    for row in report["rows"]:
        shown, seconds = dict(row), row["seconds"]
        for suffix, title in (("", "fwd"), ("_grad", "fwd+bwd")):
            shown[f"{kernel} {title}"] = ours = seconds[kernel + suffix]
            if theirs := seconds.get(other + suffix):
                shown |= {f"{other} {title}": theirs, f"ratio {title}": theirs / ours}
        rows.append(shown | {"per token": ours / row["length"]})
    _rows.print_machine(report)
    _rows.print_table(f"seconds, float32, b1 n{HEADS}, {kernel}", rows, columns)
    if million := report.get("million_tokens"):
        print(
            f"forward over {million['length']:,} tokens (b1 n1 D=32): {million['seconds']:.1f} s, "
            f"largest process size {million['peak_bytes'] / 1e9:.2f} GB"
        )


if __name__ == "__main__":
    main()
