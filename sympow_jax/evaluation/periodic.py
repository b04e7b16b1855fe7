"""Evaluation during training: loss and accuracy on a fixed batch of held-out rows, and continuations of prompts."""

import dataclasses
import functools
from typing import cast

import jax

from sympow_jax import data, generation, models, training
from sympow_jax.array_types import Array, Float
from sympow_jax.tasks import metrics
from sympow_jax.training import sharding

# Tokens after each prompt.
_TOKENS = 128
_TEMPERATURE = 0.8


class Periodic:
    """Held-out metrics and continuations at some steps of a run; neither changes what is trained.

    Every process opens its rows of the held-out batches, and all call `metrics` at the same steps.
    """

    def __init__(self, program: training.Program, heldout: data.HeldoutData):
        """Draws a batch of each part of the held-out data of `program.config`, and encodes its prompts.

        Raises:
            ValueError: the held-out data cannot be read, or the run cannot have prompts.
        """
        config = program.config
        self._program = program
        self._batches: dict[str, dict[str, Array]] = {}
        self._codec: data.Codec | None = None
        self._steps, self._every = config.training.steps, config.heldout_every
        if not self._every:
            return
        if config.evaluation.prompts:
            # Parameters of several devices might not fit on the one that continues the prompts.
            devices, longest = program.mesh.size, config.model.longest_document
            if not config.task.is_language_model or config.data.source != "text" or devices > 1:
                raise ValueError(
                    f"evaluation.prompts are for a decoder of data.source text on one device; this run has the task "
                    f"{config.task.name}, data.source {config.data.source} and {devices} "
                    f"device{'s' if devices > 1 else ''}: leave them out"
                )
            self._codec = data.codec_of_run(config)
            for prompt in config.evaluation.prompts:
                try:
                    # Not as `sympow generate`, which takes any bytes: TensorBoard's texts are UTF-8.
                    encoded = prompt.encode()
                except UnicodeEncodeError:
                    raise ValueError(f"evaluation.prompts: {prompt!r} is not UTF-8") from None
                tokens = self._codec.encode(encoded, name=f"evaluation.prompts: {prompt!r}")
                if longest is not None and len(tokens) + _TOKENS - 1 > longest:
                    raise ValueError(
                        f"evaluation.prompts: a prompt and all but the last of its {_TOKENS} tokens must fit "
                        f"model.attention.max_document_length, {longest}; shorten or leave out the prompts"
                    )
        share, shares = sharding.batch_share(program.mesh)
        for name, part in heldout.parts.items():
            rows = part.sample(share=share, shares=shares)
            if rows is not None:
                self._batches[name] = sharding.place_batch(rows, program.mesh)

    def is_due(self, step: int) -> bool:
        """Returns whether there is an evaluation after update `step`."""
        return bool(self._every) and (step % self._every == 0 or step == self._steps)

    def metrics(self, state: training.TrainState) -> dict[str, Float[Array, ""]]:
        """Returns the loss of each part, and for classification its accuracy, as arrays still being computed.

        The parameters are those of `Program.evaluation_params`. Names are as in `evaluate_heldout`. There are none if
        nothing is held out.
        """
        values: dict[str, Float[Array, ""]] = {}
        params = self._program.evaluation_params(state)
        for name, batch in self._batches.items():
            assert self.heldout_means is not None
            values |= metrics.of_part(name, self.heldout_means(params, state.statistics, batch))
        return values

    @functools.cached_property
    def heldout_means(self) -> jax.stages.Compiled | None:
        """`Program.heldout_means`, compiled for the held-out batches, which have one shape; None if there are none."""
        if not self._batches:
            return None
        program, batch = self._program, next(iter(self._batches.values()))
        state = program.abstract
        return program.heldout_means.lower(state.params, state.statistics, batch).compile()

    def has_texts(self, step: int) -> bool:
        """Returns whether prompts are continued after update `step`."""
        return self._codec is not None and self.is_due(step)

    def texts(self, state: training.TrainState) -> dict[str, str]:
        """Returns each prompt with its continuation; empty without prompts."""
        codec = self._codec
        if codec is None:
            return {}
        model = cast(models.DecoderLM, self._generator.model(state))
        prompts = self._program.config.evaluation.prompts
        sampling = generation.Sampling(temperature=_TEMPERATURE)
        texts = generation.complete(model, codec, prompts, max_tokens=_TOKENS, sampling=sampling)
        return {prompt: prompt + text for prompt, text in zip(prompts, texts)}

    @functools.cached_property
    def _generator(self) -> training.Program:
        # Steps of the implementation that trains may not support the model.
        config = self._program.config
        attention = dataclasses.replace(config.model.attention, implementation=None)
        model = dataclasses.replace(config.model, attention=attention)
        return training.Program(dataclasses.replace(config, model=model), self._program.mesh)
