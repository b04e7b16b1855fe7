"""Runs of experiments: trained with the settings of a scale, in folders from which they are resumed and reused."""

import dataclasses
import itertools
import json
import math
import pathlib
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int32

from experiments._shared.options import Options, power_label
from experiments._shared.statistics import means
from sympow_jax import config, loop, models, training
from sympow_jax.config import loading
from sympow_jax.config import task as task_lib
from sympow_jax.process import atomic, compile_cache, streams, workdir
from sympow_jax.training import sharding

# Folders of runs by variant, training context and seed.
Folders = dict[tuple[str, int, int], pathlib.Path]

# Tokens per update; small, so that many updates fit into fifteen minutes.
_TOY_TOKENS = 2048
# Points of a training curve.
_POINTS = 25
# The smallest model, for tests.
_TINY = config.ModelConfig(vocab_size=256, layers=1, width=16, heads=2, dtype="float32")


def train(
    options: Options,
    attentions: Mapping[str, config.AttentionConfig],
    label: Callable[[str], str] | None = None,
    change: Callable[[config.Config, str], config.Config] = lambda found, variant: found,
) -> Folders:
    """Trains every variant at every context of the plan with every seed; returns the folders of the runs.

    Args:
        options: of the experiment.
        attentions: attention of each variant.
        label: maps a variant to its name in folders, which is the same in every experiment that uses its runs; by
            default `power_label`.
        change: maps the `settings` of a run and its variant to those it is trained with.

    Raises:
        ValueError: as `settings` and `train_all`.
    """
    plan, runs = options.plan, {}
    for seed, context, variant in itertools.product(plan.seeds, plan.contexts, options.variants):
        name = label(variant) if label else power_label(variant, options.power)
        name = f"{name.replace(' ', '_')}_context{context}_steps{plan.steps}_seed{seed}"
        found = settings(options, attentions[variant], context=context, seed=seed)
        runs[variant, context, seed] = name, change(found, variant)
    return train_all(options, runs)


def settings(
    options: Options, attention: config.AttentionConfig, *, context: int, seed: int
) -> config.Config:
    """Returns the config of a run with this attention at a training context.

    The run ends with an evaluation at the plan's lengths, if there are any. The toy scale uses the byte model and the
    optimizer of `configs/quickstart.py`. The seed determines parameters and the order of the data in the same way for
    every attention.

    Raises:
        ValueError: the settings contradict each other.
    """
    plan = options.plan
    base = config.load("quickstart:softmax" if options.scale != "paper" else options.paper)
    changed: dict[str, Any] = {
        "model": dataclasses.replace(_TINY if options.scale == "tiny" else base.model, attention=attention),
        "data.paths": options.data,
        "data.heldout_paths": options.heldout,
        "data.context_length": context,
        "data.seed": seed,
        "training.seed": seed,
        "training.steps": plan.steps,
        "evaluation": config.EvaluationConfig(context_lengths=plan.lengths, documents=plan.documents),
    }
    if options.scale != "paper":
        changed["data.batch_tokens"] = _TOY_TOKENS if options.scale == "toy" else 2 * context
        changed |= {
            "training.checkpoint_every": 100,
            "training.keep_checkpoints": 1,
            "training.log_every": 100,
        }
    return loading.replace(base, changed)


