"""A trained softmax model whose attention is replaced: `--config=configs/retrofit.py:RUN,preset=conformal,every=4`.

RUN is a workdir, of a training run or made by `sympow weights import`. `every=4` keeps the attention of every fourth
layer, and `keep="3,17,18"` that of these layers, counted from 0; with `other=sliding_window` too, the kept layers get
that preset. Otherwise all layers have `preset`. There are two stages. The first, `match=true`, trains the new layers to
give the outputs of the old ones, and may be left out. The second trains the whole model to predict the next token:

    uv run train.py --config=configs/retrofit.py:runs/qwen,preset=conformal,every=4,match=true --workdir=runs/match
    uv run train.py --config=configs/retrofit.py:runs/match --workdir=runs/retrofit

All settings are those of RUN, except for attention, task, optimizer and length. See docs/retrofit.md.
"""

import dataclasses
import itertools
import pathlib

from sympow_jax import config

# New gates begin at 0.9975, a half-life of 280 tokens.
GATE_BIAS = 6.0
# Of the first stage, which trains new layers alone, and of the second.
MATCH_LEARNING_RATE, LEARNING_RATE = 1e-3, 3e-4


def get_config(
    run: str,
    *,
    preset: str | None = None,
    every: int | None = None,
    keep: tuple[int, ...] | None = None,
    other: str | None = None,
    match: bool = False,
) -> config.Config:
    """Returns a run of 1,000 updates that starts from the last checkpoint of `run`."""
    source = _read(run)
    is_second = source.task.replaces_attention
    if is_second and (preset, every, keep, other, match) != (None, None, None, None, False):
        raise ValueError(
            f"{run} is the first stage of a retrofit, whose attention is already chosen; leave out preset, every, "
            f"keep, other and match"
        )
    return dataclasses.replace(
        source,
        model=source.model
        if is_second
        else _retrofit(
            source.model.without_pattern, "conformal" if preset is None else preset, every, keep, other
        ),
        task=config.TaskConfig(name="match_attention" if match else "next_token", initial_run=run),
        optimizer=config.OptimizerConfig(
            learning_rate=MATCH_LEARNING_RATE if match else LEARNING_RATE,
            schedule="cosine",
            warmup_steps=50,
            clip_norm=1.0,
        ),
        training=dataclasses.replace(source.training, steps=1000, checkpoint_every=100),
        # A first stage is not evaluated by position, and continues no prompts.
        evaluation=dataclasses.replace(
            source.evaluation,
            context_lengths=() if match else None,
            prompts=() if match else source.evaluation.prompts,
        ),
    )


def _read(run: str) -> config.Config:
    # Imported only now, because `sympow train --help` lists this config without the extra `train`.
    from sympow_jax.process import workdir

    folder = pathlib.Path(run).expanduser()
    if not (folder / workdir.CHECKPOINTS).is_dir():
        raise ValueError(
            f"{run} is not the workdir of a run; make one of published weights with `sympow weights import "
            f"--weights={run} --workdir=NEW`, or resume a run that has begun with --config=WORKDIR/config.json"
        )
    source = workdir.read_config(folder)
    if not source.task.is_causal or source.model.patch_size is not None:
        raise ValueError(f"{run} is a run of the task {source.task.name!r}; only decoders can be retrofitted")
    return source


def _retrofit(
    model: config.ModelConfig,
    preset: str,
    every: int | None,
    keep: tuple[int, ...] | None,
    other: str | None,
) -> config.ModelConfig:
    """Returns the model with the preset in all layers but the kept ones, which have `other` or their own attention."""
    config.require_choice("preset", preset, config.PRESETS)
    if model.attention_pattern:
        raise ValueError(
            f"the model has the attention {model.attention_name!r}, which differs by layer; retrofit a model whose "
            f"layers are equal"
        )
    if other is not None:
        config.require_choice("other", other, config.PRESETS)
        if every is None and keep is None:
            raise ValueError(f"other is {other!r}, the preset of kept layers; name them with every=K or keep")
        if other == preset:
            raise ValueError(f"other is {other!r}, as preset is; name another, or leave out other")
    if every is not None and keep is not None:
        raise ValueError(f"every is {every} and keep {keep}; leave one of them out")
    kept = other or "shared"
    pattern: tuple[str, ...] = (preset,)
    if every is not None:
        if not 2 <= every <= model.layers:
            raise ValueError(
                f"every is {every}; it must be at least 2 and at most the model's {model.layers} layers"
            )
        pattern = f"{every - 1}*{preset}", kept
    elif keep is not None:
        if not (keep and set(keep) < set(range(model.layers))):
            raise ValueError(f"keep is {keep}; name some of the layers 0 to {model.layers - 1}, but not all")
        runs = itertools.groupby(kept if layer in keep else preset for layer in range(model.layers))
        pattern = tuple(f"{len(list(run))}*{name}" for name, run in runs)
    # Gates that the model has are loaded; those without a bias get one of 0.
    has_new = any(config.preset(name).decay_kind.is_projected for name in (preset, other or preset))
    new_bias = GATE_BIAS if has_new else None
    gate_bias = 0.0 if model.attention.decay_kind.is_projected else new_bias
    changes = {"implementation": None, "form": None, "decay_bias": gate_bias}
    changed = dataclasses.replace(
        model,
        attention=dataclasses.replace(model.attention, **changes),
        attention_pattern=pattern,
    )
    if not changed.replaced_layers:
        raise ValueError(f"preset is {preset!r}, which is the attention that the model has; name another")
    return changed
