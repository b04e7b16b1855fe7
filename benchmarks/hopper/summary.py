"""Writes the summary of `benchmarks.hopper` in Markdown, from the JSON of its parts only."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.hopper import choices, counters
from pallas_kernels.power_state.square import tiles
from sympow_jax.ops._recurrent import cost
from tools import h100

__all__ = ["markdown", "words"]

Report = Mapping[str, Any]

# Contenders of the table of kernels, in the order of its columns.
CONTENDERS = (
    "chunked/mosaic_gpu",
    "attention/mosaic_gpu",
    "softmax/cudnn",
    "softmax/tokamax",
    "chunked/xla",
    "attention/xla",
    "retention",
    "jax-linear-attention",
    "flash-linear-attention",
)
# Rows of the table of kernels differ in these; batch 1 and the number of heads are the same in all.
TABLE_SHAPE = ("mode", "power", "head_dim", "time")
# The length whose best chunk is that of all longer rows.
LONG_TIME = 65_536


def markdown(reports: Mapping[str, Report]) -> str:
    """Returns the summary of reports by part; `parts` says how each part ended. A part may be empty."""
    kernels, chunks = _rows_of(reports["kernels"]), _rows_of(reports["chunks"])
    sections = (
        ("How the parts ended", _parts(reports)),
        ("Check", _check(reports["check"])),
        ("Kernels, ms on the device", _kernels(kernels)),
        ("From which T on the chunked form is faster", _crossovers(kernels)),
        ("Where form=None takes the slower form", _choices(kernels)),
        ("Decode steps", _steps(kernels)),
        ("Values to set", _constants(kernels, _rows_of(reports["hardware"]), chunks)),
        ("Chunks, ms of both passes", _chunks(chunks)),
        ("Counters", _counters(_rows_of(reports["counters"]))),
        ("Training steps of the 124M model", _training(_rows_of(reports["training"]))),
        ("Trained on text: held-out loss by position", _text(_rows_of(reports["text"]))),
    )
    machines = [report["machine"] for report in reports.values() if "machine" in report]
    known = (machines[0] if machines else {}) | (reports["kernels"].get("machine") or {})
    lines = [f"# Measured on {known.get('device', 'no device yet')}", ""]
    if known:
        lines += [", ".join(f"{name} {value}" for name, value in known.items() if value), ""]
    for name, rate in reports["kernels"].get("ceilings", {}).items():
        lines.append(f"* ceiling: {rate:.4g} {name} per second")
    for title, body in sections:
        lines += ["", f"## {title}", "", *(body or ["Not measured."])]
    return "\n".join(lines) + "\n"


def words(ended: Mapping[str, Any]) -> str:
    """Returns in words how a part ended, from its entry in parts.json."""
    status = ended["status"]
    if status is None:
        how = "ended at its time limit"
    elif status:
        how = f"exit status {status}"
    else:
        how = "finished" if ended["finished"] else "not every row had time"
    return f"{how}, {ended['seconds']:.0f} s"


def _rows_of(report: Report) -> list[dict]:
    return list(report.get("rows", ()))


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table, or none if it has no rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *lines] if lines else []


def _number(value: float | None, scale: float = 1.0) -> str:
    return "" if value is None else f"{scale * value:.4g}"


def _parts(reports: Mapping[str, Report]) -> list[str]:
    ended = reports["parts"]
    body = [
        (name, words(ended[name]) if name in ended else "not started") for name in reports if name != "parts"
    ]
    return _table(("part", "how it ended"), body)


def _check(report: Report) -> list[str]:
    outcomes = report.get("cases", ())
    if not outcomes:
        return []
    wrong = [outcome for outcome in outcomes if outcome["status"] != "ok"]
    lines = [f"{len(outcomes) - len(wrong)} of {len(outcomes)} cases are correct."]
    return lines + [f"* {outcome['case']}: {outcome['status']}" for outcome in wrong]


def _by_shape(rows: Iterable[dict]) -> dict[tuple, dict[str, float]]:
    """Returns the seconds by contender of every shape at batch 1."""
    by_shape: dict[tuple, dict[str, float]] = {}
    for row in rows:
        seconds = choices.seconds_of(row)
        if seconds is not None and row["mode"] != "step" and row["batch"] == 1:
            by_shape.setdefault(tuple(row[name] for name in TABLE_SHAPE), {})[row["contender"]] = seconds
    return dict(sorted(by_shape.items()))


def _kernels(rows: list[dict]) -> list[str]:
    shapes = _by_shape(rows)
    names = [name for name in CONTENDERS if any(name in seconds for seconds in shapes.values())]
    body = []
    for (mode, power, head_dim, time), seconds in shapes.items():
        ours = [value for name, value in seconds.items() if name.endswith("mosaic_gpu")]
        best = seconds.get("softmax/cudnn")
        ratio = f"{best / min(ours):.2f}x" if best and ours else ""
        cells = [_number(seconds.get(name), 1e3) for name in names]
        body.append((mode, str(power), str(head_dim), f"{time:,}", *cells, ratio))
    lines = _table(("pass", "p", "D", "T", *names, "cuDNN / best form"), body)
    failed = [row for row in rows if "seconds" not in row]
    shape = "{contender}, {mode}, p = {power}, D = {head_dim}, T = {time:,}"
    return lines + [""] * bool(failed) + [f"* {shape.format(**row)}: {row.get('note', '')}" for row in failed]


def _crossovers(rows: list[dict]) -> list[str]:
    curves: dict[tuple, dict[str, dict[int, float]]] = {}
    for (mode, power, head_dim, time), seconds in _by_shape(rows).items():
        for name, value in seconds.items():
            curves.setdefault((mode, power, head_dim), {}).setdefault(name, {})[time] = value
    body = []
    for (mode, power, head_dim), by_name in curves.items():
        chunked = by_name.get("chunked/mosaic_gpu", {})
        cells = []
        for other in ("softmax/cudnn", "attention/mosaic_gpu"):
            others = by_name.get(other, {})
            if chunked.keys() & others.keys():
                crossover = choices.crossover(chunked, others)
                cells.append("never" if crossover is None else f"{crossover:,.0f}")
            else:
                cells.append("")
        if any(cells):
            body.append((mode, str(power), str(head_dim), *cells))
    return _table(("pass", "p", "D", "than cuDNN", "than the attention form"), body)


def _choices(rows: list[dict]) -> list[str]:
    compared = choices.measured_choices(rows)
    if not compared:
        return []
    slower = [choice for choice in compared if choice.loss > 1]
    lines = [f"At {len(slower)} of {len(compared)} shapes at which both forms were measured."]
    body = [
        (
            *(str(choice.shape[name]) for name in choices.SHAPE),
            choice.form,
            *(_number(choice.seconds[form], 1e3) for form in choices.FORMS),
            f"{choice.loss:.2f}x",
        )
        for choice in slower
    ]
    times = (f"{form}, ms" for form in choices.FORMS)
    return lines + [""] * bool(body) + _table((*choices.SHAPE, "chosen", *times, "time lost"), body)


def _steps(rows: list[dict]) -> list[str]:
    body = [
        (
            row["contender"],
            str(row["batch"]),
            _number(choices.seconds_of(row), 1e6),
            f"{row['bytes_per_second'] / 1e12:.2f} TB/s",
            f"{row['fraction']:.0%}",
        )
        for row in rows
        if row["mode"] == "step" and "bytes_per_second" in row
    ]
    return _table(("contender", "batch", "us per step", "rate", "of the copy bandwidth"), body)


def _constants(kernels: list[dict], hardware: list[dict], chunks: list[dict]) -> list[str]:
    """Returns the constants that measurements replace, with the value now and the one to set."""
    body = []
    rates = [row for row in hardware if "measured" in row]
    # The device's clock may differ from the model's. A ratio to the product of N = 64 does not depend on it.
    full = next((row["measured"] / 64 for row in rates if row.get("columns") == 64), None)
    for row in rates:
        if row["rate"] == "cache":
            name = f"`tools.h100.CACHE_BYTES`, from {row['megabytes']:g} MB"
            body.append((name, _number(h100.CACHE_BYTES), _number(row["measured"])))
        else:
            name = f"cycles of m64n{row['columns']}k16, N / 2 in `tools.compiled`"
            ratio = (
                f", {row['measured'] / (full * row['columns']):.4g} times the share at N = 64" if full else ""
            )
            body.append((name, _number(row["columns"] / 2), _number(row["measured"]) + ratio))
    if choices.measured_choices(kernels):
        fitted = choices.fit(kernels)
        for name, present in (
            ("FEATURE_COST", cost.FEATURE_COST),
            ("LEAST_CHUNKED_TIME", cost.LEAST_CHUNKED_TIME),
        ):
            body.append((f"`cost.{name}`", _number(present), _number(fitted[name.lower()])))
    for (head_dim, time), by_chunk in _chunk_seconds(chunks).items():
        if time == LONG_TIME:
            best = min(by_chunk, key=lambda chunk: by_chunk[chunk])
            present_chunk = tiles.longest_chunk(head_dim)
            name = f"`square.tiles.longest_chunk({head_dim})`"
            body.append((name, str(present_chunk), str(best or present_chunk)))
    return _table(("constant", "now", "measured"), body)


def _chunk_seconds(rows: list[dict]) -> dict[tuple[int, int], dict[int | None, float]]:
    """Returns the seconds by chunk, None for the chunk of the kernels' choice, by (D, T)."""
    by_shape: dict[tuple[int, int], dict[int | None, float]] = {}
    for row in rows:
        if (seconds := choices.seconds_of(row)) is not None:
            by_shape.setdefault((row["head_dim"], row["time"]), {})[row["chunk"]] = seconds
    return dict(sorted(by_shape.items()))


