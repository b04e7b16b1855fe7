"""Configs by name or file, with the arguments of their `get_config`."""

import dataclasses
import difflib
import inspect
import pathlib
import re
import runpy
import shlex
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any

from sympow_jax import spelling
from sympow_jax.config import fields, literals, run, serialize

# Kinds of the parameters that take any number of values, and any names.
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def load(spec: str) -> run.Config:
    """Loads a config by running its `get_config`, or from the `config.json` of a run.

    `spec` is the path of a Python file or the name of a config of the package, and optionally ":" and arguments; or the
    path of a JSON file. In `CONFIG:VALUE,key=VALUE` the values are arguments of `get_config`, in order or by name, with
    the types of its signature. A value with commas is quoted, as in `CONFIG:"a,b",key="64,128"`.

    Raises:
        ValueError: there is no such config, it fails, or it does not have these arguments or return a `Config`.
    """
    name, colon, text = spec.partition(":")
    configs = _package_configs()
    path = configs.get(name) if not pathlib.Path(name).is_file() else None
    path = path or pathlib.Path(name)
    if (path / "config.json").is_file():
        raise ValueError(
            f"--config names the folder {name!r}; --config={path / 'config.json'} resumes its run"
        )
    if not path.is_file():
        near = ", ".join(difflib.get_close_matches(path.stem, configs, n=3, cutoff=0))
        what = "is a folder" if name and path.is_dir() else "is neither a file nor a config of the package"
        raise ValueError(f"--config names {name!r}, which {what}; the nearest names are {near}")
    if path.suffix == ".json":
        if colon:
            raise ValueError(f"--config names {name!r}, which takes no arguments; remove {colon + text!r}")
        return read(path)
    try:
        get_config = runpy.run_path(str(path)).get("get_config")
        if not callable(get_config):
            raise ValueError(f"{path} has no function get_config; it must have one that returns a Config")
        arguments = _bind(name, get_config, text if colon else None)
        loaded = get_config(*arguments.args, **arguments.kwargs)
    except (Exception, SystemExit) as error:  # any error of the user's file
        frames = traceback.extract_tb(error.__traceback__)
        # An error of this package, or of one of its configs, names what is wrong.
        file = pathlib.Path(frames[-1].filename).resolve()
        ours = file.is_relative_to(pathlib.Path(__file__).resolve().parents[1])
        if isinstance(error, ValueError) and (ours or file in map(pathlib.Path.resolve, configs.values())):
            raise
        lines = [f" in line {frame.lineno}" for frame in frames if frame.filename == str(path)]
        raise ValueError(
            f"--config {spec!r} failed{lines[-1] if lines else ''} with {type(error).__name__}: {error}"
        ) from error
    if not isinstance(loaded, run.Config):
        raise ValueError(f"get_config of {name!r} returned {type(loaded).__name__}; it must return a Config")
    return loaded


