"""Tests of the documentation: code runs, command lines parse, links and settings exist.

Every public name must be documented, too. The site's strict build, in `.ci/run`, checks links with their
anchors and the names of the reference.
"""

import argparse
import ast
import dataclasses
import importlib
import importlib.util
import inspect
import itertools
import json
import pathlib
import re
import runpy
import shlex
import sys
import tomllib
import types
import typing

import pytest

from sympow_jax import commands, config, models
from sympow_jax.commands import command_line, launch

ROOT = pathlib.Path(__file__).parents[1]
PATTERNS = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "examples/README.md",
    "docs/**/*.md",
    "experiments/README.md",
    "pallas_kernels/**/README.md",
)
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for pattern in PATTERNS
    for path in sorted(ROOT.glob(pattern))
}
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Packages whose every exported name is in the reference.
PACKAGES = ("ops", "layers", "models", "generation", "weights", "config", "data", "evaluation")
# Commands of a page that make the files which its code reads.
FIRST = {
    "docs/weights.md": ["uv run sympow weights export --workdir=runs/quickstart --out=quickstart.safetensors"]
}
# Commands that read their arguments without a parser.
UNPARSED = ("tools.h100", "tests.training.compiled")


def blocks(text: str, *languages: str) -> list[tuple[int, str]]:
    return [
        (text.count("\n", 0, fence.start(3)) + 1, re.sub(rf"(?m)^{fence[1]}", "", fence[3]))
        for fence in FENCE.finditer(text)
        if fence[2] in languages
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Makes a folder with `runs/quickstart`, the run that the pages read, made at small sizes from other text."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "books").mkdir()
    for index in range(12):
        (folder / "books" / f"{index}.txt").write_text(f"{index}: the quick brown fox jumps. " * 8)
    settings = {
        "model.layers": 2,
        "model.width": 16,
        "model.heads": 2,
        "data.paths": f"{folder}/books/*.txt",
        "data.heldout_fraction": 0.3,
        "data.context_length": 32,
        "data.batch_tokens": 128,
        "training.steps": 3,
        "evaluation.context_lengths": "16,32",
    }
    arguments = [f"--config={ROOT}/configs/quickstart.py", f"--workdir={folder}/runs/quickstart"]
    assert launch.main([*arguments, *(f"--config.{name}={value}" for name, value in settings.items())]) == 0
    return folder


@pytest.mark.robust
@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if blocks(text, "python")])
def test_code_of_a_page_runs(page, folder, monkeypatch):
    """Runs all of a page's Python from top to bottom in one namespace."""
    monkeypatch.chdir(folder)
    for line in FIRST.get(page, ()):
        assert line in PAGES[page]
        assert commands.main(line.removeprefix("uv run sympow ").split()) == 0
    namespace: dict = {"__name__": "page"}
    for line, block in blocks(PAGES[page], "python"):
        # Lines of a traceback are those of the page.
        exec(compile("\n" * (line - 1) + block, ROOT / page, "exec"), namespace)


class Parsed(BaseException):
    """Raised after the parser succeeds, to skip the rest of the program."""


def command_lines(text: str) -> list[str]:
    starts = re.findall(r"`((?:uv run|python3?|sympow) [^`\n]+)`", text)
    for _, block in blocks(text, "", "sh", "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            loop = re.fullmatch(r"for (\w+) in ([^;]+); do (.*); done", line)
            lines = [loop[3].replace(f"${loop[1]}", x) for x in loop[2].split()] if loop else [line]
            starts += [part for each in lines for part in re.split(r"&&|;", each)]
    for _, block in blocks(text, "yaml"):
        if "train.py" in block:
            options = re.findall(r"- (--\S+)", block.replace("$(JOB_COMPLETION_INDEX)", "0"))
            starts.append(shlex.join(["python", "train.py", *options]))
    return [line for line in starts if re.search(r"\buv run\b|\bpython3? |^\s*sympow ", line)]


COMMANDS = {page: lines for page, text in PAGES.items() if (lines := command_lines(text))}


@pytest.mark.robust
@pytest.mark.parametrize("page", COMMANDS)
def test_command_lines_parse(page, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    for line in COMMANDS[page]:
        for run, changes in RETROFITS.items():
            if f"retrofit.py:{run}" in line:
                write_run(tmp_path / run, **changes)
                line = line.replace(f"retrofit.py:{run}", f"retrofit.py:{tmp_path / run}")
        check_command_line(line, monkeypatch)


# Runs that commands of retrofits start from: changes of their settings.
RETROFITS = {
    "runs/qwen": {},
    "runs/match": {"pattern": ("3*sympow_gated", "shared"), "task": "match_attention"},
}


def write_run(folder: pathlib.Path, *, pattern: tuple[str, ...] = (), task: str = "next_token") -> None:
    model = config.ModelConfig(
        **config.MODEL_SIZES["qwen3_600m"], attention=config.preset("qwen3"), attention_pattern=pattern
    )
    settings = config.Config(
        model=model, task=config.TaskConfig(name=task, initial_run="runs/qwen"), data=config.DataConfig()
    )
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(settings)))


