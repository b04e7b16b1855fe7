"""Tests of configs by name and file, and of the arguments after their colon."""

import contextlib
import dataclasses
import json
import re

import pytest

from sympow_jax import config
from sympow_jax.config import loading


def test_a_config_of_the_package_is_found_by_name_from_anywhere(tmp_path, monkeypatch):
    expected = {name: config.load(f"configs/quickstart.py{name}") for name in ("", ":sympow")}
    monkeypatch.chdir(tmp_path)
    assert {name: config.load(f"quickstart{name}") for name in expected} == expected
    # A file of that name is the user's own.
    (tmp_path / "quickstart").write_text("def get_config(): return {}")
    with pytest.raises(ValueError, match="returned dict"):
        config.load("quickstart")


def test_the_json_of_a_run(tmp_path):
    path = tmp_path / "config.json"
    expected = config.load("quickstart:sympow")
    path.write_text(json.dumps(dataclasses.asdict(expected)))
    assert config.load(str(path)) == expected
    with pytest.raises(ValueError, match=r"config\.json', which takes no arguments; remove ':sympow'"):
        config.load(f"{path}:sympow")
    path.write_text('{"model": {"layer": 1}}')
    with pytest.raises(ValueError, match=r"config\.json: ModelConfig has no layer"):
        config.load(str(path))


@pytest.mark.parametrize(
    ("name", "value", "is_remote"),
    [
        ("paths", ("a", "s3://b/c"), True),
        ("heldout_paths", ("http::b",), True),
        ("paths", ("file:///a|http://b",), True),
        ("tokenizer", "hf://a/b", True),
        ("paths", ("file:///a", "~/b", "c:d"), False),
    ],
)
def test_remote_data_of_a_file_is_named_again(name, value, is_remote):
    data = config.DataConfig(**{"source": "jsonl", "paths": ("a",), name: value})
    settings = config.Config(model=config.ModelConfig(vocab_size=256, layers=1, width=32, heads=2), data=data)
    loading.require_named(settings, {f"data.{name}"}, "it")
    error = pytest.raises(ValueError, match=rf"data\.{name} of it .* another host")
    with error if is_remote else contextlib.nullcontext():
        loading.require_named(settings, {"data.seed"}, "it")


def test_a_wheel_has_its_configs_inside_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "__file__", str(tmp_path / "sympow_jax" / "config" / "loading.py"))
    (tmp_path / "sympow_jax" / "configs").mkdir(parents=True)
    (tmp_path / "sympow_jax" / "configs" / "only.py").write_text("def get_config(): return {}")
    # The folder of another package in site-packages.
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "other.py").touch()
    with pytest.raises(ValueError, match="get_config of 'only' returned dict"):
        config.load("only")
    with pytest.raises(ValueError, match=r"the nearest names are only$"):
        config.load("other")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def get_config(:", "failed with SyntaxError"),
        ("x = 1", r"mine\.py has no function get_config; it must have one that returns a Config"),
        ("def get_config():\n    return missing", "failed in line 2 with NameError: name 'missing'"),
        ("def get_config(size): pass", "missing a required argument: 'size'"),
        ("def get_config(): return {}", "returned dict; it must return a Config"),
        (
            "from sympow_jax import config\ndef get_config(): return config.ModelConfig(layer=1)",
            "unexpected keyword argument 'layer'",
        ),
        (
            "def get_config():\n    return int('x1')",
            "failed in line 2 with ValueError: invalid literal for int()",
        ),
        ("import sys\nsys.exit()", "failed in line 2 with SystemExit: "),
        ("import json\ndef get_config(): return json.loads('{')", "failed in line 2 with JSONDecodeError: "),
        (
            "from sympow_jax import config\ndef get_config(): return config.preset('x')",
            "^preset is 'x'; it must be one of",
        ),
    ],
)
def test_mistakes_inside_files(tmp_path, source, message):
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(ValueError, match=message):
        config.load(str(path))


@pytest.mark.parametrize("name", config.PRESETS)
def test_every_preset_of_every_file(name):
    assert config.load(f"configs/quickstart.py:{name}").model.attention == config.preset(name)
    for power in (2, 4, 6):
        for exponent in range(8, 17):
            loaded = config.load(f"configs/gpt2_124m.py:{name},p={power},context={2**exponent}")
            attention = config.preset(name, power=power)
            if attention.position == "learned_absolute":
                attention = dataclasses.replace(attention, max_document_length=2**exponent)
            assert loaded.model.attention == attention
            assert loaded.data.batch_size * 2**exponent == 524_288


