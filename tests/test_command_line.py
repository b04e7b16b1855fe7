"""Tests of the command line: overrides, derived settings and one clear line for every mistake."""

import os
import pathlib
import runpy

import pytest

from sympow_jax import config
from sympow_jax.commands import command_line
from sympow_jax.config import fields
from sympow_jax.process import signals
from tests import mistakes

QUICKSTART = "--config=configs/quickstart.py"


def _parse(*arguments: str) -> config.Config:
    return command_line.parse_training([QUICKSTART, "--workdir=unused", *arguments])[0]


def test_without_overrides_the_file_decides():
    parsed, workdir, launch = command_line.parse_training([QUICKSTART, "--workdir", "runs/a"])
    assert parsed == config.load("configs/quickstart.py")
    assert workdir == pathlib.Path("runs/a")
    assert launch is None


def test_values_are_literals_or_text():
    for path, text, value in (
        ("model.layers", "3", 3),
        ("model.attention.form", "chunked", "chunked"),
        ("model.attention.form", "none", None),
        ("model.biases", "True", True),
        ("model.biases", "0", False),
        ("optimizer.learning_rate", "1e-3", 1e-3),
        ("optimizer.learning_rate", "1", 1.0),
        ("optimizer.clip_norm", "None", None),
        ("training.steps", "1_000", 1000),
        ("training.steps", "1e3", 1000),
        ("evaluation.context_lengths", "64,1.28e2", (64, 128)),
        ("evaluation.context_lengths", "64,128", (64, 128)),
        ("evaluation.context_lengths", "(64, 128)", (64, 128)),
        ("evaluation.context_lengths", "[64]", (64,)),
        ("evaluation.context_lengths", "64", (64,)),
        ("evaluation.context_lengths", "()", ()),
        ("evaluation.context_lengths", "", ()),
        ("data.paths", "a/*.txt", ("a/*.txt",)),
        ("data.paths", "007,'b c',1", ("007", "b c", "1")),
        ("data.paths", "src/*.[ch], /d/corpus (1)", ("src/*.[ch]", "/d/corpus (1)")),
        ("data.paths", "[a],[b]", ("[a]", "[b]")),
        ("data.labels", "0,1", ("0", "1")),
        ("data.label_column", "007", "007"),
        ("evaluation.prompts", "def f(x)", ("def f(x)",)),
        ("evaluation.prompts", " def ", (" def ",)),
        ("evaluation.prompts", "'Hello, world'", ("Hello, world",)),
        ("evaluation.prompts", "\"Hello, world\",'def\\n'", ("Hello, world", "def\n")),
        ("evaluation.prompts", "don't, 'tis,", ("don't", "'tis")),
    ):
        for arguments in ([f"--config.{path}={text}"], [f"--config.{path}", text]):
            found = _parse(*arguments)
            for name in path.split("."):
                found = getattr(found, name)
            assert (found, type(found)) == (value, type(value))


def test_several_overrides_are_validated_together():
    # Either one without the other contradicts the unchanged field.
    parsed = _parse("--config.data.context_length=96", "--config.data.batch_tokens=192")
    assert parsed.data.batch_size == 2


def test_derived_settings_follow_those_that_they_are_derived_from():
    for changes, sizes in (
        (["heads=8"], (8, 16)),
        (["width=64"], (4, 16)),
        (["heads=8", "kv_heads=2", "head_dim=32"], (2, 32)),
    ):
        model = _parse(*(f"--config.model.{change}" for change in changes)).model
        assert (model.num_kv_heads, model.head_size) == sizes
    assert _parse("--config.optimizer.name=lion").optimizer.square_decay == 0.99
    base = config.load("quickstart")
    assert (base.model.kv_heads, base.optimizer.b2) == (None, None)


MISTAKES = (
    ("--config.model.layer=3", "no setting --config.model.layer; did you mean --config.model.layers?"),
    ("--config.modle.layer=3", "did you mean --config.model.layers?"),
    ("--config.model_width=4", "did you mean --config.model.width?"),
    ("--config.model.power=4", "did you mean --config.model.attention.power?"),
    ("--config.train.seed=4", "did you mean --config.training.seed?"),
    ("--config.model.attention=softmax", "no setting --config.model.attention; see --help for all"),
    ("--config.optimizer.x=4", "no setting --config.optimizer.x; see --help for all"),
    ("--config.optimizer.lr=4", "did you mean --config.optimizer.learning_rate?"),
    ("--config.training.batch_size=4", "did you mean --config.data.batch_tokens?"),
    *(
        (f"--config.model.layers={x}", f"layers is '{x}'; it must be INT")
        for x in ("three", "2.5", "inf", "none")
    ),
    ("--config.training.steps=1e300", "is an integer of 997 bits"),
    ("--config.model.biases=yes", "is 'yes'; it must be true or false"),
    *((f"--config.optimizer.learning_rate={x}", f"rate is '{x}'; it must be FLOAT") for x in ("fast", "nan")),
    ("--config.optimizer.learning_rate=1e999", "learning_rate is inf; it must be a finite number"),
    ("--config.evaluation.context_lengths=64,x", "must be INT,INT,... or none"),
    ("--config.model.attention.power=3", "attention.power is 3; it must be positive and even"),
    ("--config.model.heads=3", "does not divide model.width 128"),
    ("--config.model.layers", "argument --config.model.layers: expected one argument"),
    ("--cofnig.model.layers=3", "--cofnig.model.layers'; did you mean --config.model.layers?"),
    ("model.layers=3", "unexpected argument 'model.layers=3'; did you mean --config.model.layers?"),
    ("extra", "unexpected argument 'extra'; see sympow train --help"),
    ("-v", "unknown option '-v'; see sympow train --help"),
    ("-- x", "unexpected argument 'x'; see"),
    ("--proces-count=2", "unknown option '--proces_count'; did you mean --process_count?"),
    ("--process-count=2", "--coordinator_address and --process_id must be given too"),
    ("--workdir=", "--workdir is empty; it must be of the form DIR"),
)


