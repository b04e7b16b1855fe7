"""Results of context tasks as a table and a plot."""

import dataclasses
import itertools
import pathlib
from collections.abc import Sequence

import matplotlib.axes
import matplotlib.figure
import matplotlib.lines
import numpy as np
import rich.console

from sympow_jax import plotting
from sympow_jax.evaluation import report
from sympow_jax.evaluation import scores as scores_lib
from sympow_jax.evaluation.context_tasks import prompts

# Columns of panels at most.
_MAX_COLUMNS = 2
# Inches of a row of panels.
_PANEL_HEIGHT = 3.9
_MAP_HEIGHT = 2.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskResult:
    """Result of a task at one context length. Predictions are teacher-forced.

    Attributes:
        task: name of the task.
        context_length: tokens of a context with its longest question and answer.
        exact_match: fraction of the answers of which every token had the highest logit.
        exact_match_low: lower end of Wilson's 95 % interval of `exact_match`, as if the questions were independent.
        exact_match_high: its upper end.
        token_accuracy: fraction of the answers' tokens that had the highest logit.
        loss: mean loss in nats per token of an answer.
        questions: number of questions.
        contexts: number of contexts that they were about.
        answer_tokens: number of tokens of all answers.
        chance: `exact_match` of a guess for each question, among the answers that its context has to offer.
        chance_loss: `loss` of a model that gives each of these answers the same probability, and others none.
        exact_match_0_25: `exact_match` of the questions whose answer has 0 to 25 % of the context before it, as
            `prompts.Exam.depths` says. None if there is none.
        exact_match_25_50: the same for 25 to 50 %.
        exact_match_50_75: the same for 50 to 75 %.
        exact_match_75_100: the same for 75 to 100 %.
    """

    task: str
    context_length: int
    exact_match: float
    exact_match_low: float
    exact_match_high: float
    token_accuracy: float
    loss: float
    questions: int
    contexts: int
    answer_tokens: int
    chance: float
    chance_loss: float
    exact_match_0_25: float | None
    exact_match_25_50: float | None
    exact_match_50_75: float | None
    exact_match_75_100: float | None

    @property
    def exact_match_by_depth(self) -> tuple[float | None, ...]:
        """The `exact_match` of each quarter of the context, from its beginning."""
        return (
            self.exact_match_0_25,
            self.exact_match_25_50,
            self.exact_match_50_75,
            self.exact_match_75_100,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(TaskResult, report.Run):
    """Result of one run."""


COLUMNS = ("run", *(field.name for field in dataclasses.fields(TaskResult)), "train_context")


def summarize(
    task: str,
    context_length: int,
    exams: Sequence[prompts.Exam],
    scores: Sequence[Sequence[scores_lib.Score]],
) -> TaskResult:
    """Returns the result of exams; `scores` has a list for each exam, with the score of each of its questions."""
    from scipy import stats  # slow to import

    flat = list(itertools.chain.from_iterable(scores))
    tokens = sum(len(score.correct) for score in flat)
    right = sum(bool(score.correct.all()) for score in flat)
    interval = stats.binomtest(right, len(flat)).proportion_ci(method="wilson")
    log_candidates = np.array([exam.log_candidates for exam in exams])
    question_counts = [len(exam_scores) for exam_scores in scores]
    # Without depths, no question is counted in a quarter.
    quarters: list[list[bool]] = [[] for _ in range(4)]
    for exam, exam_scores in zip(exams, scores):
        for depth, score in zip(exam.depths, exam_scores):
            quarters[int(4 * depth)].append(bool(score.correct.all()))
    first, second, third, last = (float(np.mean(correct)) if correct else None for correct in quarters)
    return TaskResult(
        task=task,
        context_length=context_length,
        exact_match=right / len(flat),
        exact_match_low=float(interval.low),
        exact_match_high=float(interval.high),
        token_accuracy=float(np.concatenate([score.correct for score in flat]).mean()),
        loss=float(np.concatenate([score.losses for score in flat]).mean(dtype=np.float64)),
        questions=len(flat),
        contexts=len(exams),
        answer_tokens=tokens,
        chance=float(np.average(np.exp(-log_candidates), weights=question_counts)),
        chance_loss=float(log_candidates @ question_counts) / tokens,
        exact_match_0_25=first,
        exact_match_25_50=second,
        exact_match_50_75=third,
        exact_match_75_100=last,
    )


def print_table(rows: Sequence[Row], console: rich.console.Console) -> None:
    """Prints a line per task and length; with several runs, which have the same ones, a column of answers for each."""
    runs = list(dict.fromkeys(row.run for row in rows))
    one = len(runs) == 1
    columns = ["task", "context length", *(["answers right"] if one else runs), "chance"]
    columns += ["tokens right", "loss", "chance loss"] if one else []
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.task, row.context_length), []).append(row)
    lines = []
    for (task, length), aligned in groups.items():
        first = aligned[0]
        cells = [task, f"{length:,}"]
        cells += [
            f"{row.exact_match:.3f} ({row.exact_match_low:.3f} to {row.exact_match_high:.3f})"
            for row in aligned
        ]
        numbers = [first.chance]
        numbers += [first.token_accuracy, first.loss, first.chance_loss] if one else []
        lines.append([*cells, *(f"{number:.3f}" for number in numbers), f"{first.questions:,}"])
    title = "Fraction of answers that are right in full (95 % interval), teacher-forced"
    report.print_cells(title, [*columns, "questions"], lines, console)


