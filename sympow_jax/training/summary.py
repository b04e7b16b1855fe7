"""Lines that tell what a run will do, before it does it, and where its results are at the end."""

import collections
import dataclasses
import functools
import math
import pathlib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from sympow_jax import config as config_lib
from sympow_jax.config import effects
from sympow_jax.layers import partitioning
from sympow_jax.layers.attention import kernels
from sympow_jax.process import workdir
from sympow_jax.training import program as programs
from sympow_jax.training import sharding

# Scopes that the ops are traced in, named by form and implementation.
_SCOPE = re.compile(r"\b(attention|chunked|recurrent|softmax|expressive)_(reference|xla|mosaic_gpu|cudnn)\b")
_UNITS = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
# Fraction of a unit that has three digits in the unit below, 999, instead of rounding to 1000.
_LEAST = 0.9995


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
    warmup, steps = config.optimizer.warmup_steps, config.training.steps
    late = f"the run ends after {steps:,} of {warmup:,} updates of warmup; lower optimizer.warmup_steps"
    first, *_ = config.training.profile_steps or (0,)
    unread = effects.without_effect(config)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(program.abstract.params))
    accumulated = f", {config.optimizer.accumulate} micro-batches" if config.optimizer.accumulate > 1 else ""
    return [
        f"model: {model.attention_name}, {_layers(model.layers)} of width {model.width}, "
        f"{parameters:,} parameters, {model.dtype}",
        *_attention(program, traced),
        *([_decoding(program)] if config.task.is_language_model else []),
        *_data(config, data, mesh),
        f"batch: {config.data.batch_tokens:,} tokens per step, {rows} rows of {config.data.context_length:,}"
        f"{accumulated}",
        *([f"warning: {late}"] if warmup > steps else []),
        *(
            [f"warning: training.profile_steps begins at {first:,}, after the last step"]
            if first > steps
            else []
        ),
        *([f"no effect in this run: {', '.join(unread)}"] if unread else []),
        f"devices: {sharding.describe(mesh)}",
        f"results: {folder}, with a checkpoint every {config.training.checkpoint_every:,} steps",
        f"metrics: tensorboard --logdir={folder}",
    ]