# Packages that a program imports before it parses, and that the README's test command does not install.
NEEDED = {"benchmarks.reading": ("pyarrow",)}


def check_command_line(line: str, monkeypatch) -> None:
    # Placeholders that a reader must replace.
    line = line.replace("METHOD", "type2").replace("--config=... ", "--config=configs/quickstart.py ")
    words = shlex.split(line, comments=True)
    words = words[words.index("uv") + 2 :] if "uv" in words else words
    while words[0].startswith("-"):
        check_option_of_uv(words)
    if words[0].startswith("python"):
        words = words[1:]
    program, *arguments = words
    run = runpy.run_path
    if program == "-m":
        program, *arguments = arguments
        assert importlib.util.find_spec(program), line
        for package in NEEDED.get(program, ()):
            pytest.importorskip(package)
        run = runpy.run_module
    elif program in ("pytest", "zensical"):
        if program == "pytest":
            check_pytest(arguments)
        return
    elif program != "sympow":
        assert (ROOT / program).is_file(), line
    if program == "sympow":
        check_sympow(arguments, monkeypatch)
    elif program == "train.py":
        check_training(arguments)
    elif program == "docs/figures.py":
        assert all((ROOT / "docs" / "figures" / f"{name}.png").is_file() for name in arguments), line
    elif arguments and program not in UNPARSED and not program.endswith(".sh"):
        with monkeypatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_known_args", stop_when_parsed)
            patch.setattr(sys, "argv", [program, *arguments])
            with pytest.raises(Parsed):
                run(program, run_name="__main__")


def stop_when_parsed(parser, args=None, namespace=None, parse=argparse.ArgumentParser.parse_known_args):
    """Replaces `parse_known_args` to end the program after it.

    Arguments that a parser does not know must be settings.
    """
    _, rest = parse(parser, args, namespace)
    settings = [argument.partition("=")[0].removeprefix("--config.") for argument in rest]
    assert [name for name in settings if not setting_exists(name)] == []
    raise Parsed


def check_option_of_uv(words: list[str]) -> None:
    """Removes an option of `uv run`; its extras and groups must exist."""
    option = words.pop(0)
    known = {
        "--extra": PROJECT["project"]["optional-dependencies"],
        "--group": PROJECT["dependency-groups"],
        "--only-group": PROJECT["dependency-groups"],
    }
    assert option == "--isolated" or words.pop(0) in known[option], option


def check_training(arguments: list[str]) -> None:
    if "--help" in arguments:
        with pytest.raises(SystemExit) as stopped:
            command_line.parse_training(arguments)
        assert stopped.value.code == 0
    elif arguments:
        command_line.parse_training(arguments)


def check_sympow(arguments: list[str], monkeypatch) -> None:
    if arguments in ([], ["--help"]):
        return
    name, *rest = arguments
    assert name in commands.COMMANDS
    if name == "train":
        check_training(rest)
    elif rest:
        with monkeypatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_known_args", stop_when_parsed)
            with pytest.raises(Parsed):
                commands.main(arguments)


