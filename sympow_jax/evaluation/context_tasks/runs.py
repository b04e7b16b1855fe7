"""Evaluation of models and of trained runs on the tasks of `prompts`."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import rich.console

from sympow_jax import config as config_lib
from sympow_jax import data, models, spelling
from sympow_jax.config import checks
from sympow_jax.evaluation import buckets, context_length, over_runs, report, scores
from sympow_jax.evaluation.context_tasks import prompts, results

_TRIALS = 64
# Length of the text that contexts are excerpts of, divided by the longest context.
_TEXT_CONTEXTS = 4
# Tokens of all exams of a task and length. The exams take 4 bytes per token, a GiB, and so do the rows made from them.
_MAX_TOKENS = 1 << 28


def context_task_results(
    model: models.DecoderLM,
    material: prompts.Material,
    tasks: Sequence[str],
    lengths: Sequence[int],
    *,
    trials: int = _TRIALS,
    on_result: Callable[[], None] | None = None,
) -> list[results.TaskResult]:
    """Returns the result of each task at each context length.

    Contexts and questions do not depend on the model. Memory is that of `answer_scores`, and 8 bytes on the host per
    token of the contexts of a task and length.

    Args:
        model: the decoder.
        material: text and tokenizer.
        tasks: names of the tasks.
        lengths: tokens of a context with its longest question and answer.
        trials: minimum number of questions of each task at each length; it is rounded up to whole contexts.
        on_result: function that is called after each result.

    Raises:
        ValueError: there is no such task, a length is too short for a task or exceeds the model's learned positions,
            the tokenizer is not known or cannot encode a task, `trials` is below 1, or the contexts of a task and
            length have more than 2^28 tokens.

    Examples:
        >>> import numpy as np
        >>> from sympow_jax import config, data, evaluation, models
        >>> settings = config.ModelConfig(vocab_size=256, layers=1, width=32, heads=2)
        >>> model = models.DecoderLM(settings, rngs=0)
        >>> codec = data.Codec(data.tokenizer.load("byte"), vocab_size=256)
        >>> text = np.frombuffer(b"A text to hide needles in. " * 9, np.uint8)
        >>> results = evaluation.context_task_results(
        ...     model, evaluation.Material(text, codec), ["recall", "needle"], [256, 512], trials=8
        ... )
        >>> [(x.task, x.context_length, x.questions) for x in results]
        [('recall', 256, 8), ('recall', 512, 8), ('needle', 256, 8), ('needle', 512, 8)]
    """
    _check(tasks, lengths, trials)
    task_results = []
    for task in tasks:
        for length in lengths:
            exams = [
                prompts.make_exam(task, material, length, index=index)
                for index in range(_num_contexts(task, trials))
            ]
            exam_scores = scores.answer_scores(model, [exam.case for exam in exams])
            task_results.append(results.summarize(task, length, exams, exam_scores))
            if on_result is not None:
                on_result()
    return task_results


def _check(tasks: Sequence[str], lengths: Sequence[int], trials: int) -> None:
    known = f"there are {', '.join(prompts.TASKS)}"
    checks.refuse(
        (trials < 1, f"the number of trials is {trials}; it must be at least 1"),
        (not tasks, f"no task is given; {known}"),
        *(
            (
                task not in prompts.TASKS,
                f"there is no task {task!r}; {spelling.remedy(task, prompts.TASKS, otherwise=known)}",
            )
            for task in tasks
        ),
        *((tasks.count(task) > 1, f"task {task!r} is given more than once") for task in tasks),
    )
    longest = max(lengths, default=0)
    for task in tasks:
        count = _num_contexts(task, trials) * longest
        if count > _MAX_TOKENS:
            raise ValueError(
                f"{trials} trials of the task {task!r} at context length {longest} are {count:,} tokens; they must be "
                f"at most {_MAX_TOKENS:,}: lower one of the two"
            )


def _num_contexts(task: str, trials: int) -> int:
    """Returns the number of contexts that have at least `trials` questions together."""
    return -(-trials // prompts.TASKS[task].questions)


def evaluate_context_tasks(
    workdirs: Sequence[str | os.PathLike[str]],
    tasks: Sequence[str],
    lengths: Sequence[int] | None = None,
    *,
    out: str | os.PathLike[str],
    trials: int | None = None,
    tokenizer: str | None = None,
    changes: Mapping[str, str] | None = None,
) -> list[results.Row]:
    """Evaluates the newest checkpoint of every run and writes `tasks.{csv,json,png,pdf}` into `out`.

    All runs have the same contexts and questions, whose text is the held-out documents of the first run. Prints a
    table. With several processes, each evaluates on its own, and only the first writes and prints.

    Args:
        workdirs: workdirs of the runs.
        tasks: names of the tasks.
        lengths: context lengths; None means those of the first run that are long enough for every task.
        out: folder to write to.
        trials: minimum number of questions of each task at each length; None means 64.
        tokenizer: name of the tokenizer, as for `data.codec_of_run`.
        changes: settings of the data to replace, as for `evaluate_runs`.

    Returns:
        The rows of the CSV.

    Raises:
        ValueError: a workdir does not hold a next-token run or a checkpoint, the runs' data or vocabularies differ,
            nothing is held out, `out` cannot be written, or as `context_task_results`.
    """
    evaluation = _ContextTasks(tasks, lengths, _TRIALS if trials is None else trials, tokenizer)
    return over_runs.evaluate(evaluation, workdirs, out=out, changes=changes)


class _ContextTasks(over_runs.Evaluation[results.Row]):
    def __init__(
        self, tasks: Sequence[str], lengths: Sequence[int] | None, trials: int, tokenizer: str | None
    ):
        _check(tasks, (), trials)
        self._tasks, self._lengths, self._trials, self._tokenizer = tasks, lengths, trials, tokenizer

    def cause_of_refusal(self, config: config_lib.Config) -> str | None:
        if config.task.is_language_model:
            return None
        return (
            f"holds a run of task {config.task.name!r}; --tasks is for models of the next token, leave it out"
        )

    def prepare(self, runs: over_runs.Runs) -> int:
        tasks, lengths = self._tasks, self._lengths
        documents = context_length.require_documents(runs.heldout)
        codec = None
        if any(prompts.TASKS[task].needs_tokenizer for task in tasks):
            codec = data.codec_of_run(runs.first, self._tokenizer)
        elif self._tokenizer is not None:
            raise ValueError(f"--tokenizer is for tasks with text; {', '.join(tasks)} has none: leave it out")
        lengths = context_length.lengths_of(runs.first, runs.heldout) if lengths is None else lengths
        _check(tasks, lengths, self._trials)
        # Held-out text in its order, without the id before a document.
        parts: list[np.ndarray] = []
        needed = _TEXT_CONTEXTS * max(lengths, default=0)
        for document in documents:
            parts.append(document[0 if documents.lead is None else 1 :])
            if (needed := needed - len(parts[-1])) <= 0:
                break
        lead = codec.lead if documents.lead is None and codec is not None else documents.lead
        self._material = prompts.Material(np.concatenate(parts), codec, lead)
        while True:
            buckets.check_lengths(lengths, first_position=1)
            try:
                for task in tasks:
                    prompts.make_exam(task, self._material, lengths[0], index=0)
                break
            except prompts.TooShortError:
                # Of lengths that were not given, those are left out that are too short for a task.
                if self._lengths is not None or len(lengths) == 1:
                    raise
                lengths = lengths[1:]
        for path, config in zip(runs.paths, runs.configs):
            context_length.require_places(config, lengths, f"the model of {path}")
        self._lengths = lengths
        return len(tasks) * len(lengths)

    def score(
        self, model: models.Model, run: report.Run, advance: Callable[[int], None]
    ) -> list[results.Row]:
        task_results = context_task_results(
            cast(models.DecoderLM, model),
            self._material,
            self._tasks,
            cast(Sequence[int], self._lengths),
            trials=self._trials,
            on_result=functools.partial(advance, 1),
        )
        return [results.Row(**dataclasses.asdict(run), **dataclasses.asdict(x)) for x in task_results]

    def write(self, folder: pathlib.Path, rows: list[results.Row], runs: list[dict[str, Any]]) -> None:
        report.write_csv(folder / "tasks.csv", map(dataclasses.asdict, rows), results.COLUMNS)
        titles = {task: prompts.TASKS[task].title for task in self._tasks}
        report.write_json(folder / "tasks.json", rows, tasks=titles, trials=self._trials, runs=runs)
        results.write_plot(folder / "tasks.png", rows)

    def print(self, rows: list[results.Row], console: rich.console.Console) -> None:
        results.print_table(rows, console)
