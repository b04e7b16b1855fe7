"""Trains runs with the settings of each scale, in folders from which runs are resumed and reused."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float

from experiments import _command
from sympow_jax import config, models
from sympow_jax.commands import train
from sympow_jax.training import workdir

__all__ = [
    "curve",
    "evaluation",
    "final_loss",
    "labeled",
    "name",
    "parameters",
    "power_variants",
    "settings",
    "thinned",
    "train_all",
]

# Tokens per update; small, so that many updates fit into fifteen minutes.
_TOY_TOKENS = 2048
_POINTS = 25
# The smallest model, for tests.
_TINY = config.ModelConfig(vocab_size=256, layers=1, width=16, heads=2, dtype="float32")


def power_variants(power: int) -> dict[str, config.AttentionConfig]:
    """Returns softmax and the symmetric-power variants of the conformal paper."""
    presets = {"sympow": "sympow", "gated": "sympow_gated", "conformal": "conformal"}
    return {
        "softmax": config.preset("softmax"),
        **{name: config.preset(preset, power=power) for name, preset in presets.items()},
    }


def labeled(variant: str, power: int) -> str:
    """Returns the variant's name with its power; softmax has no power."""
    return variant if variant == "softmax" else f"{variant}_p{power}"


def name(variant: str, context: int, steps: int, seed: int) -> str:
    """Returns the name of a run's folder, which is the same in every experiment that uses this run."""
    return f"{variant.replace(' ', '_')}_context{context}_steps{steps}_seed{seed}"


def settings(
    options: _command.Options,
    attention: config.AttentionConfig,
    *,
    context: int,
    seed: int,
    evaluated: bool = False,
    paper: str = "gpt2_124m:softmax",
) -> config.Config:
    """Returns the config of a run with this attention at a training context.

    If `evaluated` is set, the run ends with an evaluation at the plan's lengths. The toy scale uses the byte model and
    the optimizer of `configs/quickstart.py`; `paper` names the config for the paper's scale. The seed
    determines parameters and the order of the data in the same way for every attention.

    Raises:
      ValueError: The settings contradict each other.
    """
    plan = options.plan
    toy = options.scale != "paper"
    base = config.load("quickstart:softmax" if toy else paper)
    training = base.training
    tokens = base.data.batch_tokens
    if toy:
        tokens = _TOY_TOKENS if options.scale == "toy" else 2 * context
        training = dataclasses.replace(training, checkpoint_every=100, keep_checkpoints=1, log_every=100)
    shape = _TINY if options.scale == "tiny" else base.model
    return dataclasses.replace(
        base,
        model=dataclasses.replace(shape, attention=attention),
        data=dataclasses.replace(
            base.data,
            paths=options.data,
            heldout_paths=options.heldout,
            context_length=context,
            batch_tokens=tokens,
            seed=seed,
        ),
        training=dataclasses.replace(training, steps=plan.steps, seed=seed),
        evaluation=config.EvaluationConfig(
            context_lengths=plan.lengths if evaluated else (), documents=plan.documents
        ),
    )


def train_all(options: _command.Options, runs: Mapping[str, config.Config]) -> dict[str, pathlib.Path]:
    """Trains and evaluates every run in a folder of its name below `options.runs`; returns the folders.

    A finished run is not repeated, and a stopped one is resumed. Ctrl-C saves the current run and ends the program.

    Raises:
      ValueError: `train.train` raised it, or the folders have runs on different data.
    """
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]  # a flag that JAX defines
        # Runs with different seeds compile the same programs.
        jax.config.update("jax_compilation_cache_dir", str(options.runs / "compilation_cache"))
    folders = {}
    for number, (name, wanted) in enumerate(runs.items(), start=1):
        folder = folders[name] = options.runs / name
        done = _is_done(folder, wanted)
        print(f"run {number} of {len(runs)}: {name}{', done before' if done else ''}", flush=True)
        if not done and (code := train.train(wanted, folder)):
            raise SystemExit(code)
    digests = {_read_json(folder / "data.json")["digest"] for folder in folders.values()}
    if len(digests) > 1:
        raise ValueError(f"the runs in {options.runs} were trained on different data; use another --out")
    return folders


def model(size: str, attention: config.AttentionConfig) -> config.ModelConfig:
    """Returns the config of a model of one of `config.MODEL_SIZES` with this attention."""
    sizes: Any = config.MODEL_SIZES[size]
    return config.ModelConfig(**sizes, attention=attention)


def parameters(shape: config.ModelConfig) -> int:
    """Counts a model's parameters without allocating anything."""

    def count(layers: int) -> int:
        smaller = dataclasses.replace(shape, layers=layers)
        abstract = nnx.eval_shape(lambda: models.DecoderLM(smaller, rngs=nnx.Rngs(0)))
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract, nnx.Param)))

    # All layers have the same parameters, and many layers take long to trace.
    return count(1) + (shape.layers - 1) * (count(2) - count(1))


def curve(folder: pathlib.Path) -> Float[np.ndarray, " steps"]:
    """Reads the training loss of every update, in nats per token."""
    with (folder / "metrics.jsonl").open() as file:
        return np.array([json.loads(line)["loss"] for line in file])


def thinned(losses: Float[np.ndarray, " steps"]) -> list[tuple[int, float]]:
    """Reduces a curve to at most 25 points, each an update and the mean loss since the previous point."""
    parts = np.array_split(np.arange(len(losses)), min(_POINTS, len(losses)))
    return [(int(part[-1]) + 1, float(losses[part].mean())) for part in parts]


def final_loss(folder: pathlib.Path) -> float:
    """Returns the mean training loss over the last tenth of the updates, as the papers' figures are read."""
    losses = curve(folder)
    return float(losses[-max(1, len(losses) // 10) :].mean())


def evaluation(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Reads an evaluated run's held-out loss by position (rows of `sympow_jax.evaluation.Row`)."""
    return _read_json(folder / "context_loss.json")["rows"]


def _is_done(folder: pathlib.Path, wanted: config.Config) -> bool:
    steps, lengths = wanted.training.steps, wanted.evaluation.context_lengths
    if not (folder / workdir.CHECKPOINTS / str(steps)).is_dir():
        return False
    found = workdir.read_config(folder)
    if dataclasses.replace(found, evaluation=wanted.evaluation) != wanted:
        return False  # train.train then raises an error that lists the differences
    evaluated = folder / "context_loss.json"
    if not lengths:
        return True
    return (
        found.evaluation == wanted.evaluation
        and evaluated.is_file()
        and tuple(row["context_length"] for row in evaluation(folder)) == lengths
    )


def _read_json(path: pathlib.Path) -> Any:
    return json.loads(path.read_text())
