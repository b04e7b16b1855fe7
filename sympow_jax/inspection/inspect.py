"""Draws attention maps, half-lives and rotation rates of a trained model for a text."""

import json
import math
import os
import pathlib
from typing import Any

import numpy as np

from sympow_jax import data, models, plotting, training
from sympow_jax.evaluation import over_runs, report
from sympow_jax.inspection import attention_maps, figures
from sympow_jax.process import atomic, workdir
from sympow_jax.training import checkpoint

# Limits of a text, so that maps are legible, and of all maps together, so that the JSON file has tens of megabytes.
MAX_TOKENS = 1024
MAX_WEIGHTS = 2**24
_DECIMALS = 7


def inspect(
    folder: str | os.PathLike[str],
    text: bytes,
    *,
    name: str = "the text",
    layer: int | None = None,
    out: str | os.PathLike[str] | None = None,
    tokenizer: str | None = None,
) -> list[str]:
    """Writes attention, half_life and rotation as PNG and PDF, and inspect.json, for a text.

    Args:
        folder: workdir of a run, whose newest checkpoint is read.
        text: bytes, in UTF-8 if the tokenizer reads text.
        name: name of the text in errors.
        layer: layer to show, from 0; None shows all.
        out: folder to write to; None means `inspect` in the workdir.
        tokenizer: as in `data.codec_of_run`.

    Returns:
        One message for each file that was written, or that does not apply to the model.

    Raises:
        ValueError: the folder holds no run on tokens or no checkpoint, the text is empty, too long or not in the
            vocabulary, the layer does not exist, or `out` cannot be written.
    """
    folder = pathlib.Path(folder)
    settings = workdir.read_config(folder)
    if settings.model.patch_size is not None:
        raise ValueError(f"{folder} holds a run on images; only models that read text can be inspected")
    if settings.task.replaces_attention:
        raise ValueError(
            f"{folder} holds the first stage of a retrofit, two attentions in a layer; inspect the run that starts "
            f"from it"
        )
    count = settings.model.layers
    if layer is not None and not 0 <= layer < count:
        raise ValueError(f"--layer is {layer}; the model has layers 0 to {count - 1}")
    layers = range(count) if layer is None else [layer]
    checkpoint.require_checkpoint(folder)
    codec = data.codec_of_run(settings, tokenizer)
    tokens = codec.encode(text, name)
    if len(tokens) > MAX_TOKENS:
        raise ValueError(
            f"{name} has {len(tokens)} tokens; maps are made of at most {MAX_TOKENS}: shorten it"
        )
    maps_size = len(layers) * settings.model.heads
    if maps_size * len(tokens) ** 2 > MAX_WEIGHTS:
        raise ValueError(
            f"{len(layers)} layers of {settings.model.heads} heads and {len(tokens)} tokens are "
            f"{maps_size * len(tokens) ** 2} weights, more than {MAX_WEIGHTS}: choose one with --layer, or shorten "
            f"{name} to {math.isqrt(MAX_WEIGHTS // maps_size)} tokens"
        )
    target = over_runs.writable_folder(folder / "inspect" if out is None else out)

    _, model, step = training.restore_exact(folder)
    assert isinstance(model, models.DecoderLM | models.Encoder)
    maps = attention_maps.attention_maps(model, tokens, layers)
    causal = settings.model.attention.causal
    run, attention = folder.absolute().name, settings.model.attention_name
    # The id before a document need not be one of the tokenizer's.
    texts = [codec.decode([token]) or f"<{token}>".encode() for token in tokens]
    subtitle = f"{plotting.plain(run)}, step {step}: {attention}"
    with over_runs.writing(target):
        content: dict[str, Any] = {"run": run, "step": step, "attention": attention, "tokens": tokens}
        content["text"] = [text.decode(errors="replace") for text in texts]
        content["layers"] = []
        for x in maps:
            weights = np.round(x.weights.astype(np.float64), _DECIMALS).tolist()
            if causal:  # a row of weights ends with its own token
                weights = [[row[: i + 1] for i, row in enumerate(rows)] for rows in weights]
            record: dict[str, Any] = {"layer": x.layer, "weights": weights}
            for field, values in (("half_life", x.half_life), ("rate", x.rate), ("theta", x.theta)):
                record[field] = None if values is None else report.without_nan(values.tolist())
            content["layers"].append(record)
        with atomic.replace(target / "inspect.json") as draft:
            draft.write_text(json.dumps(content, allow_nan=False) + "\n")
        messages = [f"wrote {target / 'inspect.json'}: the numbers of {len(tokens):,} tokens"]
        labels = [figures.visible(text) for text in texts]
        path = target / "attention.png"
        figures.draw_weights(path, maps, labels, subtitle=subtitle, causal=causal)
        messages.append(f"wrote {path}: what each token reads, one map per head")
        for name, draw, shown, meaning, absence in (
            (
                *("half_life", figures.draw_half_lives, [x for x in maps if x.half_life is not None]),
                *("tokens until the decay halves", "the attention has no decay"),
            ),
            (
                *("rotation", figures.draw_rotations, [x for x in maps if x.rate is not None]),
                *("radians per token", "the positions have no rates that the text chooses"),
            ),
        ):
            path = target / f"{name}.png"
            if shown:
                draw(path, shown, labels, subtitle=subtitle)
            messages.append(f"wrote {path}: {meaning}" if shown else f"no {name}.png: {absence}")
    return messages
