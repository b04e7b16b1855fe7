"""Tests of finding tokenizers: files, folders and repositories, and of files that are no tokenizers."""

import json
import pathlib
import sys
import types

import pytest

from sympow_jax.data import tokenizer
from tests.data import builders

VOCABULARY = {"[UNK]": 0, "the": 1, "first": 2, "</s>": 3, "end": 4}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Writes a folder in Hugging Face's layout, and makes its parent the working folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "words"
    path.mkdir()
    builders.write_words(path / "tokenizer.json", VOCABULARY, ["</s>"])
    (path / "tokenizer_config.json").write_text('{"eos_token": "end"}')
    return path


@pytest.mark.parametrize("name", ["./words", "words/", "words/tokenizer.json"])
def test_the_separator_is_the_eos_token(folder, name):
    loaded = tokenizer.load(name)
    assert loaded.name == pathlib.Path(name).name
    assert (loaded.vocab_size, loaded.separator) == (5, 4)
    assert loaded.encode(b"the first").tolist() == [1, 2]
    assert 3 not in loaded.encode(b"the </s>").tolist()  # text, which spells a special token
    settings = folder / "tokenizer_config.json"
    settings.write_text('{"eos_token": {"content": "the", "lstrip": false}}')
    assert tokenizer.load(name).separator == 1
    for content in ('{"eos_token": null}', "{}"):
        settings.write_text(content)
        assert tokenizer.load(name).separator == 3
    settings.unlink()
    assert tokenizer.load(name).separator == 3


def test_absolute_names(folder):
    names = ("byte", "gpt2", "hf://a/b.c", "./words", "words.json")
    assert [tokenizer.absolute_name(name) for name in names] == [*names[:3], str(folder), f"{folder}.json"]


def test_files_that_are_no_tokenizers(folder, tmp_path):
    settings, path = folder / "tokenizer_config.json", folder / "tokenizer.json"
    for content, message in (
        ('{"eos_token": 5}', r"the eos_token 5 of tokenizer_config\.json is no token of"),
        ('{"eos_token": {"content": []}}', r"the eos_token \[\] of tokenizer_config\.json is no"),
        ('{"eos_token": "stop"}', r"=\./words: the eos_token 'stop' of tokenizer_config\.json is no token"),
        ('{"a":' * 100_000, r"tokenizer_config\.json: its JSON has too many levels|is not JSON"),
    ):
        settings.write_text(content)
        with builders.refused(message):
            tokenizer.load("./words")
    settings.unlink()
    table = json.loads(path.read_text()) | {"added_tokens": []}
    for model, message in (
        ({"type": "WordLevel", "vocab": {}, "unk_token": "x"}, "has no tokens; name the file of a trained"),
        ({"type": "WordLevel", "vocab": {"x": -5}, "unk_token": "x"}, "is not a `tokenizers` file: .*-5"),
        ({"type": "BPE", "vocab": {"x": 0}, "merges": ["x q"]}, "is not a `tokenizers` file: .*out of vocab"),
        ({"type": "Unigram", "vocab": [["x", 0.0]], "unk_id": 7}, "is not a `tokenizers` file: "),
    ):
        path.write_text(json.dumps(table | {"model": model}))
        with builders.refused(message):
            tokenizer.load("words/tokenizer.json")
    builders.write_files(
        tmp_path / "others", {"vocab.json": b"{}", "merges.txt": b"", "tokenizer.model": b""}
    )
    with builders.refused(r"has no tokenizer\.json, the only kind of file that is read;"):
        tokenizer.load(str(tmp_path / "others"))


def test_repositories_of_the_hub(folder, monkeypatch):
    asked = []

    def download(repo, *, revision, allow_patterns):
        asked.append((repo, revision, allow_patterns))
        return str(folder)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=download))
    loaded = tokenizer.load("hf://a/b@v1")
    assert (loaded.name, loaded.separator) == ("hf://a/b@v1", 4)
    assert asked == [("a/b", "v1", ["tokenizer.json", "tokenizer_config.json"])]
    # Workers load the downloaded files under a name that needs no network.
    assert tokenizer.local_name("hf://a/b") == str(folder)
    assert tokenizer.load(tokenizer.local_name("hf://a/b")).fingerprint == loaded.fingerprint
    assert [tokenizer.local_name(name) for name in ("byte", "gpt2", "./words")] == ["byte", "gpt2", "./words"]


