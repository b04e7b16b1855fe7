"""Tests of configs by name and file, and of the arguments after their colon."""

import contextlib
import dataclasses
import json
import re

import pytest

from sympow_jax import config
from sympow_jax.config import loading
from tests import mistakes


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


def test_remote_data_of_a_file_is_named_again():
    model = config.ModelConfig(vocab_size=256, layers=1, width=32, heads=2)
    for name, value, is_remote in (
        ("paths", ("a", "s3://b/c"), True),
        ("heldout_paths", ("http::b",), True),
        ("paths", ("file:///a|http://b",), True),
        ("tokenizer", "hf://a/b", True),
        ("paths", ("file:///a", "~/b", "c:d"), False),
    ):
        data = config.DataConfig(**{"source": "jsonl", "paths": ("a",), name: value})
        settings = config.Config(model=model, data=data)
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


def test_mistakes_inside_files(tmp_path):
    ours = "from sympow_jax import config\ndef get_config(): return "
    for source, message in (
        ("def get_config(:", "failed with SyntaxError"),
        ("x = 1", r"mine\.py has no function get_config; it must have one that returns a Config"),
        ("def get_config():\n    return missing", "failed in line 2 with NameError: name 'missing'"),
        ("def get_config(size): pass", "missing a required argument: 'size'"),
        ("def get_config(): return {}", "returned dict; it must return a Config"),
        (f"{ours}config.ModelConfig(layer=1)", "unexpected keyword argument 'layer'"),
        ("def get_config():\n    return int('x1')", r"line 2 with ValueError: invalid literal for int\(\)"),
        ("import sys\nsys.exit()", "failed in line 2 with SystemExit: "),
        ("import json\ndef get_config(): return json.loads('{')", "failed in line 2 with JSONDecodeError: "),
        (f"{ours}config.preset('x')", "^preset is 'x'; it must be one of"),
    ):
        (tmp_path / "mine.py").write_text(source)
        with pytest.raises(ValueError, match=message):
            config.load(str(tmp_path / "mine.py"))


@pytest.mark.parametrize("name", config.PRESETS)
def test_every_preset_of_every_file(name):
    assert config.load(f"configs/quickstart.py:{name}").model.attention == config.preset(name)
    for power in (2, 4, 6) if config.PRESETS[name]["kernel"].startswith("power") else (2,):
        for exponent in range(8, 17):
            loaded = config.load(f"configs/gpt2_124m.py:{name},p={power},context={2**exponent}")
            attention = config.preset(name, power=power)
            if attention.position == "learned_absolute":
                attention = dataclasses.replace(attention, max_document_length=2**exponent)
            assert loaded.model.attention == attention
            assert loaded.data.batch_size * 2**exponent == 524_288


def test_mistakes_in_names_and_arguments():
    of_124m = "the arguments of config 'gpt2_124m' are preset, p, context, data"
    for spec, message in (
        ("configs/quick.py", "is neither a file nor a config of the package; the nearest names are"),
        ("configs", "--config names 'configs', which is a folder; the nearest names are "),
        ("quickstart:conformist", "preset is 'conformist'; it must be one of softmax,"),
        ("quickstart:", "preset is ''; it must be one of softmax,"),
        ("quickstart:sympwo", "; did you mean sympow?"),
        ("quickstart:sympow,p=4", "has no argument 'p'; the arguments of config 'quickstart' are preset"),
        ("text", "needs files"),
        ("text:", "needs files"),
        ("gpt2_124m:sympow,q=3", f"has no argument 'q'; {of_124m}"),
        ("gpt2_124m:sympow,contxt=512", "has no argument 'contxt'; did you mean context?"),
        ("gpt2_124m:sympow,4", "--config 'gpt2_124m:sympow,4': too many positional arguments; the"),
        ("gpt2_124m:sympow,preset=sympow", "multiple values for argument 'preset'"),
        ("gpt2_124m:p=2,p=4", "config 'gpt2_124m' is given argument 'p' twice"),
        ("gpt2_124m:softmax,p=4", "p is 4, but the kernel 'softmax' of preset 'softmax' has none; leave"),
        ("gpt2_124m:p=two", "argument 'p' of config 'gpt2_124m' is 'two'; it must be INT"),
        ("gpt2_124m:sympow,context=300", "context is 300; it must be one of 256, 512"),
    ):
        with mistakes.refused(message):
            config.load(spec)


def test_arguments_have_the_types_of_the_signature(tmp_path):
    first = "a: int, b: Optional[float] = 1.0, *rest: int, c, d: bool = False, e_f: str = 'y'"
    second = "a: str, *rest: int, **changes: Optional[int]"
    third = "a: str = '', b: tuple[int, ...] = (), *rest: str, c: tuple[str, ...] = ()"
    for signature, arguments, expected in (
        (first, "1,c=2", "(1, 1.0, (), '2', False, 'y')"),
        (first, "1,none,3,4,c=,d=true,e-f=x", "(1, None, (3, 4), '', True, 'x')"),
        (first, "c=a=b,b=0.5,a=1", "(1, 0.5, (), 'a=b', False, 'y')"),
        (second, "1,2,b=3,c=none", "('1', (2,), {'b': 3, 'c': None})"),
        (second, "a=x,a-b=4", "('x', (), {'a_b': 4})"),
        (third, "'x,y',\"64,128\"", "('x,y', (64, 128), (), ())"),
        (third, 'b="64,128", a=\'say "x,y"\',c=p', "('say \"x,y\"', (64, 128), (), ('p',))"),
        (third, "it's,5,open,c=p", "(\"it's\", (5,), ('open',), ('p',))"),
        (second, "1,b=x", "argument 'b' of config '.*' is 'x'; it must be INT or none"),
        (second, "1,b=3,b=4", "given argument 'b' twice"),
        (second, "b=3", r"missing a required argument: 'a'; the arguments of config .* are a, \*rest"),
        ("a: list[int]", "1", r"argument 'a' of config .* has the type list\[int\], which cannot be"),
    ):
        names = [part.split(":")[0].strip().lstrip("*") for part in re.split(r",(?![^\[]*\])", signature)]
        (tmp_path / "mine.py").write_text(
            f"from typing import Optional\ndef get_config({signature}):\n"
            f"    raise ValueError(repr(({', '.join(names)},)))\n"
        )
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            config.load(f"{tmp_path}/mine.py:{arguments}")
        found = str(raised.value).partition(" with ValueError: ")[2] or str(raised.value)
        assert found == expected if expected.startswith("(") else re.search(expected, found)
    # In a path, "=" has no meaning.
    assert config.load("text:a=b.txt,c").data.paths == ("a=b.txt", "c")
    assert config.load("text:'a,b.txt',c").data.paths == ("a,b.txt", "c")