def read(path: pathlib.Path) -> run.Config:
    """Returns the config in the `config.json` of a run; raises ValueError for another file, OSError for none."""
    found = serialize.read_object(path)
    try:
        return serialize.from_dict(run.Config, found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def is_remote(path: str) -> bool:
    """Returns whether a path of data is a URL on another host, or one that may lead to one."""
    return re.search(":(//|:)", path.removeprefix("file://")) is not None


def require_named(config: run.Config, named: Collection[str], source: str) -> None:
    """Raises ValueError if data of settings from a file, `source`, is on another host, unless the user named it again.

    `named` are the settings that were given on the command line, such as "data.paths".
    """
    for path in ("data.paths", "data.heldout_paths", "data.tokenizer"):
        value = getattr(config.data, path.removeprefix("data."))
        places = (value,) if isinstance(value, str) else value or ()
        if path not in named and any(map(is_remote, places)):
            raise ValueError(
                f"{path} of {source} is {spelling.shown(literals.written(value))}, on another host; if you trust it, "
                f"name it again with --config.{path}"
            )


def _package_configs() -> dict[str, pathlib.Path]:
    """Returns the files of the configs that come with the package, by name."""
    package = pathlib.Path(__file__).parents[1]
    # A wheel has the folder inside the package, a checkout next to it.
    folder = next(path for path in (package / "configs", package.parent / "configs") if path.is_dir())
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def describe_configs() -> dict[str, str]:
    """Returns the summary of each config of the package, by its name with all arguments and their defaults."""
    summaries = {}
    for name, path in _package_configs().items():
        namespace = runpy.run_path(str(path))
        parameters = inspect.signature(namespace["get_config"]).parameters.values()
        arguments = ",".join(str(x.replace(annotation=x.empty)).replace("'", "") for x in parameters)
        summaries[f"{name}:{arguments}"] = f"{namespace['__doc__'].partition(':')[0]}."
    return summaries


def _bind(name: str, get_config: Callable, text: str | None) -> inspect.BoundArguments:
    """Returns the arguments of `get_config` in a text that is separated by commas; None for no text."""
    parts: list[str] = []
    if text is not None:
        # Split at the commas outside quotes, which are left out.
        pieces = shlex.shlex(text, posix=True)
        pieces.whitespace, pieces.whitespace_split, pieces.commenters, pieces.escape = ",", True, "", ""
        try:
            parts = list(pieces) or [""]
        except ValueError:  # a quote without another one is text
            parts = text.split(",")
    signature = inspect.signature(get_config, eval_str=True)
    parameters = signature.parameters.values()
    kinds = {x.kind for x in parameters}
    keys = [x.name for x in parameters if x.kind not in _ANY]
    # As in "preset, *paths".
    listed = ", ".join(str(x.replace(annotation=x.empty, default=x.empty)) for x in parameters)
    usage = f"the arguments of config {name!r} are {listed}" if listed else f"config {name!r} has none"
    positional: list[str] = []
    named: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        key = key.strip().replace("-", "_")
        known = key in keys or inspect.Parameter.VAR_KEYWORD in kinds
        # A function that takes any number of values may be given some that contain "=".
        if not equals or (inspect.Parameter.VAR_POSITIONAL in kinds and not known):
            positional.append(part)
        elif not known:
            remedy = spelling.remedy(key, keys, otherwise=usage)
            raise ValueError(f"config {name!r} has no argument {key!r}; {remedy}")
        elif key in named:
            raise ValueError(f"config {name!r} is given argument {key!r} twice")
        else:
            named[key] = value
    try:
        arguments = signature.bind(*positional, **named)
    except TypeError as error:
        spec = f"{name}:{','.join(parts)}" if parts else name
        quotes = "; put quotes around a value that has commas" if positional and named else ""
        raise ValueError(f"--config {spec!r}: {error}; {usage}{quotes}") from error

    def read(key: str, given: Any, annotation: Any) -> Any:
        if isinstance(given, dict):
            return {x: read(x, text, annotation) for x, text in given.items()}
        if isinstance(given, tuple):
            return tuple(read(key, text, annotation) for text in given)
        if annotation is inspect.Parameter.empty:
            return given
        return literals.read(f"argument {key!r} of config {name!r}", given, annotation)

    for key, given in arguments.arguments.items():
        arguments.arguments[key] = read(key, given, signature.parameters[key].annotation)
    return arguments


def override(base: run.Config, texts: Mapping[str, str]) -> run.Config:
    """Replaces fields by dotted path, e.g. {"model.layers": "4"}, with values as `literals.read` reads them.

    Raises:
        ValueError: a field is unknown, a value has the wrong type, or settings contradict each other.
    """
    settings = {setting.path: setting for group in fields.groups(run.Config) for setting in group.settings}
    changes = {}
    for path, text in texts.items():
        if path not in settings:
            raise ValueError(unknown_setting(path))
        changes[path] = literals.read(f"--config.{path}", text, settings[path].annotation)
    try:
        return replace(base, changes)
    except ValueError as error:
        raise ValueError(spelling.cut(str(error), spelling.LINE)) from error


# Names in other codebases, of settings whose names here are not similar.
_SYNONYMS = {
    "model.layers": ("n_layer", "n_layers", "num_layers", "depth"),
    "model.width": ("d_model", "dim", "embed_dim", "hidden_size", "n_embd"),
    "model.heads": ("n_head", "n_heads", "num_heads"),
    "data.context_length": ("block_size", "seq_len", "seq_length", "sequence_length", "max_seq_len"),
    "data.batch_tokens": ("batch", "batch_size", "micro_batch_size"),
    "optimizer.learning_rate": ("lr", "max_lr"),
    "optimizer.weight_decay": ("wd",),
    "optimizer.clip_norm": ("grad_clip", "gradient_clip", "max_grad_norm"),
    "optimizer.b1": ("beta1",),
    "optimizer.b2": ("beta2",),
    "optimizer.accumulate": ("grad_accum", "gradient_accumulation_steps"),
    "training.steps": ("max_iters", "max_steps", "num_steps", "train_steps"),
}


def nearest_setting(path: str) -> str | None:
    """Returns the setting that is most similar to one that does not exist, or None if none is similar."""
    names = {
        setting.path: setting.path.rpartition(".")[2]
        for group in fields.groups(run.Config)
        for setting in group.settings
    }
    name = path.rpartition(".")[2]
    if synonym := next((known for known, others in _SYNONYMS.items() if name in others), None):
        return synonym
    if (dotted := name.replace("_", ".", 1)) in names:  # such as `model_width`
        return dotted
    if any(known.startswith(f"{path}.") for known in names):  # a group
        return None
    # Not by the whole path, of which the group would be most.
    near = spelling.nearest(name, names.values())
    return spelling.nearest(path, [known for known in names if names[known] == near], similarity=0)


def unknown_setting(path: str) -> str:
    """Returns the error message for a setting that does not exist."""
    near = nearest_setting(path)
    remedy = f"did you mean --config.{near}?" if near else "see --help for all"
    return f"there is no setting --config.{spelling.cut(path, 80)}; {remedy}"


def replace(node: Any, changes: Mapping[str, Any]) -> Any:
    """Returns settings with other values by dotted path; a dataclass that has several is built once with all."""
    own: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        name, _, rest = path.partition(".")
        if rest:
            below.setdefault(name, {})[rest] = value
        else:
            own[name] = value
    own |= {name: replace(getattr(node, name), inner) for name, inner in below.items()}
    return dataclasses.replace(node, **own)
