"""Tables of the pages that are made from the files in `results`.

    uv run python -m benchmarks.tables

prints those of each page.
"""

import collections
import functools
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks import _rows
from sympow_jax import config, tasks
from sympow_jax.tasks import flops

CONTENDERS = CHUNKED, ATTENTION, CUDNN = "chunked/mosaic_gpu", "attention/mosaic_gpu", "softmax/cudnn"
PASSES = {"forward": "forward", "training": "forward + backward"}
# A row of a later file replaces the same row of an earlier one. `kernels-while-training.json` has upper bounds.
KERNELS = {
    "h100": ("kernels-brief.json", "kernels.json"),
    "h200": (
        "kernels-brief.json",
        "kernels-both-passes.json",
        "kernels-forward.json",
        "kernels-128.json",
        "kernels.json",
    ),
}


def pages() -> dict[str, list[str]]:
    """Returns the tables of each page."""
    return {
        "README.md": [
            kernel_times("h100", power=[2], head_dim=[64], time=[1024, 4096, 8192, 16384, 65536]),
            training_steps("h200", by_commit=False),
        ],
        "docs/comparison.md": [both_passes()],
        "docs/data.md": [reading_speeds()],
        "docs/generation.md": [rounding_errors()],
        "docs/retrofit.md": [decoding_of_retrofits(), retrofit_hours()],
        "docs/speed.md": [
            cpu_times(),
            cpu_times_of_other_kernels(),
            cpu_times_of_the_delta_rule(),
            kernel_times("h100"),
            chunk_times(),
            kernel_times("h200"),
            training_steps("h100", by_commit=True),
            training_steps("h200", by_commit=False),
            decoding_times(),
        ],
    }


def read(path: str) -> dict[str, Any]:
    """Returns the content of a file of results."""
    return json.loads((_rows.RESULTS / path).read_text())


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table as a page has it."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows))


def select(rows: Iterable[dict], wanted: Mapping[str, Sequence]) -> list[dict]:
    """Returns the rows whose values are among those wanted."""
    return [row for row in rows if all(row.get(name) in values for name, values in wanted.items())]


def ratio(first: float | None, second: float | None, digits: int = 1) -> str:
    """Returns the first measurement over the second, or nothing if one is missing."""
    return f"{first / second:.{digits}f}x" if first and second else ""


def gpu_rows(gpu: str, files: Iterable[str]) -> list[dict]:
    """Returns the rows of files, each with its commit or else its file as `source`."""
    return [
        row | {"source": row.get("commit", f"`{file}`")}
        for file in files
        for row in read(f"{gpu}/{file}")["rows"]
    ]


def kernel_calls(gpu: str) -> dict[tuple, dict]:
    """Returns the measured calls of 8 heads in one row, by pass, power, head size, length and contender."""
    rows = select(gpu_rows(gpu, KERNELS[gpu]), {"batch": [1], "heads": [8], "chunk": [None]})
    return {
        tuple(row[name] for name in ("mode", "power", "head_dim", "time", "contender")): row
        for row in rows
        if "kernel_seconds" in row
    }


def kernel_times(gpu: str, **wanted: Sequence) -> str:
    """Returns device times in us of the kernels and of cuDNN."""
    times: dict[tuple, dict] = collections.defaultdict(dict)
    for (*call, contender), row in kernel_calls(gpu).items():
        if row["mode"] in PASSES and contender in CONTENDERS and select([row], wanted):
            times[*call][contender] = row
    rows = []
    for (mode, power, size, time), found in sorted(times.items()):
        cells = [
            f"{1e6 * found[name]['kernel_seconds']:,.0f}" if name in found else "" for name in CONTENDERS
        ]
        sources = dict.fromkeys(found[name]["source"] for name in CONTENDERS if name in found)
        rows.append((PASSES[mode], str(power), str(size), f"{time:,}", *cells, ", ".join(sources)))
    return markdown(("", "p", "D", "T", "chunked", "attention", "cuDNN", "commit or file"), rows)


def chunk_times() -> str:
    """Returns device times in us of both passes of the chunked form, by the length of a chunk."""
    wanted = {"contender": [CHUNKED], "mode": ["training"], "version": ["a87f3e4"]}
    rows = select(read("h100/order-and-chunks.json")["rows"], wanted)
    times = {(row["time"], row["chunk"]): row["kernel_seconds"] for row in rows if row["chunk"]}
    lengths, chunks = (sorted({key[axis] for key in times}) for axis in (0, 1))
    cells = [(f"{time:,}", *(f"{1e6 * times[time, chunk]:,.0f}" for chunk in chunks)) for time in lengths]
    return markdown(("T", *map(str, chunks)), cells)


