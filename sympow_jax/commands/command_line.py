"""Command lines: the parser of all programs, and the options that set the config of a run."""

import argparse
import dataclasses
import inspect
import operator
import os
import pathlib
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from sympow_jax import config, spelling
from sympow_jax.config import fields, literals, loading
from sympow_jax.process import hosts, workdir

_HELP = {"-h", "--help"}
# Forms of values that are paths, or lists that may have some. An empty one would be the current folder.
_PATH = re.compile(r"CONFIG|DIR|FILE|FOLDER|PATH|A\[,B")


class _Formatter(argparse.HelpFormatter):
    """Puts the help of an option below it, ends it with the default, and keeps the paragraphs of descriptions."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=6)

    def _get_help_string(self, action: argparse.Action) -> str:
        default, help = action.default, action.help or ""
        shown = default not in (None, [], argparse.SUPPRESS) and not isinstance(default, bool)
        return f"{help} Default: %(default)s." if shown else help

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = []
        for part in text.strip("\n").split("\n\n"):
            if "\n  " not in f"\n{part}":
                part = textwrap.fill(" ".join(part.split()), width - len(indent))
            filled.append(textwrap.indent(part, indent))
        return "\n\n".join(filled)


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are ValueErrors of one line, with the nearest valid option.

    Dashes in the names of options are read as underscores.
    """

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **options)

    def error(self, message: str) -> NoReturn:
        """Raises ValueError with the message and a reference to --help."""
        raise ValueError(f"{message}; see {self.prog} --help")

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        """Parses arguments; raises ValueError for one that the parser does not know.

        Paths that begin with `~` are in the user's home, as `--workdir=~/run` is not for a shell.
        """
        args = list(sys.argv[1:] if args is None else args)
        end = args.index("--") if "--" in args else len(args)
        names = []
        for index, argument in enumerate(args[:end]):
            if argument.startswith("--"):
                name, equals, text = argument.partition("=")
                names.append(f"--{name[2:].replace('-', '_')}")
                args[index] = f"{names[-1]}{equals}{text}"
        # Before argparse, which would report that a required option is missing when it is misspelled. Options after a
        # subcommand are checked by its parser.
        known, unknown = namespace, [name for name in names if name not in self._option_string_actions]
        if not unknown or self._subparsers is not None or _HELP & set(args):
            known, rest = super().parse_known_args(args, namespace)
            unknown = [argument for argument in rest if argument != "--"]
        if unknown:
            raise ValueError(self._unknown(unknown[0]))
        for action in self._actions:
            value = getattr(known, action.dest, None)
            if _PATH.search(str(action.metavar)) and isinstance(value, str):
                if value == "":
                    self.error(
                        f"{action.option_strings[0]} is empty; it must be of the form {action.metavar}"
                    )
                setattr(known, action.dest, ",".join(map(os.path.expanduser, value.split(","))))
        return known, []

    def _unknown(self, argument: str) -> str:
        """Returns the error message for an argument that does not exist."""
        options = self._option_string_actions
        path = argument.removeprefix("--").partition("=")[0]
        name = path.removeprefix("config.")
        near = spelling.nearest(argument, options)
        if any(option.startswith("--config.") for option in options):
            setting = loading.nearest_setting(name)
            option = setting and f"--config.{setting}"
            changeable = option is None or option in options
            if argument.startswith("--config."):
                if setting == name:
                    return f"{argument} cannot be changed here; see {self.prog} --help"
                known = f"there is no setting {argument}; see {self.prog} --help"
                return loading.unknown_setting(name) if changeable else known
            near = near or (option if changeable else None)
        what = "unknown option" if argument.startswith("-") else "unexpected argument"
        return f"{what} {argument!r}; {f'did you mean {near}?' if near else f'see {self.prog} --help'}"

    def add_options(self, *rows: tuple[str, Any, str | None, Any, str]) -> None:
        """Adds options of one value: for each its name, type or choices, form, default and help.

        A default of `...` makes it required.
        """
        for name, kind, metavar, default, help in rows:
            kinds = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
            value = {"required": True} if default is ... else {"default": default}
            self.add_argument(f"--{name}", metavar=metavar, help=help, **kinds, **value)

    def add_workdir(self) -> None:
        """Adds `--workdir`, that of a run which is read."""
        self.add_options(("workdir", str, "DIR", ..., "Workdir of a training run."))

    def add_tokenizer(self) -> None:
        """Adds `--tokenizer`, the name for `data.codec_of_run`."""
        self.add_options(
            (
                *("tokenizer", str, "FILE", None),
                "Tokenizer of the run's data: `byte`, a `tokenizers` JSON file, a folder that has it as "
                "`tokenizer.json`, `hf://ORG/NAME`, or the name of a tiktoken encoding. Default: the run's "
                "data.tokenizer.",
            )
        )

    def add_settings(
        self, values: config.Config | None = None, *, hidden: bool = False, only: str | None = None
    ) -> None:
        """Adds an option `--config.a.b` for each setting, which `changed_settings` reads.

        Args:
            values: config whose values are printed as defaults; None prints those of the dataclasses.
            hidden: whether `--help` does not list them.
            only: path of the one group whose settings may be changed, from the values of a run; None for all groups.
        """
        for group in fields.groups(config.Config):
            if only not in (None, group.path):
                continue
            summary = " ".join((inspect.getdoc(group.kind) or "").partition("\n\n")[0].split())
            section = self if hidden else self.add_argument_group(group.path, summary)
            for setting in group.settings:
                parts = [setting.help]
                if setting.resumable and only is None:
                    parts.append("May change when a run is resumed.")
                if setting.choices:
                    parts.append(f"One of {', '.join(setting.choices)}.")
                if setting.form == literals.form(tuple[str, ...]):
                    parts.append(literals.QUOTING)
                if only is None:
                    default = setting.default if values is None else operator.attrgetter(setting.path)(values)
                    required = default is dataclasses.MISSING
                    parts.append(
                        "Every config sets it." if required else f"Default: {literals.written(default)}."
                    )
                metavar = setting.form + ("|none" if setting.optional else "")
                text = argparse.SUPPRESS if hidden else " ".join(parts).replace("%", "%%")
                section.add_argument(f"--config.{setting.path}", metavar=metavar, help=text)


