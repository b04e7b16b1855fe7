"""A trained softmax model whose attention is replaced: `--config=configs/retrofit.py:RUN,preset=conformal,every=4`.

RUN is a workdir, of a training run or made by `sympow weights import`. `every=4` keeps the attention of every fourth
layer; without it, all layers are replaced. Two commands make a retrofit in two stages, the first of which may be left
out: with `match=true`, the new layers learn the outputs of the old ones, and then the model learns to predict the next
token:

    uv run train.py --config=configs/retrofit.py:runs/qwen,preset=conformal,every=4,match=true --workdir=runs/match
    uv run train.py --config=configs/retrofit.py:runs/match --workdir=runs/retrofit

Data and model are those of RUN. See docs/retrofit.md.
"""

import dataclasses
import pathlib

from sympow_jax import config

# New gates forget about 0.2 % per token at first.
GATE_BIAS = 6.0
# For the new layers alone, and for the whole model.
MATCHING_RATE, TRAINING_RATE = 1e-3, 3e-4


def get_config(
    run: str, *, preset: str | None = None, every: int | None = None, match: bool = False
) -> config.Config:
    """Returns a run of 1,000 updates that starts from the last checkpoint of `run`."""
    found = _read(run)
    matched = found.task.name == "match_attention"
    if matched and (preset, every, match) != (None, None, False):
        raise ValueError(
            f"{run} is the first stage of a retrofit, whose attention is chosen; leave out preset, every and match"
        )
    return config.Config(
        model=found.model if matched else _retrofit(found.model, preset or "conformal", every),
        task=config.TaskConfig(name="match_attention" if match else "next_token", initial_run=run),
        data=found.data,
        optimizer=config.OptimizerConfig(
            learning_rate=MATCHING_RATE if match else TRAINING_RATE,
            schedule="cosine",
            warmup_steps=50,
            clip_norm=1.0,
        ),
        training=config.TrainingConfig(steps=1000, checkpoint_every=100),
    )


def _read(run: str) -> config.Config:
    # Imported only now, because `sympow train --help` lists this config without the extra `train`.
    from sympow_jax.training import workdir

    folder = pathlib.Path(run)
    if not (folder / workdir.CHECKPOINTS).is_dir():
        raise ValueError(
            f"{run} is not the workdir of a run; make one of published weights with `sympow weights import "
            f"--weights={run} --workdir=NEW`"
        )
    found = workdir.read_config(folder)
    if not found.task.is_causal or found.model.patch_size is not None:
        raise ValueError(f"{run} is a run of the task {found.task.name!r}; only decoders can be retrofitted")
    return found


def _retrofit(model: config.ModelConfig, preset: str, every: int | None) -> config.ModelConfig:
    """Returns the model with the attention of all layers replaced, or of all but every `every`-th."""
    config.require_choice("preset", preset, config.PRESETS)
    if model.attention_pattern:
        raise ValueError(
            f"the model has the attention {model.attention_name!r}, which differs by layer; retrofit a model whose "
            f"layers are equal"
        )
    if every is not None and not 2 <= every <= model.layers:
        raise ValueError(
            f"every is {every}; it must be at least 2 and at most the model's {model.layers} layers"
        )
    changes = {"implementation": None, "form": None}
    if model.attention.decay == "none":
        changes["decay_bias"] = GATE_BIAS
    return dataclasses.replace(
        model,
        attention=dataclasses.replace(model.attention, **changes),
        attention_pattern=(preset,) if every is None else (f"{every - 1}*{preset}", "shared"),
    )
