"""Tests of `hf://` paths and tokenizers, against a server that imitates the Hugging Face Hub."""

import itertools
import json
import os

import numpy as np
import pytest

from sympow_jax import config as config_lib
from sympow_jax import data
from sympow_jax.data import files, prepare, tokenizer
from tests import hub_server
from tests.data import builders
from tools import launching

pytest.importorskip("pyarrow.parquet")
huggingface_hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")
http = pytest.importorskip("huggingface_hub.utils")

pytestmark = pytest.mark.robust

FOLDER = "hf://datasets/org/words/sample/10BT"
DROP = hub_server.HubServer.DROP


def _use_hub(url: str, cache: str) -> None:
    """Makes `huggingface_hub`, which reads the variable when it is imported, use a server without pauses."""
    os.environ["HF_ENDPOINT"] = url
    constants.ENDPOINT = url
    constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_CACHE = cache
    http.http_backoff.__kwdefaults__.update(base_wait_time=0.001, max_wait_time=0.001)
    huggingface_hub.HfFileSystem.clear_instance_cache()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Runs a server with the dataset org/words: two files of 60 short texts in one folder."""
    monkeypatch.setenv("HF_ENDPOINT", "")
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE", "HF_HUB_CACHE"):
        monkeypatch.setattr(constants, name, "")
    for name, value in http.http_backoff.__kwdefaults__.items():
        monkeypatch.setitem(http.http_backoff.__kwdefaults__, name, value)
    folder = tmp_path / "hub"
    sample = folder / "org/words/sample/10BT"
    sample.mkdir(parents=True)
    (folder / "org/words/README.md").write_text("Words.")
    for number in range(2):
        texts = [f"text {index} of file {number}, " * 5 for index in range(60)]
        builders.write_parquet(sample / f"{number:03}_00000.parquet", texts)
        for suffix in (".jsonl", ".jsonl.gz"):
            builders.write_jsonl(sample / f"{number:03}_00000{suffix}", texts)
    with hub_server.running(folder) as server:
        _use_hub(server.url, str(tmp_path / "cache"))
        yield server
    huggingface_hub.HfFileSystem.clear_instance_cache()


def _config(**changes) -> config_lib.DataConfig:
    settings = {"source": "parquet", "paths": (FOLDER,), "heldout_fraction": 0.0, "tokenizer_workers": 0}
    return builders.data_config(context_length=64, **settings | changes)


def _batches(config: config_lib.DataConfig):
    return data.train_dataset(config, vocab_size=50_304).batches(config.batch_size)


def _inputs(batches, count: int) -> list[np.ndarray]:
    return [batch["inputs"] for batch in itertools.islice(batches, count)]


def test_files_of_a_dataset(hub):
    both = ["000_00000.parquet", "001_00000.parquet"]
    for path, keys in (
        (FOLDER, both),
        (f"{FOLDER}/00[0]*.parquet", both[:1]),
        (f"{FOLDER}/001_00000.parquet", both[1:]),
        ("hf://datasets/org/words@main/sample/10BT/*.parquet", both),
        ("hf://datasets/org/words/*/*/*.parquet", [f"sample/10BT/{name}" for name in both]),
    ):
        found = files.find("data.paths", [path], suffix=".parquet")
        assert [file.key for file in found] == keys
        assert {file.size for file in found} <= {
            path.stat().st_size for path in hub.folder.rglob("*.parquet")
        }
    for path, message in (
        ("hf://datasets/org/none/*.parquet", r"no such file or folder; correct the path, or check your"),
        (f"{FOLDER}/none.parquet", r"data\.paths hf://.*none\.parquet: there is no such file or folder"),
        (f"{FOLDER}/x*.parquet", r"data\.paths: no file matches 'hf://.*x\*\.parquet'; correct the"),
        ("hf://datasets/org", r"cannot read data\.paths hf://datasets/org: .*must be 'namespace/name'"),
    ):
        with builders.refused(message):
            files.find("data.paths", [path])


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_are_those_of_local_files(hub, workers):
    remote = _batches(_config(tokenizer_workers=workers))
    local = _batches(_config(paths=(str(hub.folder / "org/words"),)))
    np.testing.assert_array_equal(_inputs(remote, 30), _inputs(local, 30))
    assert remote.get_state() == local.get_state()
    assert hub.requests.keys() == {f"org/words/sample/10BT/00{number}_00000.parquet" for number in range(2)}
    remote.close()


FAULTS = {401: "401 Unauthorized", 404: "404 Not Found", 429: "429 Too Many Requests", 500: "500 Internal"}


def test_a_hub_that_refuses_or_is_not_there(hub, tmp_path):
    for status, reason in FAULTS.items():
        hub.fault = lambda path, status=status: status
        with builders.refused(rf"^cannot read data\.paths {FOLDER}: .*{reason}.*; check"):
            _batches(_config())
    _use_hub(f"http://127.0.0.1:{launching.free_port()}", str(tmp_path))
    with builders.refused(rf"^cannot read data\.paths {FOLDER}: .*Connection refused; check"):
        _batches(_config())


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".jsonl.gz"])
def test_a_hub_that_fails_while_rows_are_read(hub, suffix):
    """Reading ends with one line, and continues with the rows that would have followed."""
    config = _config(source=suffix.split(".")[1], paths=(f"{FOLDER}/*{suffix}",))
    expected = _inputs(_batches(config), 40)
    for status in (404, 500, DROP):
        batches = _batches(config)
        found, state = _inputs(batches, 20), batches.get_state()
        batches.set_state(state)  # opens the files again
        hub.fault = lambda path, status=status: status if path.startswith("/cdn/") else None
        reason = FAULTS.get(status, "peer closed connection")
        with builders.refused(rf"^cannot read {FOLDER}/00._00000\{suffix}: .*{reason}.*; check th"):
            next(batches)
        hub.fault = lambda path: None
        batches = _batches(config)
        batches.set_state(state)
        np.testing.assert_array_equal(found + _inputs(batches, 20), expected)


def test_preparation_continues_after_the_hub_has_failed(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "PIECE_BYTES", 1 << 12)
    options = prepare.Options(text_column="text")
    prepare.write_bin(
        str(tmp_path / "local.bin"), [str(hub.folder / "org/words/sample/10BT/*.parquet")], options
    )
    out, paths = tmp_path / "remote.bin", [f"{FOLDER}/*.parquet"]
    hub.fault = lambda path: DROP if path.endswith("/001_00000.parquet") else None
    with builders.refused(rf"^cannot read {FOLDER}/001_00000\.parquet: peer closed"):
        prepare.write_bin(str(out), paths, options)
    before = dict(hub.requests)
    hub.fault = lambda path: None
    prepare.write_bin(str(out), paths, options)
    local = {path.name: path.read_bytes() for path in (tmp_path / "local.bin").iterdir()}
    assert len(local) > 3
    assert {path.name: path.read_bytes() for path in out.iterdir()} == local
    # The first file was finished: of it, the end alone is read again, which says what the column holds.
    first = "org/words/sample/10BT/000_00000.parquet"
    assert hub.requests[first] == before[first] + 1


def test_a_tokenizer(hub, tmp_path):
    folder = hub.folder / "org/tokens"
    folder.mkdir(parents=True)
    words = {"[UNK]": 0, "text": 1, "of": 2, "file": 3, "<end>": 4}
    builders.write_words(folder / "tokenizer.json", words, ["<end>"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (folder / "model.bin").write_bytes(bytes(100))
    loaded = tokenizer.load("hf://org/tokens@main")
    assert (loaded.separator, loaded.encode(b"file of text").tolist()) == (4, [3, 2, 1])
    assert hub.requests.keys() == {"org/tokens/tokenizer.json", "org/tokens/tokenizer_config.json"}
    (batch,) = _inputs(_batches(_config(tokenizer="hf://org/tokens", tokenizer_workers=1)), 1)
    assert {1, 2, 3, 4} <= set(batch.ravel().tolist()) <= {0, 1, 2, 3, 4}
    # What has been downloaded is used when the Hub cannot be reached.
    hub.fault = lambda path: 500
    assert tokenizer.load("hf://org/tokens@main").fingerprint == loaded.fingerprint
    with builders.refused(r"^cannot download hf://org/others: .*"):
        tokenizer.load("hf://org/others")