def test_mistakes_are_one_line_that_names_the_nearest():
    both = f"{QUICKSTART} --workdir=unused "
    lines = [(both + arguments, message) for arguments, message in MISTAKES]
    lines.append(("--workdir=x", "required: --config"))
    lines.append((QUICKSTART, "required: --workdir"))
    lines.append((f"{QUICKSTART} --workdri=x", "unknown option '--workdri'; did you mean --workdir?"))
    lines.append(("--config quickstrat -h", "the nearest names are quickstart"))
    for line, message in lines:
        with mistakes.refused(message):
            command_line.parse_training(line.split(" "))


def test_a_workdir_is_utf8(tmp_path, monkeypatch):
    latin = os.fsdecode(b"caf\xe9")
    with pytest.raises(ValueError, match=r"--workdir is '.*caf\\udce9', which is not UTF-8; checkpoints"):
        _parse(f"--workdir={latin}")
    (tmp_path / latin).mkdir()
    monkeypatch.chdir(tmp_path / latin)
    with pytest.raises(ValueError, match="is not UTF-8"):
        command_line.parse_training(["--config=quickstart", "--workdir=a"])
    monkeypatch.chdir(tmp_path)
    assert command_line.parse_training(["--config=quickstart", "--workdir=café"])[1].name == "café"


def test_paths_begin_in_the_users_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/a")
    assert command_line.parse_training([QUICKSTART, "--workdir=~/x~"])[1] == pathlib.Path("/home/a/x~")
    assert _parse("--config.task.initial_run=~/b").task.initial_run == "/home/a/b"
    parser = command_line.Parser()
    parser.add_options(("workdir", str, "A[,B,...]", None, ""), ("text", str, "TEXT", None, ""))
    known = parser.parse_args(["--workdir=~/a,b,~/c", "--text=~/x"])
    assert (known.workdir, known.text) == ("/home/a/a,b,/home/a/c", "~/x")


def test_dashes_are_underscores():
    rate = "--config.optimizer.learning-rate=0.5"
    parsed = _parse(rate, "--config.data.paths", "a-b", "--config.model.attention.max-document-length=7")
    assert (parsed.optimizer.learning_rate, parsed.data.paths) == (0.5, ("a-b",))
    assert parsed.model.attention.max_document_length == 7


def _read_help(capsys, monkeypatch, *arguments: str) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        command_line.parse_training([*arguments, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help_explains_every_setting(capsys, monkeypatch):
    printed = _read_help(capsys, monkeypatch)
    words = " ".join(printed.split())
    assert """Quote a value that has commas, as in 'FILE.py:lengths="64,128"'. """ in words
    for group in fields.groups(config.Config):
        assert f"\n{group.path}:\n  " in printed
        for setting in group.settings:
            form = setting.form + ("|none" if setting.optional else "")
            choices = f" One of {', '.join(setting.choices)}." if setting.choices else ""
            resumable = " May change when a run is resumed." if setting.resumable else ""
            assert f"--config.{setting.path} {form} {setting.help}{resumable}{choices} " in words
    assert "Number of blocks. Every config sets it. " in words
    assert "Tokens per row. Default: 1024. " in words
    assert "If an item has commas, quote every item. Default: ()" in words
    assert max(map(len, printed.splitlines())) <= 80
    # Each config has a line with its arguments, and one with its summary.
    usage = "\n    gpt2_124m:preset=conformal,p=2,context=4096,data=longcrawl64\n      The papers' recipe"
    assert usage in printed


def test_configs_are_run_only_for_help(monkeypatch):
    ran = []
    run_path = runpy.run_path
    monkeypatch.setattr(runpy, "run_path", lambda path: ran.append(pathlib.Path(path).stem) or run_path(path))
    _parse()
    assert ran == ["quickstart"]


def test_help_with_a_config_has_its_values(capsys, monkeypatch):
    words = " ".join(_read_help(capsys, monkeypatch, "--config=quickstart:sympow", "--wrokdir=x").split())
    for part in ("of quickstart:sympow.", "Default: 2.", "Default: 64,128,256,512,", "Default: rope."):
        assert part in words


def test_errors_have_a_bounded_length(capsys):
    with pytest.raises(SystemExit) as stopped, signals.user_errors():
        raise ValueError(f"data.paths is {'x' * 100_000}; correct the path")
    assert stopped.value.code == 1
    line = capsys.readouterr().err
    assert len(line) < 1600
    assert line.startswith("error: data.paths is xxx")
    assert line.endswith("; correct the path\n")