def _chunks(rows: list[dict]) -> list[str]:
    body = []
    for (head_dim, time), by_chunk in _chunk_seconds(rows).items():
        cells = [f"{chunk or 'chosen'}: {_number(seconds, 1e3)}" for chunk, seconds in by_chunk.items()]
        body.append((str(head_dim), f"{time:,}", ", ".join(cells)))
    return _table(("D", "T", "chunk: ms"), body)


def _counters(rows: list[dict]) -> list[str]:
    body = []
    for row in rows:
        shape = (row["contender"], str(row["power"]), str(row["head_dim"]), f"{row['time']:,}")
        for kernel in row.get("counters", ()):
            cells = [_number(kernel.get(metric), factor) for metric, factor in counters.COLUMNS]
            body.append((*shape, kernel["kernel"], *cells))
        if "note" in row:
            body.append((*shape, row["note"], *[""] * len(counters.COLUMNS)))
    columns = ("op", "p", "D", "T", "kernel", "us", "tensor cores, %", "issue slots, %", "DRAM, %", "L2, %")
    return _table(columns, body)


def _training(rows: list[dict]) -> list[str]:
    body = []
    for row in sorted(rows, key=lambda row: (row["context"], row["preset"])):
        shape = (f"{row['context']:,}", row["preset"])
        if "seconds" not in row:
            body.append((*shape, row.get("note", ""), "", "", ""))
            continue
        peak = row["peak_bytes"]
        body.append(
            (
                *shape,
                row["attention"],
                f"{row['tokens_per_second']:,.0f}",
                f"{row['mfu']:.1%}" if row["mfu"] else "",
                f"{peak / 1e9:.1f} GB" if peak else "",
            )
        )
    return _table(("tokens per row", "preset", "attention", "tokens/s", "MFU", "peak memory"), body)


def _text(rows: list[dict]) -> list[str]:
    trained = [row for row in rows if "heldout" in row]
    lines = [f"* {row['preset']}: {row.get('note', '')}" for row in rows if "heldout" not in row]
    if not trained:
        return lines
    lengths = list(trained[0]["heldout"])
    # Presets differ in speed: after the same number of steps, the training losses compare.
    num_losses = min(len(row["losses"]) for row in trained)
    body = [
        (
            row["preset"],
            f"{row['steps']:,}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['losses'][num_losses - 1]:.3f}",
            *(f"{row['heldout'][length]:.3f}" for length in lengths),
        )
        for row in trained
    ]
    after = f"training loss after {max((num_losses - 1) * trained[0]['every'], 1):,} steps"
    return lines + _table(("preset", "steps", "tokens/s", after, *(f"to {int(n):,}" for n in lengths)), body)
