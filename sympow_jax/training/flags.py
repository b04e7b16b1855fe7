"""The command line of a run: a config file, overrides of its fields and a workdir.

`--config=CONFIG[:ARGUMENTS]` is what `config.load` loads. Because it is frozen, `--config.a.b=value` sets a field of a
ConfigDict with the same fields, from which the settings are built and validated again.
"""

import argparse
import dataclasses
import os
import pathlib
import typing
from collections.abc import Sequence
from typing import Any

import ml_collections
from absl import flags as absl_flags
from ml_collections import config_flags

from sympow_jax import config
from sympow_jax.config import loading
from sympow_jax.training import hosts

__all__ = ["parse", "read_overrides"]

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
        metavar="CONFIG[:ARGUMENTS]",
        help=f"a FILE.py, or one of {', '.join(loading.package_configs())}; ARGUMENTS go to its get_config, "
        "e.g. quickstart:sympow or gpt2_124m:conformal,p=4",
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
    return (
        config.override(config.load(known.config), read_overrides(rest)),
        known.workdir,
        _read_launch(known),
    )


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


def read_overrides(arguments: Sequence[str]) -> dict[str, str]:
    """Parses arguments `--config.a.b=value` into the mapping that `override` takes.

    Raises:
        ValueError: a setting is unknown, or there is another argument.
    """
    annotations = loading.leaves(config.Config)
    for argument in arguments:
        path = argument.removeprefix(_PREFIX).partition("=")[0]
        if argument.startswith(_PREFIX) and path not in annotations:
            raise ValueError(loading.unknown_setting(path))
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


def _describe_settings() -> str:
    lines = ["settings, each overridden with --config.a.b=value:"]
    for path, annotation in loading.leaves(config.Config).items():
        name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
        lines.append(f"  {_PREFIX}{path:<40} {name}")
    return "\n".join(lines)
