"""Models of `lm-eval` for decoders and workdirs of this package."""

import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any, cast

import jax

from sympow_jax import data, extras, generation, models, spelling, training
from sympow_jax.evaluation.lm_eval import requests as requests_lib
from sympow_jax.process import workdir as workdir_lib

with extras.required("lm_eval", __name__):
    import lm_eval
    from lm_eval.api import instance, registry
    from lm_eval.api import model as model_lib
    from lm_eval.tasks import TaskManager

_MAX_TOKENS = 256  # the harness's own default
# Names of the maximum number of tokens; of several, the first counts, as in the harness.
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class HarnessModel(model_lib.LM):
    """A decoder as a model of the harness.

    Args:
        decoder: the decoder, such as that of `weights.from_pretrained`.
        codec: its tokenizer.
    """

    def __init__(self, decoder: models.DecoderLM, codec: data.Codec):
        super().__init__()
        self._text_model = requests_lib.TextModel(decoder, codec)

    def check(self, options: dict[str, Any]) -> None:
        """Raises ValueError unless the model can generate text with these options of a task."""
        self._text_model.room(_generate_request("", options))

    def loglikelihood(self, requests: Sequence[instance.Instance]) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of each continuation, and whether greedy decoding gives it."""
        # By default, GPUs would round the factors of float32 products.
        with jax.default_matmul_precision("highest"):
            return self._text_model.continuation_log_likelihoods([request.args for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[instance.Instance]) -> list[float]:
        """Returns the log-likelihood of each text."""
        with jax.default_matmul_precision("highest"):
            return self._text_model.text_log_likelihoods([request.args[0] for request in requests])

    def generate_until(self, requests: Sequence[instance.Instance]) -> list[str]:
        """Returns the continuation of each prompt before its first stop string.

        Raises:
            ValueError: a request has an option that is not supported, before any is continued.
        """
        with jax.default_matmul_precision("highest"):
            return self._text_model.generate([_generate_request(*request.args) for request in requests])


@registry.register_model("sympow")
class WorkdirModel(HarnessModel):
    """The newest checkpoint of a run, with float32 products: `--model sympow --model_args workdir=DIR`.

    Args:
        workdir: workdir of the run.
        tokenizer: name of the tokenizer, as for `data.codec_of_run`.
        batch_size: not used, because batches have as many rows as fit; the harness passes it.
        max_batch_size: not used.
        device: not used; JAX chooses it.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        tokenizer: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ):
        del batch_size, max_batch_size, device
        folder = pathlib.Path(workdir)
        settings = workdir_lib.read_config(folder)
        if not settings.task.is_language_model:
            raise ValueError(
                f"{folder} holds a run of task {settings.task.name!r}; lm-eval is for models of the next token"
            )
        codec = data.codec_of_run(settings, tokenizer)
        super().__init__(cast(models.DecoderLM, training.restore_exact(folder)[1]), codec)


def evaluate(
    model: model_lib.LM,
    tasks: Sequence[str],
    *,
    include_path: str | os.PathLike[str] | None = None,
    num_fewshot: int | None = None,
    limit: float | None = None,
) -> dict[str, Any]:
    """Returns the results of `lm_eval.simple_evaluate`, without the samples.

    Args:
        model: the model.
        tasks: names of tasks.
        include_path: folder with YAML files of further tasks.
        num_fewshot: number of examples before each question; None means that of the task.
        limit: maximum number of documents of each task, or below 1 the fraction of them; None means all.

    Raises:
        ValueError: there is no such task, a task has an option that is not supported, or the limit is not above 0.
    """
    if limit is not None and not 0 < limit < math.inf:
        raise ValueError(
            f"limit is {limit:g}; it must be a number of documents, or a fraction of them below 1"
        )
    manager = _Tasks(model, None if include_path is None else str(include_path))
    if unknown := sorted(set(tasks) - set(manager.all_tasks)):
        raise ValueError(
            f"there is no task {', '.join(unknown)} in lm-eval; `lm-eval ls tasks` lists its tasks"
        )
    results = lm_eval.simple_evaluate(
        model=model,
        tasks=list(tasks),
        task_manager=manager,
        num_fewshot=num_fewshot,
        limit=limit,
        log_samples=False,
    )
    return cast(dict[str, Any], results)


def _generate_request(prompt: str, options: dict[str, Any]) -> requests_lib.GenerateRequest:
    """Returns a request with the options of the harness, which are read as its own models read them.

    Raises:
        ValueError: an option is not supported, or has no valid value.
    """
    given = {name: value for name, value in options.items() if value is not None}
    stops = given.pop("until", [])
    stops = [stops] if isinstance(stops, str) else stops
    lengths = [given.pop(name) for name in _LENGTHS if name in given] or [_MAX_TOKENS]
    temperature, samples = given.pop("temperature", None), given.pop("do_sample", None)
    samples = bool(temperature) if samples is None else samples
    if given.get("num_beams") == 1:
        del given["num_beams"]
    drawn = {
        name: given.pop(name) for name in ("top_k", "top_p", "min_p", "repetition_penalty") if name in given
    }
    if given:
        raise ValueError(
            f"generation options {spelling.listed(f'{name}={value!r}' for name, value in sorted(given.items()))} are "
            f"not supported; remove them"
        )
    # Of `transformers`, 0 is no limit.
    if drawn.get("top_k", 1) in (0, -1):
        del drawn["top_k"]
    try:
        if not all(isinstance(stop, str) for stop in stops):
            raise ValueError("until is not a list of texts")
        if int(lengths[0]) < 1:
            raise ValueError("the maximum number of tokens is below 1")
        sampling = generation.Sampling(
            temperature=(1.0 if temperature is None else float(temperature)), **drawn
        )
    except (TypeError, ValueError) as error:
        shown = spelling.shown(options)
        raise ValueError(f"the generation options {shown} are not valid: {error}; correct them") from None
    if not samples:
        sampling = generation.Sampling(temperature=0.0, repetition_penalty=sampling.repetition_penalty)
    # The harness's tasks write an empty stop for none.
    return requests_lib.GenerateRequest(prompt, int(lengths[0]), tuple(filter(None, stops)), sampling)


class _Tasks(TaskManager):
    """Tasks of the harness, whose options are checked when they are loaded, before anything is scored."""

    def __init__(self, model: model_lib.LM, include_path: str | None):
        super().__init__(include_path=include_path)
        self._model = model

    def load(self, *arguments: Any, **options: Any) -> Any:
        loaded = super().load(*arguments, **options)
        for name, task in loaded["tasks"].items():
            if isinstance(self._model, HarnessModel) and task.get_config("output_type") == "generate_until":
                try:
                    self._model.check(task.get_config("generation_kwargs") or {})
                except ValueError as error:
                    raise ValueError(f"task {name}: {error}") from error
        return loaded