def write_plot(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Draws accuracy over context length, and below it, for tasks with depths, over context length and depth.

    The upper part has a panel for each task and a color for each preset. Solid lines are `exact_match` with a band from
    `exact_match_low` to `exact_match_high`, dashed ones `token_accuracy`. A gray line is `chance`, a dashed vertical
    one each training context. The lower part has a panel for each task and run, with the `exact_match` of each quarter
    of the context.
    """
    tasks, runs = (list(dict.fromkeys(names)) for names in zip(*((row.task, row.run) for row in rows)))
    with_depths = [row for row in rows if None not in row.exact_match_by_depth]
    maps = [
        [row for row in with_depths if (row.task, row.run) == pair] for pair in itertools.product(tasks, runs)
    ]
    maps = [panel_rows for panel_rows in maps if panel_rows]
    heights = [_PANEL_HEIGHT * -(-len(tasks) // _MAX_COLUMNS)]
    if maps:
        heights.append(_MAP_HEIGHT * -(-len(maps) // _MAX_COLUMNS))
    one_column = len(tasks) == 1 and len(maps) <= 1
    figure = plotting.blank(width=7.7 if one_column else 9.6, height=sum(heights))
    parts = figure.subfigures(len(heights), height_ratios=heights, squeeze=False).flat
    _draw_lines(parts[0], tasks, runs, rows)
    if maps:
        _draw_maps(parts[1], maps)
    plotting.save(figure, path)


def _draw_lines(
    figure: matplotlib.figure.FigureBase, tasks: Sequence[str], runs: Sequence[str], rows: Sequence[Row]
) -> None:
    """Draws accuracy over context length, a panel for each task."""
    panels, columns = _panels(figure, len(tasks))
    handles = []
    presets = {row.run: row.preset for row in rows}
    styles = plotting.styles(list(presets.values()))
    differences = report.training_differences(rows)
    for number, (axes, task) in enumerate(zip(panels, tasks)):
        task_rows = [row for row in rows if row.task == task]
        for run, style in zip(runs, styles):
            run_rows = [row for row in task_rows if row.run == run]
            lengths = [row.context_length for row in run_rows]
            axes.plot(
                lengths,
                [row.token_accuracy for row in run_rows],
                color=style[0],
                linewidth=1.2,
                linestyle="--",
            )
            plotting.draw_line(
                axes,
                lengths,
                [row.exact_match for row in run_rows],
                [row.exact_match_low for row in run_rows],
                [row.exact_match_high for row in run_rows],
                style=style,
                label=plotting.plain(f"{run}, {differences[run]}" if differences else run),
            )
            handles += axes.lines[-1:] if number == 0 else []
        chance = {row.context_length: row.chance for row in task_rows}
        lengths = sorted(chance)
        axes.plot(lengths, [chance[x] for x in lengths], color="#999999", linewidth=1.2, zorder=1)
        plotting.set_log2_ticks(axes, lengths)
        axes.tick_params(axis="x", labelrotation=45 if len(lengths) > 6 else 0)
        axes.set_ylim(-0.03, 1.03)
        plotting.style(
            axes,
            x_label="context length (tokens)",
            y_label="" if number % columns else "accuracy",
            title=f"{task}: {prompts.TASKS[task].title}",
        )
        for context in sorted({row.train_context for row in rows}):
            if lengths[0] <= context <= lengths[-1]:
                plotting.mark(axes, context, f"trained at {context:,}")
    handles += [
        matplotlib.lines.Line2D([], [], color=plotting.INK, label="answers right"),
        matplotlib.lines.Line2D(
            [], [], color=plotting.INK, linestyle="--", linewidth=1.2, label="tokens right"
        ),
        matplotlib.lines.Line2D([], [], color="#999999", linewidth=1.2, label="answers right by chance"),
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), 4), frameon=False, fontsize=9
    )


def _draw_maps(figure: matplotlib.figure.FigureBase, maps: Sequence[Sequence[Row]]) -> None:
    """Draws `exact_match` over context length and depth, a panel for the rows of each task and run."""
    panels, columns = _panels(figure, len(maps))
    for number, (axes, rows) in enumerate(zip(panels, maps)):
        values = np.array([row.exact_match_by_depth for row in rows], np.float64).T
        image = axes.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto")
        for (depth, length), value in np.ndenumerate(values):
            color = "black" if value > 0.5 else "white"
            axes.text(length, depth, f"{value:.2f}", ha="center", va="center", fontsize=7.5, color=color)
        plotting.style(
            axes,
            x_label="context length (tokens)",
            y_label="" if number % columns else "depth (% of context)",
            title=f"{rows[0].task}, {plotting.plain(rows[0].run)}",
        )
        axes.grid(visible=False)
        lengths, train_context = [row.context_length for row in rows], rows[0].train_context
        axes.set_xticks(range(len(rows)), [f"{length:,}" for length in lengths])
        axes.tick_params(axis="x", labelrotation=45 if len(rows) > 4 else 0)
        axes.set_yticks(np.arange(5) - 0.5, [str(25 * quarter) for quarter in range(5)])
        if lengths[0] <= train_context < lengths[-1]:
            within = sum(length <= train_context for length in lengths)
            plotting.mark(axes, within - 0.5, f"trained at {train_context:,}")
    figure.colorbar(image, ax=panels, label="answers right", pad=0.01).outline.set_visible(False)


def _panels(figure: matplotlib.figure.FigureBase, count: int) -> tuple[list[matplotlib.axes.Axes], int]:
    """Returns `count` panels row by row, with one range of y for all, and the number of columns."""
    columns = min(count, _MAX_COLUMNS)
    axes = figure.subplots(-(-count // columns), columns, sharey=True, squeeze=False).flat
    for unused in axes[count:]:
        unused.remove()
    return list(axes[:count]), columns