def training_steps(gpu: str, *, by_commit: bool) -> str:
    """Returns the speed, by device time, and the memory of training steps.

    If not `by_commit`, steps of several commits are compared, each measured at one of them.
    """
    steps: dict[tuple, dict] = collections.defaultdict(dict)
    for row in gpu_rows(gpu, ["training.json"]):
        if "device_seconds" in row:
            steps[row["source"] if by_commit else "", row["context"]][row["preset"]] = row
    rows = []
    commits = list(dict.fromkeys(commit for commit, _ in steps))
    for commit, context in sorted(steps, key=lambda step: (commits.index(step[0]), step[1])):
        presets = steps[commit, context]
        both = [presets.get(name) for name in ("conformal", "softmax")]
        measured = [row for row in both if row]
        speeds = [row["tokens"] / row["device_seconds"] if row else None for row in both]
        rows.append(
            (
                f"{context:,}",
                *(f"{speed:,.0f}" if speed else "" for speed in speeds),
                ratio(speeds[0], speeds[1], digits=2),
                ", ".join(f"{row['mfu'] * row['seconds'] / row['device_seconds']:.0%}" for row in measured),
                ", ".join(f"{row['peak_bytes'] / 1e9:.0f} GB" for row in measured),
                ", ".join(dict.fromkeys(row["source"] for row in measured)),
            )
        )
    columns = ("tokens per row", "conformal, tokens/s", "softmax with cuDNN, tokens/s", "ratio")
    return markdown((*columns, "MFU of each", "peak memory of each", "commit"), rows)


def cpu_times() -> str:
    """Returns the speed of power attention on CPUs, relative to softmax attention."""
    rows = []
    for row in read("attention.json")["rows"]:
        seconds = row["seconds"]
        ratios = [ratio(seconds.get("softmax" + way), seconds["power" + way]) for way in ("", "_grad")]
        per_token = f"{1e6 * seconds['power_grad'] / row['length']:.0f}"
        rows.append((f"{row['length']:,}", str(row["head_dim"]), *ratios, per_token))
    columns = (
        "forward, softmax / power",
        "forward + backward, softmax / power",
        "power, us/token, both passes",
    )
    return markdown(("T", "D", *columns), rows)


def cpu_times_of_other_kernels() -> str:
    """Returns the speed of both passes of linear and expressive attention on CPUs, relative to softmax attention."""
    expressive = {
        (row["length"], row["head_dim"]): row["seconds"] for row in read("attention-expressive.json")["rows"]
    }
    rows = []
    for row in read("attention-linear.json")["rows"]:
        length, size, seconds = row["length"], row["head_dim"], row["seconds"]
        other = expressive.get((length, size), {})
        ratios = (
            ratio(seconds.get("softmax_grad"), seconds["linear_grad"]),
            ratio(other.get("softmax_grad"), other.get("expressive_grad")),
        )
        per_token = f"{1e6 * seconds['linear_grad'] / length:.0f}"
        rows.append((f"{length:,}", str(size), ratios[0], per_token, ratios[1]))
    return markdown(("T", "D", "softmax / linear", "linear, us/token", "softmax / expressive"), rows)


def cpu_times_of_the_delta_rule() -> str:
    """Returns the time of the delta rule on CPUs, relative to that of gated power attention."""
    rows = [
        (
            f"{row['length']:,}",
            str(row["head_dim"]),
            *(
                ratio(row["seconds"]["power_delta" + way], row["seconds"]["power" + way], digits=2)
                for way in ("", "_grad")
            ),
        )
        for row in read("attention-delta.json")["rows"]
    ]
    return markdown(("T", "D", "forward, delta rule / power", "forward + backward, delta rule / power"), rows)


def decoding_times() -> str:
    """Returns the time of a token and the bytes of state after a prompt, on CPUs."""
    steps = {(row["preset"], row["length"]): row for row in read("decoding.json")["rows"]}
    rows = []
    for length in sorted({length for _, length in steps}):
        cells = []
        for preset in ("conformal", "softmax"):
            step = steps[preset, length]
            kind = ", a KV cache" if preset == "conformal" and step["kept"] else ""
            cells += [f"{1e6 * step['seconds']:,.0f}", f"{step['state_bytes'] / 2**20:.2f} MiB{kind}"]
        rows.append((f"{length:,} tokens", *cells))
    return markdown(("after a prompt of", "power, us/token", "state", "softmax, us/token", "KV cache"), rows)


def decoding_of_retrofits() -> str:
    """Returns the time of a token and the bytes of state of models of SmolLM2-135M's sizes, on CPUs."""
    steps = {(row["preset"], row["length"]): row for row in read("decoding-smollm2.json")["rows"]}
    lengths = sorted({length for _, length in steps})
    names = {
        "softmax": "softmax, as the original",
        "2*sliding_window,softmax": "windows, softmax in every third layer",
        "2*sliding_window,sympow_gated": "windows, `sympow_gated` in every third layer",
        "sympow_gated": "`sympow_gated`",
        "sympow_gated_window": "`sympow_gated` and a window of 128 tokens in every layer",
        "sliding_window": "windows of 128 tokens",
    }
    rows = []
    for preset, name in names.items():
        found = [steps[preset, length] for length in lengths]
        sizes = [f"{step['state_bytes'] / 1e6:,.0f}" for step in (found[0], found[-1])]
        rows.append((name, *sizes, *(f"{1e3 * step['seconds']:,.0f}" for step in found)))
    columns = [f"MB of state after {length:,} tokens" for length in (lengths[0], lengths[-1])]
    return markdown(("", *columns, *(f"ms/token, {length:,}" for length in lengths)), rows)