def test_text_takes_paths():
    assert config.load("configs/text.py:a/*.txt,b").data.paths == ("a/*.txt", "b")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "configs/quick.py",
            "is neither a file nor a config of the package; the nearest names are quickstart, ",
        ),
        ("configs", "--config names 'configs', which is a folder; the nearest names are "),
        ("quickstart:conformist", "preset is 'conformist'; it must be one of softmax,"),
        ("quickstart:", "preset is ''; it must be one of softmax,"),
        ("quickstart:sympwo", "; did you mean sympow?"),
        (
            "quickstart:sympow,p=4",
            "'quickstart' has no argument 'p'; the arguments of config 'quickstart' are preset",
        ),
        ("text", "needs files"),
        ("text:", "needs files"),
        (
            "gpt2_124m:sympow,q=3",
            "has no argument 'q'; the arguments of config 'gpt2_124m' are preset, p, context, data",
        ),
        ("gpt2_124m:sympow,contxt=512", "config 'gpt2_124m' has no argument 'contxt'; did you mean context?"),
        (
            "gpt2_124m:sympow,4",
            "--config 'gpt2_124m:sympow,4': too many positional arguments; the arguments of ",
        ),
        ("gpt2_124m:sympow,preset=sympow", "multiple values for argument 'preset'"),
        ("gpt2_124m:p=2,p=4", "config 'gpt2_124m' is given argument 'p' twice"),
        ("gpt2_124m:p=two", "argument 'p' of config 'gpt2_124m' is 'two'; it must be INT"),
        ("gpt2_124m:sympow,context=300", "context is 300; it must be one of 256, 512"),
    ],
)
def test_mistakes_in_names_and_arguments(spec, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        config.load(spec)
    assert "\n" not in str(caught.value)


def test_the_folder_of_a_run_is_no_config(tmp_path):
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match=re.escape(f"--config={tmp_path}/config.json resumes its run")):
        config.load(str(tmp_path))


def test_arguments_have_the_types_of_the_signature(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from sympow_jax import config\n"
        "from typing import Literal, Optional\n"
        "def get_config(a: int, b: Optional[float] = 1.0, *rest: int, c, d: bool = False, e_f: Literal['x'] = 'y'):\n"
        "    got.append((a, b, rest, c, d, e_f))\n"
        "    return config.load('quickstart')\n"
    )
    got: list = []
    monkeypatch.setattr("builtins.got", got, raising=False)
    for arguments in ("1,c=2", "1,none,3,4,c=,d=true,e-f=x", "c=a=b,b=0.5,a=1"):
        config.load(f"{tmp_path}/mine.py:{arguments}")
    assert got == [
        (1, 1.0, (), "2", False, "y"),
        (1, None, (3, 4), "", True, "x"),
        (1, 0.5, (), "a=b", False, "y"),
    ]
    (tmp_path / "mine.py").write_text(
        "from sympow_jax import config\n"
        "from typing import Literal, Optional\n"
        "def get_config(a: Literal[1, 'x'], *rest: int, **changes: Optional[int]):\n"
        "    got.append((a, rest, changes))\n"
        "    return config.load('quickstart')\n"
    )
    got.clear()
    for arguments in ("1,2,b=3,c=none", "a=x,a-b=4"):
        config.load(f"{tmp_path}/mine.py:{arguments}")
    assert got == [(1, (2,), {"b": 3, "c": None}), ("x", (), {"a_b": 4})]
    for arguments, message in (
        ("1,b=x", "argument 'b' of config '.*' is 'x'; it must be INT or none"),
        ("2", "argument 'a' of config '.*' is '2'; it must be one of 1, x"),
        ("1,b=3,b=4", "given argument 'b' twice"),
        ("", "is ''; it must be one of 1, x"),
        ("b=3", r"missing a required argument: 'a'; the arguments of config .* are a, \*rest, \*\*changes$"),
    ):
        with pytest.raises(ValueError, match=message):
            config.load(f"{tmp_path}/mine.py:{arguments}")
    (tmp_path / "mine.py").write_text(
        "from sympow_jax import config\n"
        "def get_config(a: str = '', b: tuple[int, ...] = (), *rest: str, c: tuple[str, ...] = ()):\n"
        "    got.append((a, b, rest, c))\n"
        "    return config.load('quickstart')\n"
    )
    got.clear()
    for arguments in (
        "'x,y',\"64,128\",'a=b'",
        'b="64,128", a="say ""x,y""",c=\'"p,1",q\'',
        "it's,5,\"open,c=p",
    ):
        config.load(f"{tmp_path}/mine.py:{arguments}")
    assert got == [
        ("x,y", (64, 128), ("a=b",), ()),
        ('say "x,y"', (64, 128), (), ("p,1", "q")),
        ("it's", (5,), ('"open',), ("p",)),
    ]
    (tmp_path / "mine.py").write_text("def get_config(a: list[int]): pass")
    with pytest.raises(
        ValueError, match=r"argument 'a' of config .* has the type list\[int\], which cannot be"
    ):
        config.load(f"{tmp_path}/mine.py:1")
    # In a path, "=" has no meaning.
    assert config.load("text:a=b.txt,c").data.paths == ("a=b.txt", "c")
    assert config.load("text:'a,b.txt',c").data.paths == ("a,b.txt", "c")
