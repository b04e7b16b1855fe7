"""Lines that tell what a run will do, before it does it, and where its results are at the end."""

import collections
import functools
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from sympow_jax import config as config_lib
from sympow_jax.layers.attention import kernels
from sympow_jax.training import program as programs
from sympow_jax.training import sharding, workdir

__all__ = ["describe", "memory", "next_command", "results"]

# Scopes that the ops are traced in, named by form and implementation.
_SCOPE = re.compile(r"\b(attention|chunked|recurrent|softmax|expressive)_(reference|xla|mosaic_gpu|cudnn)\b")
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
# Files that an evaluation writes, with what they are.
_RESULTS = (
    ("table", "context_loss.csv"),
    ("plot", "context_loss.png"),
    ("table", "heldout.json"),
)


def describe(
    program: programs.Program, traced: jax.stages.Traced, data: Mapping[str, Any], folder: pathlib.Path
) -> list[str]:
    """Returns a line for each fact of a run: model, attention, state, data, batch, devices, results.

    Args:
        program: program of the run.
        traced: its update, traced; the form and implementation of attention are read from it.
        data: result of `data.describe`.
        folder: workdir of the run.
    """
    config, mesh = program.config, program.mesh
    model, rows = config.model, config.data.batch_size
    parameters = sum(leaf.size for leaf in jax.tree.leaves(program.params))
    accumulated = f", {config.optimizer.accumulate} micro-batches" if config.optimizer.accumulate > 1 else ""
    return [
        f"model: {config_lib.preset_name(model.attention)}, {_layers(model.layers)} of width {model.width}, "
        f"{parameters:,} parameters, {model.dtype}",
        *_attention(program, traced),
        *([_decoding(program)] if config.task.name == "next_token" else []),
        _data(config, data),
        f"batch: {config.data.batch_tokens:,} tokens a step, {rows} rows of {config.data.context_length:,}"
        f"{accumulated}",
        f"devices: {sharding.describe(mesh)}",
        f"results: {folder}, with a checkpoint every {config.training.checkpoint_every:,} steps",
        f"metrics: tensorboard --logdir={folder}",
    ]


def _attention(program: programs.Program, traced: jax.stages.Traced) -> Iterator[str]:
    """Yields lines with form and implementation of attention, and the reasons against others."""
    scopes = set(_SCOPE.findall(traced.jaxpr.jaxpr.pretty_print(name_stack=True, use_color=False)))
    used = ", ".join(f"{form} by {implementation}" for form, implementation in sorted(scopes))
    rows = program.config.data.batch_size // program.config.optimizer.accumulate
    shape = rows, program.config.data.context_length
    for kernel, layers in collections.Counter(program.kernels).items():
        yield f"attention of {_layers(layers)}: {used or kernel.attention.kernel}"
        reasons = collections.defaultdict(list)
        for choice, reason in kernel.explain(*shape):
            reasons[reason].append(choice)
        for reason, choices in reasons.items():
            yield f"  not {', '.join(choices)}: {reason}"


def _decoding(program: programs.Program) -> str:
    """Returns a line with the memory between generated tokens."""
    state = token = longest = 0
    for kernel in program.kernels:
        if kernel.cache_policy is not kernels.CachePolicy.ALWAYS:
            try:
                state += _nbytes(kernel.init_state, 1)
            except ValueError:  # it exceeds the device's memory, but training may not need it
                state += kernel.state_bytes()
        if kernel.cache_policy is not kernels.CachePolicy.NEVER:
            token += _nbytes(kernel.init_cache, 1, 2) - _nbytes(kernel.init_cache, 1, 1)
            longest = kernel.max_cache_length or 0
    if not state:
        return f"KV cache while generating: {_size(token)} a token and row"
    before = f"; for up to {longest:,} tokens a KV cache of {_size(token)} a token" if token else ""
    return f"state while generating: {_size(state)} a row, at any length{before}"


def _nbytes(make: Callable[..., Any], *arguments: int) -> int:
    made = jax.eval_shape(functools.partial(make, *arguments))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made))


def _data(config: config_lib.Config, data: Mapping[str, Any]) -> str:
    unit = "tokens" if "tokens" in data else "examples"
    heldout = data[f"heldout_{unit}"]
    kept = f"{heldout:,} held out" if heldout else "nothing held out"
    kept += f" ({data['heldout_note']})" if "heldout_note" in data else ""
    return f"data: {config.data.source}, {data[unit]:,} {unit} to train on, {kept}"


def memory(program: programs.Program, compiled: jax.stages.Compiled) -> str:
    """Returns a line with the memory of an update on a device, according to the compiler."""
    held = f"{_size(sharding.bytes_per_device(program.abstract))} for parameters and optimizer state"
    found: Any = compiled.memory_analysis()
    if found is None:
        return f"memory of a device: {held}"
    total = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    total += found.temp_size_in_bytes
    (device, *_) = program.mesh.local_devices
    limit = (device.memory_stats() or {}).get("bytes_limit")
    available = f" of {_size(limit)}" if limit else ""
    return f"memory of a device: {_size(total)}{available} in an update, {held}"


def results(folder: pathlib.Path) -> list[str]:
    """Returns a line for each result of a run: its table, plot, and newest checkpoint."""
    found = [f"{what}: {folder / name}" for what, name in _RESULTS if (folder / name).is_file()]
    newest = workdir.checkpoint_steps(folder)[-1]
    return [*found, f"checkpoint: {folder / workdir.CHECKPOINTS / str(newest)}"]


def next_command(config: config_lib.Config, folder: pathlib.Path, program: str) -> str:
    """Returns a line with a command to try on a trained run.

    Args:
        config: config of the run.
        folder: workdir of the run.
        program: name of the program that trained it, `train.py` or `sympow train`.
    """
    script = program.endswith(".py")
    tokenizer = "" if config.data.source in ("text", "tsv") else " --tokenizer=FILE"
    if config.task.name == "next_token":
        name = "uv run generate.py" if script else "sympow generate"
        # Without paths, the text is Python's standard library.
        prompt = "The " if config.data.paths else "def "
        return f'next: {name} --workdir={folder} --prompt="{prompt}"{tokenizer}'
    if config.model.patch_size is None:
        name = "uv run sympow inspect" if script else "sympow inspect"
        return f'next: {name} --workdir={folder} --text="The"{tokenizer}'
    name = "uv run eval.py" if script else "sympow eval"
    return f"next: {name} --workdir={folder} --out={folder}"


def _layers(count: int) -> str:
    return f"{count} layer{'s' if count > 1 else ''}"


def _size(nbytes: float) -> str:
    return next((f"{nbytes / unit:.3g} {name}" for unit, name in _UNITS if nbytes >= unit), f"{nbytes} bytes")
