"""Results of a context-length evaluation as a table, a CSV file, a JSON file and a plot."""

import csv
import dataclasses
import itertools
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import rich.box
import rich.console
import rich.table
import rich.text

from sympow_jax import plotting, spelling
from sympow_jax.evaluation import buckets
from sympow_jax.process import atomic, workdir

COLUMNS = (
    "run",
    "context_length",
    "loss",
    "perplexity",
    "bits_per_token",
    "tokens",
    "documents",
    "train_context",
)
# What the differences of runs are called, by field of `Run`.
_DIFFERENCES = {"updates": "{:,} updates", "update_tokens": "{:,} tokens per update", "data": "data {}"}
# Wide enough for every preset side by side, because a file or a pipe has no width.
_PLAIN_WIDTH = 200


def make_console() -> rich.console.Console:
    """Returns a console on standard output, with room for a wide table where that is no terminal."""
    console = rich.console.Console()
    return console if console.is_terminal else rich.console.Console(width=_PLAIN_WIDTH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Run that a result is of.

    Attributes:
        run: name of the run.
        preset: name of its attention.
        train_context: training context length.
        updates: number of updates.
        update_tokens: number of tokens of an update.
        data: beginning of the digest of its training data, or `unknown`.
    """

    run: str
    preset: str
    train_context: int
    updates: int
    update_tokens: int
    data: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(buckets.Bucket, Run):
    """Result of one bucket of one run.

    Attributes:
        perplexity: exp(loss).
        bits_per_token: loss / ln 2.
    """

    perplexity: float
    bits_per_token: float


def make_rows(run: Run, means: Sequence[buckets.Bucket]) -> list[Row]:
    """Returns the rows of one run."""
    with np.errstate(over="ignore"):  # a diverged model's perplexity may be infinite
        return [
            Row(
                **dataclasses.asdict(run),
                **dataclasses.asdict(mean),
                perplexity=float(np.exp(mean.loss)),
                bits_per_token=mean.loss / math.log(2),
            )
            for mean in means
        ]


def training_differences(rows: Sequence[Run]) -> dict[str, str]:
    """Returns by run in what its training differs from that of another; empty if all were trained alike."""
    runs = {row.run: row for row in rows}
    fields = [name for name in _DIFFERENCES if len({getattr(run, name) for run in runs.values()}) > 1]
    return {
        name: ", ".join(_DIFFERENCES[field].format(getattr(run, field)) for field in fields)
        for name, run in (runs.items() if fields else ())
    }


def write_csv(path: pathlib.Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Writes the columns of every row, with floats in full precision."""
    with atomic.replace(path) as draft, draft.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: pathlib.Path, rows: Sequence[Any], **metadata: Any) -> None:
    """Writes `metadata` and the rows, which are dataclasses.

    Numbers that are not finite become null, because JSON does not have them.
    """
    workdir.write_json(path, without_nan({**metadata, "rows": [dataclasses.asdict(row) for row in rows]}))


def without_nan(value: Any) -> Any:
    """Returns a value of JSON with None in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, Mapping):
        return {name: without_nan(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(rows: Sequence[Row], console: rich.console.Console) -> None:
    """Prints a line per context length and a column of losses per run; `*` marks the training context."""
    by_run: dict[str, list[Row]] = {}
    for row in rows:
        by_run.setdefault(row.run, []).append(row)
    runs = list(by_run.values())
    one = len(runs) == 1
    columns = ["positions up to", *(["loss"] if one else by_run)]
    columns += ["perplexity", "bits per token"] if one else []
    lines = []
    for same_length in zip(*runs, strict=True):
        first = same_length[0]
        cells = [f"{first.context_length:,}"]
        cells += [
            f"{row.loss:.4f}{'*' if row.context_length == row.train_context else ' '}" for row in same_length
        ]
        cells += [f"{first.perplexity:,.3f}", f"{first.bits_per_token:.4f}"] if one else []
        lines.append([*cells, f"{first.tokens:,}"])
    print_cells(
        "Held-out loss by position, nats per token", [*columns, "predictions"], lines, console, names=0
    )
    documents = rows[0].documents
    trained = " and ".join(f"{context:,}" for context in sorted({row.train_context for row in rows}))
    caption = (
        f"Each line is the mean over the positions above the line before, of the same {documents} "
        f"document{'s' if documents > 1 else ''}, which count equally; * marks the training context ({trained}). "
        f"heldout_loss in metrics.jsonl is over one batch of rows instead, in which long documents count more."
    )
    console.print(caption, style="dim", highlight=False, soft_wrap=True)


def print_cells(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    console: rich.console.Console,
    *,
    names: int = 1,
) -> None:
    """Prints a table, of which the first `names` columns are aligned to the left."""
    table = rich.table.Table(box=rich.box.ROUNDED if console.is_terminal else rich.box.ASCII2)
    # Text instead of strings, so that a run named [x] is not parsed as markup.
    for index, column in enumerate(columns):
        table.add_column(
            rich.text.Text(spelling.printable(column)), justify="left" if index < names else "right"
        )
    for row in rows:
        table.add_row(*(rich.text.Text(spelling.printable(cell)) for cell in row))
    console.print(spelling.printable(title), style="bold", markup=False, highlight=False)
    console.print(table, crop=False)


def write_plot(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Draws loss in nats per token over context length, with a band of one standard error over documents.

    A marker is at the upper end of its bucket, a dashed line at each training context. Losses that are not finite are
    omitted from a line and listed in its label.
    """
    runs = {name: list(group) for name, group in itertools.groupby(rows, key=lambda row: row.run)}
    figure, (axes,) = plotting.make()
    contexts = sorted({row.train_context for row in rows})
    differences = training_differences(rows)
    ends = []
    for (name, run), style in zip(runs.items(), plotting.styles([run[0].preset for run in runs.values()])):
        lengths = [row.context_length for row in run]
        losses = np.array([row.loss for row in run])
        errors = np.array([row.standard_error or 0.0 for row in run])
        height = plotting.draw_line(axes, lengths, losses, losses - errors, losses + errors, style=style)
        label = plotting.plain(name) + (f"\n{plotting.plain(differences[name])}" if differences else "")
        if len(contexts) > 1:
            label += f"\ntrained at {run[0].train_context:,}"
        if missing := [f"{row.context_length:,}" for row in run if not math.isfinite(row.loss)]:
            label += f"\nnot finite at {', '.join(missing)}"
        ends.append((label, style[0], height))
    plotting.set_log2_ticks(axes, sorted({row.context_length for row in rows}))
    documents = rows[0].documents
    subtitle = "mean of each bucket of positions; the same "
    subtitle += f"{documents} document{'s' if documents > 1 else ''} at every length"
    plotting.style(
        axes,
        x_label="context length: upper end of each bucket of positions (tokens)",
        y_label="held-out loss (nats per token)",
        title="Loss within and beyond the training context",
        subtitle=subtitle + ("; band: one standard error over documents" if documents > 1 else ""),
    )
    for context in contexts:
        text = f"training context {context:,}" if len(contexts) == 1 else f"trained at {context:,}"
        plotting.mark(axes, context, text)
    plotting.label_lines(axes, ends)
    plotting.save(figure, path)