def check_pytest(arguments: list[str]) -> None:
    """Checks that markers and paths exist; -k and -n accept anything."""
    markers = {marker.partition(":")[0] for marker in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    arguments = iter(arguments)
    for argument in arguments:
        if argument == "-m":
            assert set(next(arguments).split()) - {"and", "not", "or"} <= markers
        elif argument in ("-k", "-n"):
            next(arguments)
        else:
            assert (ROOT / argument).exists(), argument


def test_commands_were_found():
    assert {"README.md", "docs/tutorial.md", "docs/many_hosts.md", "experiments/README.md"} <= set(COMMANDS)
    assert sum(map(len, COMMANDS.values())) > 60


def setting_exists(path: str) -> bool:
    kind: typing.Any = config.Config
    for name in path.split("."):
        hints = typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
        if name not in hints:
            return False
        kind = hints[name]
    return True


def test_settings_exist():
    groups = "|".join(typing.get_type_hints(config.Config))
    named = {
        (page, path)
        for page, text in PAGES.items()
        for span in re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
        for path in re.findall(rf"(?:^|[ ]|--config\.)((?:{groups})\.[a-z_.0-9]*[a-z_0-9])(?=[ =,]|$)", span)
        if not path.endswith((".json", ".safetensors"))
    }
    attributes = {f"model.{name}" for name in dir(models.DecoderLM)}
    wrong = [
        (page, path) for page, path in sorted(named) if path not in attributes and not setting_exists(path)
    ]
    assert wrong == []


def test_links_lead_somewhere():
    for page, content in PAGES.items():
        text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", content))
        links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
        there = [ROOT / page if link == "" else (ROOT / page).parent / link for link in links]
        assert [str(path) for path in there if not path.exists()] == [], page


def shown_whole(module: types.ModuleType) -> list[str]:
    """Returns the functions, classes and documented values of a module that are not private."""
    body = ast.parse(pathlib.Path(module.__file__ or "").read_text()).body
    names = [node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    # A value's docstring follows it.
    for node, after in itertools.pairwise(body):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            names.append(ast.unparse(target))
    return [name for name in names if not name.startswith("_")]


def documented() -> dict[tuple[str, str], str]:
    """Returns the documented names of the reference, as module and name, by page."""
    pages = {}
    for page in (page for page in PAGES if page.startswith("docs/reference/")):
        for directive in re.finditer(r"^::: ([\w.]+)\n((?:    .*\n)*)", PAGES[page] + "\n", re.MULTILINE):
            path, members = directive[1], re.search(r"members: \[(.*)\]", directive[2])
            if importlib.util.find_spec(path.rpartition(".")[0]) and path.rpartition(".")[2][0].isupper():
                pages[tuple(path.rpartition(".")[::2])] = page
                continue
            module = importlib.import_module(path)
            shown = members[1].split(", ") if members else shown_whole(module)
            if "members: false" not in directive[2]:
                pages |= {(path, name): page for name in shown}
    return pages


def exported(package: types.ModuleType) -> list[tuple[str, str]]:
    """Returns the defining module and name of each exported name. Names of exported modules count as exported too."""
    source = ast.parse(pathlib.Path(package.__file__ or "").read_text())
    imported = {
        alias.asname or alias.name: node.module
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    names = []
    for name in package.__all__:
        value = getattr(package, name)
        if inspect.ismodule(value):
            names += [(value.__name__, inner) for inner in value.__all__]
        else:
            own = inspect.isclass(value) or inspect.isroutine(value)
            names.append((value.__module__ if own else imported[name], name))
    return names


@pytest.mark.parametrize("name", PACKAGES)
def test_every_exported_name_is_in_the_reference(name):
    shown = documented()
    names = exported(importlib.import_module(f"sympow_jax.{name}"))
    assert names
    assert [item for item in names if item not in shown] == []


def has_docstring(module: types.ModuleType, name: str) -> bool:
    value = getattr(module, name)
    # inspect does not count compiled functions as routines.
    if not (inspect.isclass(value) or inspect.isroutine(value) or hasattr(value, "__wrapped__")):
        statements = ast.parse(inspect.getsource(module)).body
        return any(
            isinstance(one, ast.Assign | ast.AnnAssign)
            and name in ast.unparse(one).partition("=")[0]
            and isinstance(two, ast.Expr)
            and isinstance(two.value, ast.Constant)
            for one, two in itertools.pairwise(statements)
        )
    # Dataclasses without a docstring get their signature as docstring.
    own = bool(value.__doc__) and not value.__doc__.startswith(f"{name}(")
    if not inspect.isclass(value):
        return own
    public = {n: x for n, x in vars(value).items() if not n.startswith("_")}
    methods = (x for x in public.values() if isinstance(x, property | classmethod) or inspect.isroutine(x))
    return own and all(method.__doc__ for method in methods)


def test_everything_in_the_reference_has_a_docstring():
    missing = [
        f"{module}.{name}"
        for module, name in documented()
        if not has_docstring(importlib.import_module(module), name)
    ]
    assert missing == []


def test_one_version():
    version = PROJECT["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^## (\S+)", PAGES["CHANGELOG.md"], re.MULTILINE)[1] == version


def test_the_site_has_every_page_that_is_tested():
    """Checks the navigation, in which the strict build does not notice a missing page."""
    pages = re.findall(r"(?m)^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text())
    assert sorted(pages) == sorted({*PAGES, "benchmarks/results/README.md"})
