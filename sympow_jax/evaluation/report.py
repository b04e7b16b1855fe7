"""Results of a context-length evaluation as a table, a CSV file and a JSON file."""

import csv
import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any, TextIO

import numpy as np
import rich.box
import rich.console
import rich.table
import rich.text

from sympow_jax import atomic
from sympow_jax.evaluation import buckets

__all__ = ["COLUMNS", "Row", "make_console", "make_rows", "print_table", "write_csv", "write_json"]

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
# Wide enough for every preset side by side, because a file or a pipe has no width.
_PLAIN_WIDTH = 200


def make_console(file: TextIO | None = None) -> rich.console.Console:
    """Returns a console on the terminal, or on a file (default: standard output) with room for a wide table."""
    console = rich.console.Console(file=file)
    return console if console.is_terminal else rich.console.Console(file=file, width=_PLAIN_WIDTH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Result of one bucket of one run.

    Attributes:
        run: name of the run.
        context_length: last position of the bucket.
        loss: mean loss in nats per token.
        perplexity: exp(loss).
        bits_per_token: loss / ln 2.
        tokens: number of predictions in the bucket.
        documents: number of documents.
        train_context: training context length of the run.
        standard_error: standard error of `loss` over documents; None for one document. It is not in the CSV.
    """

    run: str
    context_length: int
    loss: float
    perplexity: float
    bits_per_token: float
    tokens: int
    documents: int
    train_context: int
    standard_error: float | None


def make_rows(run: str, means: Sequence[buckets.Bucket], *, train_context: int) -> list[Row]:
    """Returns the rows of one run."""
    with np.errstate(over="ignore"):  # a diverged model's perplexity may be infinite
        return [
            Row(
                run=run,
                context_length=mean.context_length,
                loss=mean.loss,
                perplexity=float(np.exp(mean.loss)),
                bits_per_token=mean.loss / math.log(2),
                tokens=mean.tokens,
                documents=mean.documents,
                train_context=train_context,
                standard_error=mean.standard_error,
            )
            for mean in means
        ]


def write_csv(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Writes `COLUMNS` of every row, floats in full precision."""
    with atomic.replace(path) as draft, draft.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([getattr(row, name) for name in COLUMNS] for row in rows)


def write_json(path: pathlib.Path, rows: Sequence[Row], **metadata: Any) -> None:
    """Writes `metadata` and the rows; numbers that are not finite become null, because JSON does not have them."""
    records = [
        {name: _finite_or_none(value) for name, value in dataclasses.asdict(row).items()} for row in rows
    ]
    with atomic.replace(path) as draft:
        draft.write_text(json.dumps({**metadata, "rows": records}, indent=2, allow_nan=False) + "\n")


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(rows: Sequence[Row], console: rich.console.Console) -> None:
    """Prints a line per context length and a column of losses per run; `*` marks the training context."""
    by_run: dict[str, list[Row]] = {}
    for row in rows:
        by_run.setdefault(row.run, []).append(row)
    runs = list(by_run.values())
    table = rich.table.Table(
        box=rich.box.ROUNDED if console.is_terminal else rich.box.ASCII2,
    )
    table.add_column("positions up to", justify="right")
    for name in by_run:
        # Text instead of a string, so that a run named [x] is not parsed as markup.
        table.add_column(rich.text.Text("loss" if len(runs) == 1 else name), justify="right")
    if len(runs) == 1:
        table.add_column("perplexity", justify="right")
        table.add_column("bits per token", justify="right")
    table.add_column("predictions", justify="right")
    for same_length in zip(*runs, strict=True):
        first = same_length[0]
        cells = [f"{first.context_length:,}"]
        cells += [_loss_cell(row) for row in same_length]
        if len(runs) == 1:
            cells += [f"{first.perplexity:,.3f}", f"{first.bits_per_token:.4f}"]
        table.add_row(*cells, f"{first.tokens:,}")
    console.print("Held-out loss by position, nats per token", style="bold")
    console.print(table, crop=False)
    console.print(_caption(runs), style="dim", highlight=False, soft_wrap=True)


def _loss_cell(row: Row) -> str:
    mark = "*" if row.context_length == row.train_context else " "
    return f"{row.loss:.4f}{mark}"


def _caption(runs: Sequence[Sequence[Row]]) -> str:
    documents, contexts = runs[0][0].documents, sorted({run[0].train_context for run in runs})
    trained = " and ".join(f"{context:,}" for context in contexts)
    return (
        f"Each line is the mean over the positions above the line before, of the same {documents} "
        f"document{'s' if documents > 1 else ''}; * marks the training context ({trained})."
    )