def changed_settings(known: argparse.Namespace) -> dict[str, str]:
    """Returns the texts of the given options of `Parser.add_settings`, by the paths of their settings."""
    return {
        name.removeprefix("config."): text
        for name, text in vars(known).items()
        if name.startswith("config.") and text is not None
    }


def parse_training(
    arguments: Sequence[str], program: str = "sympow train"
) -> tuple[config.Config, pathlib.Path, hosts.Launch | None]:
    """Parses the arguments of a training run, those after the name of the program.

    Returns:
        The config, the workdir, and the launch that connects this process with others. Without options about
        processes, it is that of the cluster that started this one, or None for a run of one process.

    Raises:
        ValueError: an option or setting is unknown, a value has the wrong type, the config file does not exist, or
            settings contradict each other.
        SystemExit: after --help.
    """
    parser = Parser(
        prog=program,
        usage="%(prog)s --config=CONFIG --workdir=DIR [--config.GROUP.NAME=VALUE]",
        description="Trains a model. The same command resumes the run in --workdir.",
    )
    parser.add_options(
        (
            *("config", str, "CONFIG[:ARGUMENTS]", ...),
            "FILE.py with a function get_config, or a name in the list below. ARGUMENTS are those of get_config, in "
            "order or by name, such as quickstart:sympow or gpt2_124m:sympow,p=4. Quote a value that has commas, as in "
            "'FILE.py:lengths=\"64,128\"'. The config.json of a workdir resumes its run if FILE.py, or what it reads, "
            "is gone.",
        ),
        ("workdir", str, "DIR", ..., "Folder for settings, metrics and checkpoints."),
    )
    group = parser.add_argument_group(
        "several processes (see docs/many_hosts.md); clusters need none of these"
    )
    group.add_argument("--coordinator_address", metavar="HOST:PORT", help="Address where process 0 listens.")
    group.add_argument("--process_count", type=int, metavar="N", help="Number of processes.")
    group.add_argument("--process_id", type=int, metavar="I", help="Index of this process, from 0.")
    group.add_argument(
        "--coordinator_timeout",
        type=int,
        metavar="SECONDS",
        default=hosts.TIMEOUT,
        help="Time after which the run ends if the processes have not met.",
    )
    # Configs are run only for a help that has them.
    if _HELP & set(arguments):
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--config", nargs="?")
        spec = finder.parse_known_args(arguments)[0].config
        summaries = (
            f"  {usage}\n{textwrap.fill(summary, 74, initial_indent='    ', subsequent_indent='    ')}"
            for usage, summary in loading.describe_configs().items()
        )
        parser.add_argument_group("configs, with their arguments and defaults", "\n".join(summaries))
        parser.add_argument_group(
            "settings",
            f"Each is changed with --config.GROUP.NAME=VALUE. The defaults below are those of {spec or 'the classes'}"
            f"{'' if spec else '; with --config=CONFIG --help, those of the config'}.",
        )
        parser.add_settings(config.load(spec) if spec else None)
    else:
        parser.add_settings(hidden=True)
    known = parser.parse_args(arguments)

    workdir.require_path("--workdir", known.workdir)
    settings = config.override(config.load(known.config), changed_settings(known))
    # Both come with data settings that are not the user's own: a run's `config.json`, and a run to start from.
    if pathlib.Path(known.config).suffix == ".json" or settings.task.initial_run is not None:
        loading.require_named(settings, changed_settings(known), f"--config={known.config}")

    given = {name: getattr(known, name) for name in ("coordinator_address", "process_count", "process_id")}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise ValueError(f"{' and '.join(missing)} must be given too; see --help")
    address, count, index = given.values()
    timeout = known.coordinator_timeout
    launch = (
        hosts.detect(os.environ, timeout=timeout)
        if missing
        else hosts.Launch(coordinator=address, count=count, index=index, timeout=timeout)
    )
    return settings, pathlib.Path(known.workdir), launch
