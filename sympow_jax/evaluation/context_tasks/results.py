"""Results of context tasks as a table and a plot."""

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Sequence

import matplotlib.axes
import matplotlib.lines
import numpy as np
import rich.console

from sympow_jax.evaluation import figures, report
from sympow_jax.evaluation.context_tasks import answers, prompts

__all__ = ["COLUMNS", "Row", "TaskResult", "make_rows", "print_table", "summarize", "write_plot"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskResult:
    """Result of a task at one context length. Predictions are teacher-forced.

    Attributes:
        task: name of the task.
        context_length: tokens of a context with its longest question and answer.
        exact_match: fraction of the answers of which every token had the highest logit.
        standard_error: sqrt(p (1 - p) / n) of `exact_match` p over the n questions, as if they were independent.
        token_accuracy: fraction of the answers' tokens that had the highest logit.
        loss: mean loss in nats per token of an answer.
        questions: number of questions.
        contexts: number of contexts that they were about.
        answer_tokens: number of tokens of all answers.
        chance: `exact_match` of a guess among the answers that the context has to offer.
        chance_loss: `loss` of a model that gives each of these answers the same probability, and others none.
    """

    task: str
    context_length: int
    exact_match: float
    standard_error: float
    token_accuracy: float
    loss: float
    questions: int
    contexts: int
    answer_tokens: int
    chance: float
    chance_loss: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(TaskResult):
    """Result of one run.

    Attributes:
        run: name of the run.
        train_context: training context length of the run.
    """

    run: str
    train_context: int


COLUMNS = ("run", *(field.name for field in dataclasses.fields(TaskResult)), "train_context")


def summarize(
    task: str,
    context_length: int,
    exams: Sequence[prompts.Exam],
    scores: Sequence[Sequence[answers.Score]],
) -> TaskResult:
    """Returns the result of exams, of which `scores` has the scores of each one's questions."""
    flat = [score for of_exam in scores for score in of_exam]
    tokens = sum(len(score.correct) for score in flat)
    exact = float(np.mean([score.correct.all() for score in flat]))
    candidates = np.array([exam.log_candidates for exam in exams])
    guessed = sum(len(of_exam) * size for of_exam, size in zip(scores, candidates))
    return TaskResult(
        task=task,
        context_length=context_length,
        exact_match=exact,
        standard_error=math.sqrt(exact * (1 - exact) / len(flat)),
        token_accuracy=float(np.concatenate([score.correct for score in flat]).mean()),
        loss=float(np.concatenate([score.losses for score in flat]).mean(dtype=np.float64)),
        questions=len(flat),
        contexts=len(exams),
        answer_tokens=tokens,
        chance=float(np.exp(-candidates).mean()),
        chance_loss=float(guessed / tokens),
    )


def make_rows(run: str, results: Sequence[TaskResult], *, train_context: int) -> list[Row]:
    """Returns the rows of one run."""
    return [Row(run=run, train_context=train_context, **dataclasses.asdict(result)) for result in results]


def print_table(rows: Sequence[Row], console: rich.console.Console) -> None:
    """Prints a line per task and length; with several runs, a column of exact matches for each."""
    names = list(dict.fromkeys(row.run for row in rows))
    by_run = [[row for row in rows if row.run == name] for name in names]
    one = len(names) == 1
    columns = ["task", "context length", *(["answers right"] if one else names), "by chance"]
    columns += ["tokens right", "loss", "by chance"] if one else []
    lines = []
    for same in zip(*by_run, strict=True):
        first = same[0]
        cells = [first.task, f"{first.context_length:,}"]
        cells += [f"{row.exact_match:.3f} ± {row.standard_error:.3f}" for row in same]
        cells.append(f"{first.chance:.3f}")
        if one:
            cells += [f"{first.token_accuracy:.3f}", f"{first.loss:.3f}", f"{first.chance_loss:.3f}"]
        lines.append([*cells, f"{first.questions:,}"])
    report.print_cells(
        "Fraction of answers that are right in full, teacher-forced", [*columns, "questions"], lines, console
    )


def write_plot(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Draws accuracy over context length, a panel for each task and a color for each run.

    Solid lines are `exact_match` with a band of one standard error, dashed ones `token_accuracy`. A gray line is
    `chance`, a dashed vertical one each training context.
    """
    tasks = list(dict.fromkeys(row.task for row in rows))
    names = list(dict.fromkeys(row.run for row in rows))
    columns = min(len(tasks), 2)
    figure, panels = figures.make(
        columns,
        rows=-(-len(tasks) // columns),
        width=4.8 * max(columns, 1.6),
        height=3.9 * -(-len(tasks) // columns),
    )
    for axes in panels[len(tasks) :]:
        axes.remove()
    handles = []
    for number, (axes, task) in enumerate(zip(panels, tasks)):
        of_task = [row for row in rows if row.task == task]
        for name, color, marker in zip(
            names, itertools.cycle(figures.COLORS), itertools.cycle(figures.MARKERS)
        ):
            line = _draw_run(axes, [row for row in of_task if row.run == name], name, color, marker)
            handles += [line] if number == 0 else []
        lengths = sorted({row.context_length for row in of_task})
        chance = {row.context_length: row.chance for row in of_task}
        axes.plot(lengths, [chance[x] for x in lengths], color="#999999", linewidth=1.2, zorder=1)
        figures.set_log2_ticks(axes, lengths)
        axes.tick_params(axis="x", labelrotation=45 if len(lengths) > 6 else 0)
        axes.set_ylim(-0.03, 1.03)
        figures.style(
            axes,
            x_label="context length (tokens)",
            y_label="" if number % columns else "accuracy",
            title=f"{task}: {prompts.TASKS[task].title}",
        )
        for context in sorted({row.train_context for row in rows}):
            if lengths[0] <= context <= lengths[-1]:
                figures.mark(axes, context, f"trained at {context:,}")
    handles += [
        matplotlib.lines.Line2D([], [], color=figures.INK, label="answers right"),
        matplotlib.lines.Line2D(
            [], [], color=figures.INK, linestyle="--", linewidth=1.2, label="tokens right"
        ),
        matplotlib.lines.Line2D([], [], color="#999999", linewidth=1.2, label="answers right by chance"),
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), 4), frameon=False, fontsize=9
    )
    figures.save(figure, path)


def _draw_run(
    axes: matplotlib.axes.Axes, run: Sequence[Row], name: str, color: str, marker: str
) -> matplotlib.lines.Line2D:
    """Draws the two lines of a run; returns the solid one, which has its name."""
    lengths = np.array([row.context_length for row in run])
    exact = np.array([row.exact_match for row in run])
    errors = np.array([row.standard_error for row in run])
    axes.fill_between(lengths, exact - errors, exact + errors, color=color, alpha=0.13, linewidth=0)
    axes.plot(lengths, [row.token_accuracy for row in run], color=color, linewidth=1.2, linestyle="--")
    (line,) = axes.plot(
        lengths,
        exact,
        color=color,
        marker=marker,
        label=name,
        markersize=5,
        linewidth=1.8,
        markeredgecolor="white",
    )
    return line