def test_the_limits_that_a_file_sets_are_for_models(folder):
    tokenizers = pytest.importorskip("tokenizers")
    built = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    built.enable_truncation(2)
    built.enable_padding(length=9)
    built.save(str(folder / "tokenizer.json"))
    assert tokenizer.load("./words").encode(b"the first the first").tolist() == [1, 2, 1, 2]


def test_tables_of_tiktoken(monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([i]): i for i in range(256)}
    plain = tiktoken.Encoding("plain", pat_str=".", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "plain", plain)
    assert tokenizer.load("plain").separator is None
    for rank in (-5, 1 << 40, 3):
        table = {
            "name": "strange",
            "pat_str": ".",
            "mergeable_ranks": ranks | {b"th": rank},
            "special_tokens": {},
        }
        constructors = {"strange": lambda table=table: table}
        monkeypatch.setattr(tiktoken.registry, "ENCODING_CONSTRUCTORS", constructors)
        with builders.refused(r"^--tokenizer=strange is no file and cannot be had from"):
            tokenizer.load("strange")


def test_errors_name_the_document(folder):
    (folder / "tokenizer_config.json").unlink()
    path = folder / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "[UNK]"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": model}))
    loaded = tokenizer.load("./words/tokenizer.json")
    assert loaded.encode_document(b"x x", name="page 3").tolist() == [0, 0]
    for document, message in {
        b"x\xff": r"^page 3 is not UTF-8 at byte 1; leave it out, convert it, or use the tokenizer `byte`$",
        b"x y": r"^page 3: tokenizer tokenizer\.json cannot encode a text of 3 char.*; leave it out$",
    }.items():
        with builders.refused(message):
            loaded.encode_document(document, name="page 3")


def test_the_begin_of_a_text(tmp_path):
    for template, settings, begin in (
        (True, None, 1),
        (True, {"bos_token": "<s>", "add_bos_token": True}, 1),
        (True, {"bos_token": "<s>", "add_bos_token": False}, 1),  # as `transformers` 5 reads it
        (False, {"bos_token": "<s>"}, None),
        (False, {"bos_token": {"content": "<s>"}, "add_bos_token": True}, 1),
        (False, {"bos_token": None, "add_bos_token": True}, None),
    ):
        builders.write_byte_fallback(tmp_path / "tokenizer.json", begin="<s>" if template else None)
        if settings is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "</s>"}))
        loaded = tokenizer.load(str(tmp_path))
        assert (loaded.begin, loaded.separator) == (begin, 2)
        plain = loaded.encode(b"ab").tolist()
        assert plain == [259, 260, 261]
        assert loaded.encode_document(b"ab", name="x").tolist() == [begin, *plain][begin is None :]
        assert loaded.encode_document(b"", name="x").tolist() == []


def test_other_post_processors(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    processors, path = tokenizers.processors, tmp_path / "tokenizer.json"
    template = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    for processor, begin in [
        (processors.BertProcessing(("</s>", 2), ("<s>", 1)), 1),
        (
            processors.Sequence(
                [processors.ByteLevel(), processors.RobertaProcessing(("</s>", 2), ("<s>", 1))]
            ),
            1,
        ),
        (processors.ByteLevel(), None),
        (template, None),
        # The separator before a document is the same id.
        (processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 2)]), 2),
    ]:
        builders.write_byte_fallback(path, begin=None)
        built = tokenizers.Tokenizer.from_file(str(path))
        built.post_processor = processor
        built.save(str(path))
        loaded = tokenizer.load(str(path))
        assert loaded.begin == begin
        first = [1] if begin == 1 else []
        assert loaded.encode_document(b"a", name="x").tolist() == [*first, 259, 260]
