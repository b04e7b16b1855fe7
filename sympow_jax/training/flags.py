"""The command line of a run: a config file, overrides of its fields and a workdir.

`--config=NAME[:ARGUMENT]` names a config of the package, and `--config=FILE.py[:ARGUMENT]` any file, whose
`get_config` returns a `config.Config`. Because it is frozen,
`--config.a.b=value` sets a field of a ConfigDict with the same fields, from which the settings are built and validated
again.
"""

import argparse
import dataclasses
import difflib
import os
import pathlib
import runpy
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_collections
from absl import flags as absl_flags
from ml_collections import config_flags

from sympow_jax import config
from sympow_jax.training import hosts

__all__ = ["load_config", "override", "parse", "read_overrides"]

_PREFIX = "--config."


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise ValueError(f"{message}; see --help")


def parse(
    arguments: Sequence[str], *, program: str = "sympow train"
) -> tuple[config.Config, pathlib.Path, hosts.Launch | None]:
    """Parses the arguments after the program's name.

    Args:
        arguments: arguments of a training run.
        program: name of the program in its help.

    Returns:
        The settings, the workdir, and the launch that connects this process with others. Without flags about
        processes, the launch is SLURM's, or None for a run of one process.

    Raises:
        ValueError: a flag or setting is unknown, a value has the wrong type, the config file does not exist, or
            settings contradict each other.
    """
    parser = _Parser(
        prog=program,
        description="Train a model; the same command again resumes the run in --workdir.",
        epilog=_describe_settings(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        required=True,
        metavar="CONFIG[:ARGUMENT]",
        help=f"a FILE.py, or one of {', '.join(_package_configs())}; ARGUMENT goes to its get_config, "
        "e.g. quickstart:sympow",
    )
    parser.add_argument(
        "--workdir",
        required=True,
        type=pathlib.Path,
        metavar="DIR",
        help="where settings, metrics and checkpoints are written",
    )
    _add_launch(parser)
    known, rest = parser.parse_known_args(arguments)
    return override(load_config(known.config), read_overrides(rest)), known.workdir, _read_launch(known)


def _add_launch(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several processes (see docs/many_hosts.md); SLURM needs none of these")
    group.add_argument("--coordinator_address", metavar="HOST:PORT", help="where process 0 listens")
    group.add_argument("--process_count", type=int, metavar="N", help="how many processes there are")
    group.add_argument("--process_id", type=int, metavar="I", help="which of them this is, from 0")
    group.add_argument(
        "--coordinator_timeout",
        type=int,
        metavar="SECONDS",
        default=hosts.TIMEOUT,
        help="end if the processes have not met by then (default: %(default)s)",
    )


def _read_launch(known: argparse.Namespace) -> hosts.Launch | None:
    names = ("coordinator_address", "process_count", "process_id")
    missing = [f"--{name}" for name in names if getattr(known, name) is None]
    if len(missing) == len(names):
        return hosts.from_slurm(os.environ, timeout=known.coordinator_timeout)
    if missing:
        raise ValueError(f"{' and '.join(missing)} must be given too; see --help")
    return hosts.Launch(
        coordinator=known.coordinator_address,
        count=known.process_count,
        index=known.process_id,
        timeout=known.coordinator_timeout,
    )


def load_config(spec: str) -> config.Config:
    """Loads a config by running its `get_config`.

    Args:
        spec: path of a Python file or name of a config of the package, and optionally ":" and an argument of
            `get_config`.

    Raises:
        ValueError: there is no such config, or it fails, or it does not return a `Config`.
    """
    name, colon, argument = spec.partition(":")
    path = _config_path(name)
    try:
        loaded = runpy.run_path(str(path))["get_config"](*([argument] if colon else []))
    except ValueError:
        raise
    except Exception as error:  # any error of the user's file
        raise ValueError(f"--config {spec!r} failed with {type(error).__name__}: {error}") from error
    if not isinstance(loaded, config.Config):
        raise ValueError(f"get_config of {name!r} returned {type(loaded).__name__}; it must return a Config")
    return loaded


def _config_path(name: str) -> pathlib.Path:
    path, configs = pathlib.Path(name), _package_configs()
    if path.is_file():
        return path
    if name in configs:
        return configs[name]
    near = difflib.get_close_matches(path.stem, configs, n=3, cutoff=0)
    raise ValueError(
        f"--config names {name!r}, which is neither a file nor a config of the package; "
        f"the nearest names are {', '.join(near)}"
    )


def _package_configs() -> dict[str, pathlib.Path]:
    """Returns the files of the configs that come with the package, by name."""
    package = pathlib.Path(config.__file__).parents[1]
    # A wheel has the folder inside the package, a checkout next to it.
    folder = next(path for path in (package / "configs", package.parent / "configs") if path.is_dir())
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def override(base: config.Config, texts: Mapping[str, str]) -> config.Config:
    """Replaces fields by dotted path, e.g. {"model.layers": "4"}, with values as typed by the user.

    A tuple is written "64,128" or "(64,128)", and None is written "none". Fields that `base` derives from others are
    derived again: overriding `model.heads` changes `model.kv_heads`.

    Raises:
        ValueError: a field is unknown, a value has the wrong type, or settings contradict each other.
    """
    annotations = _leaves(config.Config)
    values = {}
    for path, text in texts.items():
        if path not in annotations:
            raise ValueError(_unknown_setting(path))
        values[path] = _read_value(path, text, annotations[path])
    return _rebuild(base, "", values)


def read_overrides(arguments: Sequence[str]) -> dict[str, str]:
    """Parses arguments `--config.a.b=value` into the mapping that `override` takes.

    Raises:
        ValueError: a setting is unknown, or there is another argument.
    """
    annotations = _leaves(config.Config)
    for argument in arguments:
        path = argument.removeprefix(_PREFIX).partition("=")[0]
        if argument.startswith(_PREFIX) and path not in annotations:
            raise ValueError(_unknown_setting(path))
    argv = ["train.py", *arguments]
    values = absl_flags.FlagValues()
    config_flags.DEFINE_config_dict("config", _twin(config.Config), flag_values=values, sys_argv=argv)
    try:
        left = values(argv)[1:]
    except absl_flags.Error as error:
        raise ValueError(f"{error}; see --help") from error
    if left:
        raise ValueError(f"unexpected argument {left[0]!r}; settings are given as --config.a.b=value")
    return values["config"].override_values  # type: ignore[attr-defined]  # of ml_collections' flag


def _twin(kind: Any) -> ml_collections.ConfigDict:
    # Every leaf is text, because only the dataclasses know the types of fields (None, tuples).
    return ml_collections.ConfigDict(
        {
            name: _twin(hint)
            if dataclasses.is_dataclass(hint)
            else ml_collections.config_dict.placeholder(str)
            for name, hint in typing.get_type_hints(kind).items()
        }
    )


def _leaves(kind: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the annotation of every setting of the dataclass `kind`, by dotted path."""
    leaves: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            leaves |= _leaves(hint, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = hint
    return leaves


def _rebuild(node: Any, prefix: str, values: Mapping[str, Any]) -> Any:
    changes = {}
    for field in dataclasses.fields(node):
        path = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(getattr(node, field.name)):
            changes[field.name] = _rebuild(getattr(node, field.name), f"{path}.", values)
        elif path in values:
            changes[field.name] = values[path]
        elif field.default is None and _same_without(node, field.name):
            changes[field.name] = None
    return dataclasses.replace(node, **changes)


def _same_without(node: Any, name: str) -> bool:
    try:
        return dataclasses.replace(node, **{name: None}) == node
    except ValueError:
        return False


def _read_value(path: str, text: str, annotation: Any) -> Any:
    kind, *optional = (
        typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    )
    if optional and text.strip().lower() == "none":
        return None
    try:
        if typing.get_origin(kind) is tuple:
            item = _READERS[typing.get_args(kind)[0]]
            parts = (part.strip().strip("'\"") for part in text.strip().strip("()[]").split(","))
            return tuple(item(part) for part in parts if part)
        return _READERS[kind](text)
    except ValueError:
        name = annotation.__name__ if isinstance(annotation, type) and kind is annotation else str(annotation)
        raise ValueError(f"{_PREFIX}{path} is {text!r}; it must be of type {name}") from None


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0:
        raise ValueError(f"{text} is not finite")
    return value


def _truth(text: str) -> bool:
    """Parses a boolean as written in Python or in shells."""
    values = {"true": True, "1": True, "false": False, "0": False}
    try:
        return values[text.strip().lower()]
    except KeyError:
        raise ValueError(f"{text!r} is neither true nor false") from None


_READERS: Mapping[type, Callable[[str], Any]] = {bool: _truth, int: int, float: _finite, str: str}


def _unknown_setting(path: str) -> str:
    paths = list(_leaves(config.Config))
    group = path
    while group:
        group = group.rpartition(".")[0]
        below = [leaf for leaf in paths if leaf.startswith(f"{group}.")]
        if below:
            return f"there is no setting {_PREFIX}{path}; {group} has {', '.join(_names(below, group))}"
    return f"there is no setting {_PREFIX}{path}; the groups are {', '.join(_names(paths, ''))}"


def _names(leaves: Sequence[str], group: str) -> list[str]:
    start = len(group) + 1 if group else 0
    return list(dict.fromkeys(leaf[start:].partition(".")[0] for leaf in leaves))


def _describe_settings() -> str:
    lines = ["settings, each overridden with --config.a.b=value:"]
    for path, annotation in _leaves(config.Config).items():
        name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
        lines.append(f"  {_PREFIX}{path:<40} {name}")
    return "\n".join(lines)
