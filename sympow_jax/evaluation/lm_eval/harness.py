"""Models of `lm-eval` for decoders and workdirs of this package."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any, cast

import jax

from sympow_jax import data, extras, models, training
from sympow_jax.evaluation.lm_eval import requests as requests_lib
from sympow_jax.training import workdir as workdir_lib

with extras.required("lm_eval", __name__):
    import lm_eval
    from lm_eval.api import instance, registry
    from lm_eval.api import model as model_lib
    from lm_eval.tasks import TaskManager

__all__ = ["HarnessModel", "WorkdirModel", "evaluate"]

_MAX_TOKENS = 256  # the harness's own default


class HarnessModel(model_lib.LM):
    """A decoder as a model of the harness.

    Args:
        decoder: the decoder, such as that of `weights.from_pretrained`.
        codec: its tokenizer.
    """

    def __init__(self, decoder: models.DecoderLM, codec: data.Codec):
        super().__init__()
        self._text_model = requests_lib.TextModel(decoder, codec)

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
            ValueError: a request samples with an option that is not supported.
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
        if settings.task.name != "next_token":
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
    limit: int | None = None,
) -> dict[str, Any]:
    """Returns the results of `lm_eval.simple_evaluate`, without the samples.

    Args:
        model: the model.
        tasks: names of tasks.
        include_path: folder with YAML files of further tasks.
        num_fewshot: number of examples before each question; None means that of the task.
        limit: maximum number of documents of each task; None means all.

    Raises:
        ValueError: there is no such task.
    """
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
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
    """Returns a request with the options of the harness; `do_sample=False` overrides a temperature."""
    options = dict(options)
    stops = options.pop("until", None) or ()
    max_tokens = options.pop("max_gen_toks", _MAX_TOKENS)
    temperature = options.pop("temperature", 0.0)
    samples = options.pop("do_sample", temperature > 0)
    if options:
        raise ValueError(f"generation options {', '.join(sorted(options))} are not supported; remove them")
    return requests_lib.GenerateRequest(
        prompt,
        int(max_tokens),
        (stops,) if isinstance(stops, str) else tuple(stops),
        float(temperature or 1.0) if samples else 0.0,
    )