def rounding_errors() -> str:
    """Returns the errors of logits of which matrices or states are in bfloat16."""
    errors = {
        (row["run"], row["rounded"], row["last"]): f"{row['rms']:.1e}".replace("e-0", "e-")
        for row in read("rounding.json")["rows"]
    }
    columns = {
        "matrices, tokens 1 to 512": ("weights", 512),
        "state, tokens 1 to 512": ("state", 512),
        "3,585 to 4,096": ("state", 4096),
        "15,873 to 16,384": ("state", 16384),
    }
    runs = {run: "sympow, no decay" if run == "sympow" else run for run, *_ in errors}
    cells = [
        (name, *(errors.get((run, *column), "") for column in columns.values())) for run, name in runs.items()
    ]
    return markdown(("in bfloat16", *columns), cells)


def reading_speeds() -> str:
    """Returns the tokens that a worker reads and tokenizes per second."""
    results = read("reading.json")
    speeds = {
        (f"`sympow prepare` to `{row['format']}`", row["workers"]): row["tokens_per_second_per_worker"]
        for row in results["preparations"]
    } | {
        (f"training from {row['format']}", row["workers"]): row["tokens_per_second"] / row["workers"]
        for row in select(results["speeds"], {"tokenizer": ["bpe"], "workers": [1, 2]})
    }
    names = dict.fromkeys(name for name, _ in speeds)
    cells = [(name, *(f"{round(speeds[name, workers], -4):,.0f}" for workers in (1, 2))) for name in names]
    return markdown(("", "1 worker", "2 workers, each"), cells)


def both_passes() -> str:
    """Returns the time of both passes at 65,536 tokens, and what `retention` reports of its own."""
    calls = kernel_calls("h100")
    ours, cudnn = (1e3 * calls["training", 2, 64, 65536, name]["kernel_seconds"] for name in (CHUNKED, CUDNN))
    columns = ("", "GPU", "time", "flash attention on the same GPU", "ratio")
    rows = [
        ("sympow-jax, chunked", "one H100", f"{ours:.1f} ms", f"{cudnn:.0f} ms (cuDNN)", ratio(cudnn, ours)),
        ("`retention` 1.0.7, reported", "one H100", "16.8 ms", "49.7 ms (FlashAttention-2)", "3.0x"),
    ]
    return markdown(columns, rows)


def retrofit_hours() -> str:
    """Returns the FLOPs of the stages of retrofits, and the GPU hours that these take at the MFU of training steps."""
    shape = functools.partial(
        config.ModelConfig,
        kv_heads=8,
        activation="swiglu",
        norm="rms",
        attention=config.preset("softmax"),
        attention_pattern=("sympow_gated",),
    )
    models = {
        "Llama 3.2 1B": shape(
            vocab_size=128_256, layers=16, width=2048, heads=32, head_dim=64, mlp_width=8192
        ),
        "Qwen3 8B": shape(
            vocab_size=151_936, layers=36, width=4096, heads=32, head_dim=128, mlp_width=12_288
        ),
    }
    steps = {
        row["context"]: row for row in gpu_rows("h200", ["training.json"]) if row["preset"] == "conformal"
    }
    rows = []
    for (name, model), context in itertools.product(models.items(), (4096, 65_536)):
        settings = config.Config(
            model=model,
            task=config.TaskConfig(name="match_attention", initial_run="original"),
            data=config.DataConfig(context_length=context, batch_tokens=context),
        )
        stages = tasks.make(settings).flops_per_token(), flops.model_flops_per_token(model, context)
        hours = [1e9 * stage / steps[context]["model_flops_per_second"] / 3600 for stage in stages]
        rows.append(
            (
                name,
                f"{context:,}",
                *(f"{stage / 1e9:.1f}" for stage in stages),
                *(f"{x:.0f}" for x in hours),
                f"{steps[context]['mfu']:.0%}",
            )
        )
    columns = ("", "tokens per row", "GFLOP per token, first stage", "second stage")
    return markdown(
        (*columns, "hours per billion tokens, first", "second", "at an MFU, by wall time, of"), rows
    )


def main() -> None:
    """Prints the tables."""
    for page, tables in pages().items():
        print(page, *tables, sep="\n\n", end="\n\n")


if __name__ == "__main__":
    main()