def _attention(program: programs.Program, traced: jax.stages.Traced) -> Iterator[str]:
    """Yields lines with form and implementation of attention, and the reasons against others."""
    scopes = set(_SCOPE.findall(traced.jaxpr.jaxpr.pretty_print(name_stack=True, use_color=False)))
    used = ", ".join(f"{form} by {implementation}" for form, implementation in sorted(scopes))
    config, sizes = program.config, program.mesh.shape
    names = sorted({kernel.attention.kernel for kernel in program.kernels})
    yield f"attention of {_layers(config.model.layers)}: {used or ', '.join(names)}"
    if sizes[partitioning.CONTEXT] > 1:
        return  # reasons of a call on shards of time are known only within it
    # The layer calls the op on shards of rows and heads.
    rows = config.data.batch_size // config.optimizer.accumulate
    rows //= math.prod(sizes[axis] for axis in partitioning.BATCH)
    tensor = sizes[partitioning.TENSOR]
    on_gpu = program.mesh.devices.flat[0].platform == "gpu"
    reasons: dict[str, list[str]] = collections.defaultdict(list)
    for kernel in dict.fromkeys(program.kernels):
        heads = {"num_heads": kernel.num_heads // tensor, "num_kv_heads": kernel.num_kv_heads // tensor}
        for candidate in dataclasses.replace(kernel, **heads).explain(rows, config.data.context_length):
            # Elsewhere than on GPUs, their kernels are no news.
            if candidate.reason and (on_gpu or candidate.implementation != "mosaic_gpu"):
                reasons[candidate.reason].append(str(candidate))
    for reason, choices in reasons.items():
        yield f"  not {', '.join(choices)}: {reason}"


def _decoding(program: programs.Program) -> str:
    """Returns a line with the memory between generated tokens."""

    def token_bytes(kernel):
        return _nbytes(kernel.init_cache, 1, 2) - _nbytes(kernel.init_cache, 1, 1)

    # Bytes of states, of a token in caches that states replace, and of a token in caches that are always kept.
    state = replaced = kept = 0
    lengths = set()
    windows = [kernel.window_kernel for kernel in program.kernels if kernel.window_kernel is not None]
    for kernel in (*program.kernels, *windows):
        if kernel.cache_limit is not None:
            # Not of the whole cache: one that exceeds the device's memory is an error, and training may not need it.
            state += _nbytes(kernel.init_cache, 1, 0) + token_bytes(kernel) * kernel.cache_limit
            continue
        if kernel.cache_policy is not kernels.CachePolicy.ALWAYS:
            try:
                state += _nbytes(kernel.init_state, 1)
            except ValueError:  # as above
                alone = dataclasses.replace(kernel.attention, softmax_window=False)  # windows are in the loop
                state += dataclasses.replace(kernel, attention=alone).state_bytes()
        if kernel.cache_policy is kernels.CachePolicy.NEVER:
            continue
        token = token_bytes(kernel)
        if kernel.max_cache_length is None:
            kept += token
        else:
            replaced += token
            lengths.add(kernel.max_cache_length)
    if not state:
        return f"KV cache while generating: {_size(kept)} per token and row"
    line = f"state while generating: {_size(state)} per row, at any length"
    line += (
        f"; for up to {min(lengths):,} tokens a KV cache of {_size(replaced)} per token" if lengths else ""
    )
    return line + (f"; and a KV cache that grows by {_size(kept)} per token" if kept else "")


def _nbytes(make: Callable[..., Any], *arguments: int) -> int:
    return jax.eval_shape(functools.partial(make, *arguments)).nbytes


def _data(config: config_lib.Config, data: Mapping[str, Any], mesh: jax.sharding.Mesh) -> Iterator[str]:
    unit = "tokens" if "tokens" in data else "examples"
    heldout = data[f"heldout_{unit}"]
    kept = f"{heldout:,} held out" if heldout else "nothing held out"
    kept += f" ({data['heldout_note']})" if "heldout_note" in data else ""
    count = f"{data[unit]:,} {unit} to train on"
    count += f" ({data['tokens_note']})" if "tokens_note" in data else ""
    yield f"data: {config.data.source}, {count}, {kept}"
    batch = config.data.batch_tokens if unit == "tokens" else config.data.batch_size
    # An estimate of 0 is of an unknown number.
    if 0 < data[unit] < batch:
        yield f"warning: a batch has {batch:,} {unit}, more than there are to train on, so that it repeats them"
    if "streams" in data and data["streams"] % (shares := sharding.batch_share(mesh)[1]):
        yield (
            f"warning: {shares} processes, or groups of them that read the same rows, cannot divide the "
            f"{data['streams']} streams of the data, so that some tokenize the same documents; take a divisor of "
            f"{data['streams']}, or prepare the data by `sympow prepare`"
        )


def memory(
    program: programs.Program, update: jax.stages.Compiled, heldout: jax.stages.Compiled | None
) -> str:
    """Returns a line with the memory of training on a device, according to the compiler.

    Args:
        program: program of the run.
        update: its update, compiled.
        heldout: its `heldout_means`, compiled; None if nothing is held out.
    """
    state = bytes_per_device(program.abstract)
    held = f"{_size(state)} for parameters and optimizer state"
    total = program_bytes(update)
    if total is None:
        return f"memory of a device: {held}"
    what = "an update"
    # The optimizer state is no argument of the held-out means, but stays on the device.
    arguments = bytes_per_device((program.abstract.params, program.abstract.statistics))
    evaluation = 0 if heldout is None else (program_bytes(heldout) or 0) + state - arguments
    if heldout is not None and program.config.optimizer.name == "schedule_free":
        # Its average is computed for an evaluation.
        evaluation += bytes_per_device(program.abstract.params)
    if evaluation > total:
        total, what = evaluation, "a held-out loss"
    (device, *_) = program.mesh.local_devices
    limit = (device.memory_stats() or {}).get("bytes_limit")
    available = f" of {_size(limit)}" if limit else ""
    return f"memory of a device: {_size(total)}{available} in {what}, {held}"


def program_bytes(compiled: jax.stages.Compiled) -> int | None:
    """Returns the peak bytes of a program on each device according to the compiler, with arguments and results.

    None if the compiler does not say.
    """
    found: Any = compiled.memory_analysis()
    if found is None:
        return None
    own = found.temp_size_in_bytes + found.argument_size_in_bytes + found.output_size_in_bytes
    return own - found.alias_size_in_bytes


def bytes_per_device(state: Any) -> int:
    """Returns the bytes on each device of a tree of arrays, which may be abstract."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
    )


def results(folder: pathlib.Path, written: Mapping[str, pathlib.Path], step: int) -> list[str]:
    """Returns a line for each result of a run: the files that its evaluation wrote, and its last checkpoint."""
    found = [f"{what}: {path}" for what, path in written.items()]
    return [*found, f"checkpoint: {folder / workdir.CHECKPOINTS / str(step)}"]


def next_command(config: config_lib.Config, folder: pathlib.Path, program: str) -> str:
    """Returns a line with a command to try on a trained run.

    Args:
        config: config of the run.
        folder: workdir of the run.
        program: name of the program that trained it, `train.py` or `sympow train`.
    """
    script = program.endswith(".py")
    run = f"--workdir={shlex.quote(str(folder))}"
    unknown = config.data.source in ("tokens", "longcrawl64") and config.data.tokenizer is None
    tokenizer = " --tokenizer=FILE" if unknown else ""
    if config.task.is_language_model:
        name = "uv run generate.py" if script else "sympow generate"
        # Without paths, the text is Python's standard library.
        prompt = "The " if config.data.paths else "def "
        return f'next: {name} {run} --prompt="{prompt}"{tokenizer}'
    if config.task.replaces_attention:
        command = (
            "uv run train.py --config=configs/retrofit.py" if script else "sympow train --config=retrofit"
        )
        return f"next: {command}:{shlex.quote(str(folder))} --workdir=NEW"
    # Of other sources, no text can be read.
    if config.data.source in ("text", "tokens", "longcrawl64", "parquet", "jsonl"):
        name = "uv run sympow inspect" if script else "sympow inspect"
        return f'next: {name} {run} --text="The"{tokenizer}'
    name = "uv run eval.py" if script else "sympow eval"
    return f"next: {name} {run}"


def _layers(count: int) -> str:
    return f"{count} layer{'s' if count > 1 else ''}"


def _size(nbytes: float) -> str:
    fitting = (f"{nbytes / unit:.3g} {name}" for unit, name in _UNITS if nbytes >= _LEAST * unit)
    return next(fitting, f"{nbytes} bytes")