def stage(
    options: Options, base: config.Config, *, rate: float, warmup: int, steps: int, seed: int, **training: int
) -> config.Config:
    """Returns settings with the optimizer, length, seed and evaluation of one stage of a retrofit.

    Learning rates rise over `warmup` steps, or over half of the run if it is shorter. `training` are further settings
    of that group.
    """
    lengths = () if base.task.replaces_attention else options.plan.lengths
    optimizer: dict[str, Any] = {
        "learning_rate": rate,
        "schedule": "cosine",
        "warmup_steps": min(warmup, steps // 2),
    }
    training |= {"steps": steps, "seed": seed, "keep_checkpoints": 1}
    changes = {
        "optimizer": config.OptimizerConfig(**optimizer, clip_norm=1.0),
        "evaluation": config.EvaluationConfig(context_lengths=lengths, documents=options.plan.documents),
        "data.seed": seed,
    }
    return loading.replace(base, changes | {f"training.{name}": value for name, value in training.items()})


def train_all[Key](
    options: Options, runs: Mapping[Key, tuple[str, config.Config]]
) -> dict[Key, pathlib.Path]:
    """Trains and evaluates every run in a folder of its name below `options.runs`; returns the folders.

    A finished run is not repeated, and a stopped one is resumed. Ctrl-C saves the current run and ends the program.

    Raises:
        ValueError: `loop.train` raised it, or the folders have runs on different data.
    """
    # Runs with different seeds compile the same programs.
    compile_cache.cache_programs()
    folders = {key: options.runs / name for key, (name, _) in runs.items()}
    for number, (folder, (_, wanted)) in enumerate(zip(folders.values(), runs.values()), start=1):
        done = _is_done(folder, wanted)
        streams.say(f"run {number} of {len(runs)}: {folder.name}{', done before' if done else ''}")
        if not done and (code := loop.train(wanted, folder)):
            raise SystemExit(code)
    require_same_data(options, list(folders.values()))
    return folders


def require_same_data(options: Options, folders: Sequence[pathlib.Path]) -> None:
    """Raises ValueError if the runs in these folders were trained on different data."""
    if len({workdir.read_description(folder)["digest"] for folder in folders}) > 1:
        raise ValueError(f"the runs in {options.runs} were trained on different data; use another --out")


def _is_done(folder: pathlib.Path, wanted: config.Config) -> bool:
    """Returns whether a run has ended with these settings, and was evaluated as wanted if it is to be evaluated."""
    lengths = wanted.evaluation.context_lengths
    if not (folder / workdir.CHECKPOINTS / str(wanted.training.steps)).is_dir():
        return False
    found = workdir.read_config(folder)
    if not lengths:
        return dataclasses.replace(found, evaluation=wanted.evaluation) == wanted
    path = folder / "context_loss.json"
    return (
        found == wanted
        and path.is_file()
        and tuple(x["context_length"] for x in evaluation(folder)) == lengths
    )


def evaluation(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Reads an evaluated run's held-out loss by position (rows of `sympow_jax.evaluation.Row`)."""
    return json.loads((folder / "context_loss.json").read_text())["rows"]


def _metrics(folder: pathlib.Path) -> list[dict[str, Any]]:
    with (folder / "metrics.jsonl").open() as file:
        return [json.loads(line) for line in file]


def _losses(folder: pathlib.Path) -> Float[np.ndarray, " steps"]:
    # Updates that were skipped because of their loss have none.
    return np.array([values.get("loss", math.nan) for values in _metrics(folder)])


def curve(folder: pathlib.Path) -> list[tuple[int, float]]:
    """Returns at most 25 points of the training loss: updates, and the mean loss since the point before."""
    losses = _losses(folder)
    parts = np.array_split(np.arange(len(losses)), min(_POINTS, len(losses)))
    return [(int(part[-1]) + 1, float(losses[part].mean())) for part in parts]


def heldout_curve(folder: pathlib.Path) -> list[tuple[int, float]]:
    """Returns the held-out losses during training: updates, and the loss of a batch that is always the same."""
    return [
        (values["step"], values["heldout_loss"]) for values in _metrics(folder) if "heldout_loss" in values
    ]


def curve_rows(
    folders: Mapping[Any, pathlib.Path],
    names: Sequence[str],
    points: Callable[[pathlib.Path], list[tuple[int, float]]] = curve,
) -> list[dict[str, Any]]:
    """Returns a row for each point of a curve of each run; `names` are the columns of what keys a folder."""
    return [
        dict(zip(names, key)) | {"step": step, "loss": loss}
        for key, folder in folders.items()
        for step, loss in points(folder)
    ]


def mean_curves(folders: Folders) -> list[dict[str, Any]]:
    """Returns rows of the training curves: the mean loss over seeds and its error, by variant, context and step."""
    columns = ("variant", "context", "step")
    found = means(curve_rows(folders, ("variant", "context", "seed")), columns, "loss")
    return [dict(zip(columns, key)) | {"loss": x.value, "error": x.error} for key, x in found.items()]


def final_loss(folder: pathlib.Path) -> float:
    """Returns the mean training loss over the last tenth of the updates, as the papers' figures are read."""
    losses = _losses(folder)
    return float(losses[-max(1, len(losses) // 10) :].mean())


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


def update(wanted: config.Config) -> Callable[[], None]:
    """Returns a function that makes one update of a decoder or an encoder of masked tokens on random tokens."""
    mesh = sharding.make_mesh(wanted)
    program = training.Program(wanted, mesh)
    state = program.init_state()
    batch = sharding.place_batch(random_batch(wanted), mesh)

    def call() -> None:
        nonlocal state
        state, metrics = program.update(state, batch)
        jax.block_until_ready(metrics)

    return call


def random_batch(wanted: config.Config) -> dict[str, Int32[np.ndarray, "B T"]]:
    """Returns inputs and targets of random tokens; those of a masked task are masked as in training."""
    rng, vocab_size, task = np.random.default_rng(0), wanted.model.vocab_size, wanted.task
    shape = wanted.data.batch_size, wanted.data.context_length + 1
    tokens = rng.integers(vocab_size, size=shape, dtype=np.int32)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if task.is_language_model:
        return {"inputs": inputs, "targets": targets}
    masked = rng.random(targets.shape) < task_lib.MASK_FRACTION
    mask_token = vocab_size - 1 if task.mask_token is None else task.mask_token
    return {"inputs": np.where(masked, mask_token, targets), "targets": np.where(masked, targets, -1)}


def alternate(calls: Mapping[str, Callable[[], None]], *, rounds: int) -> dict[str, list[float]]:
    """Measures the seconds of every call in each round, after one warm-up call; a call must block until done.

    Calls take turns, so that other load on the machine affects all of them.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for number in range(rounds):
        # The order alternates, so that no call always follows the slowest one.
        for name in list(calls) if number % 2 == 0 else reversed(list(calls)):
            began = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - began)
    return times


def relative(seconds: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Returns the quartiles over rounds of the ratio of one call's seconds to another's in the same round."""
    low, middle, high = np.percentile(np.array(seconds) / np.array(base), (25, 50, 75))
    return float(low), float(middle), float(high)


def save_arrays(path: pathlib.Path, state: Any, about: Mapping[str, Any]) -> None:
    """Saves the arrays of a training's state to an npz file, with JSON that describes them."""
    with atomic.replace(path) as draft:
        np.savez(draft, *jax.tree.leaves(state), about=json.dumps(about))


def restore_arrays(path: pathlib.Path, state: Any, about: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Returns what `save_arrays` saved of the training that `about` describes, among other things.

    This is the JSON, and arrays in the structure of `state`. If there is no file, or its JSON does not contain `about`,
    the JSON returned is empty, and the state as it was.

    Raises:
        ValueError: the file is damaged, or its arrays have other shapes or dtypes.
    """
    if not path.exists():
        return {}, state
    leaves, tree = jax.tree.flatten(state)
    try:
        with np.load(path) as file:
            before = json.loads(str(file["about"]))
            saved = [file[f"arr_{index}"] for index in range(len(leaves))]
    except (zipfile.BadZipFile, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a saved training or is damaged; delete it, or use another --out"
        ) from error
    kinds = [[(x.shape, x.dtype) for x in arrays] for arrays in (leaves, saved)]
    if kinds[0] != kinds[1] or not isinstance(before, dict):
        raise ValueError(f"{path} has the arrays of another training; delete it, or use another --out")
    if before | json.loads(json.dumps(about)) != before:
        return {}, state
    return before, jax.tree.unflatten(tree, [jnp.asarray(x) for x in saved])
