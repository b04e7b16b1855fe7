"""Changed files, settings and arguments end in success or in an error of one short line, within a limit of memory."""

import contextlib
import dataclasses
import functools
import gzip
import io
import json
import pathlib
import resource
import struct
import tempfile
from typing import Any

import numpy as np
import PIL.Image
import pytest
import safetensors.numpy
from flax import nnx

pytest.importorskip("hypothesis")

import hypothesis
from hypothesis import strategies as st

from sympow_jax import config, data, generation, loop, models, training, weights
from sympow_jax.commands import command_line
from sympow_jax.config import fields, serialize
from sympow_jax.data import tokenizer
from sympow_jax.process import workdir
from sympow_jax.training import writers
from sympow_jax.weights import families
from tests.data import builders

pytestmark = pytest.mark.robust

# Errors that programs print as one line (`signals.user_errors`).
ACCEPTED = (ValueError, OSError, NotImplementedError)
MOST_CHARACTERS, MOST_BYTES = 600, 2 << 30
DEEP = [begin * n + "0" + end * n for n in (40, 100_000) for begin, end in (("[", "]"), ('{"a":', "}"))]
# JSON that breaks what does not expect it, and texts that are no JSON.
HOSTILE = [
    *DEEP,
    "9" * 5000,
    "\x00",
    *["1e400", "{", "]", ",", '"', "NaN", "Infinity", "null", "true", "{}", "[]"],
]
HOSTILE += map(json.dumps, ["", "x", "é\u2028\n\x00", "x" * 100_000, "..", "/dev/zero", [[]], ["x"] * 1000])
HOSTILE += map(json.dumps, [0, -1, 1, 2, 0.5, -0.0, 1e-300, 1e300, 2**31, 2**32, 2**63, 2**64, 10**9, 10**18])
BYTES = [b"\xff" * 4, b"\xff" * 8, b"\x00" * 8, b"\x7f" * 8, b"\x00" * 64]


def changed(files, changes):
    """Returns the files after changes: (file, path in its JSON, text or None) or (file, offset, removed bytes, new)."""
    files = dict(files)
    for name, *change in changes:
        match change:
            case _ if name not in files:
                pass
            case [(), None]:
                del files[name]
            case [(), text]:
                files[name] = text.encode()
            case [int(at), removed, inserted]:
                files[name] = files[name][:at] + inserted + files[name][at + removed :]
            case [(*parents, last), text]:
                with contextlib.suppress(
                    ValueError, LookupError, TypeError, RecursionError
                ):  # changed before
                    node = document = json.loads(files[name])
                    for key in parents:
                        node = node[key]
                    node[last] = "\x00mark"
                    if text is None:
                        del node[last]
                    files[name] = json.dumps(document).replace(json.dumps("\x00mark"), text or "").encode()
    return files


def parts(value, path=()):
    """Yields the path of every part of a JSON value, and of a key that each object does not have."""
    yield path
    if isinstance(value, list):
        value = dict(enumerate(value))
    elif isinstance(value, dict):
        value = value | {"x" * 1000: None}
    for key, part in value.items() if isinstance(value, dict) else ():
        yield from parts(part, (*path, key))


def changes(files):
    """Returns one to three small changes to files, most of which are to JSON where a file is JSON."""

    def change(name):
        content = files[name]
        # Half of the changes are near the beginning, where headers are.
        at = st.integers(0, len(content)) | st.integers(0, min(len(content), 256))
        removed = st.sampled_from([1, 0, 2, 8, 64, len(content)])
        splice = st.tuples(st.just(name), at, removed, st.binary(max_size=16) | st.sampled_from(BYTES))
        try:
            paths = list(parts(json.loads(content)))
        except ValueError:
            return splice | splice | splice | st.just((name, (), None))
        text = st.none() | st.sampled_from(HOSTILE) | (st.integers() | st.text(max_size=20)).map(json.dumps)
        part = st.tuples(st.just(name), st.sampled_from(paths), text)
        return part | part | splice

    return st.lists(st.sampled_from(sorted(files)).flatmap(change), min_size=1, max_size=3)


def write(files, folder):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def written(make):
    with tempfile.TemporaryDirectory() as name:
        make(folder := pathlib.Path(name))
        return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def as_json(**values):
    return {f"{name}.json": json.dumps(value).encode() for name, value in values.items()}


def settings(**changes):
    attention = config.preset("conformal", exact_window=4)
    sizes: dict[str, Any] = {"vocab_size": 32, "layers": 1, "width": 16, "heads": 2, "dtype": "float32"}
    model = config.ModelConfig(**sizes, attention=attention)
    return dataclasses.replace(config.Config(model=model, data=rows_of("text", "x")), **changes)


def rows_of(source, path, **changes):
    shared: dict[str, Any] = {"heldout_fraction": 0.0, "context_length": 8, "batch_tokens": 16}
    return config.DataConfig(source=source, paths=(str(path),), **shared | changes)


@functools.cache
def model():
    return models.DecoderLM(settings().model, rngs=nnx.Rngs(0))


def published():
    configs = {}
    for name, family in families.FAMILIES.items():
        sizes = dict.fromkeys(family.sizes.values(), 2) | {family.sizes["vocab_size"]: 32}
        required = {family.length: 16, "model_type": family.model_type, "eos_token_id": 3}
        configs[name] = required | dict(family.defaults) | dict(family.fixed) | sizes
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
    return as_json(**configs, scaled=configs["llama"] | {"rope_scaling": scaling})


def read_published(folder):
    for path in sorted(folder.iterdir()):
        weights.read_settings(path.rename(folder / "config.json"))


def safetensors_parts(content):
    """Returns a safetensors file as its header, which changes as JSON does, and its tensors."""
    end = 8 + struct.unpack("<Q", content[:8])[0]
    return {"length": b"", "header.json": content[8:end], "tensors": content[end:]}


def join_safetensors(folder):
    length, header, tensors = ((folder / name).read_bytes() for name in ("length", "header.json", "tensors"))
    (folder / "model.safetensors").write_bytes((length or struct.pack("<Q", len(header))) + header + tensors)
    return folder / "model.safetensors"


@functools.cache
def saved_weights():
    files = written(lambda folder: weights.save(folder / "model.safetensors", settings(), model()))
    return files["model.safetensors"]


def indexed():
    tensors, files, weight_map = safetensors.numpy.load(saved_weights()), {}, {}
    for number in range(2):
        name = f"model-{number}.safetensors"
        files[name] = safetensors.numpy.save({key: tensors[key] for key in sorted(tensors)[number::2]})
        weight_map |= dict.fromkeys(sorted(tensors)[number::2], name)
    return files | as_json(**{"model.safetensors.index": {"metadata": {}, "weight_map": weight_map}})


def saved_state():
    state = generation.Program(model()).init_state(2)
    (content,) = written(lambda f: generation.save_state(f / "state", model(), state)).values()
    return content


def run_of_one_step():
    def make(folder):
        (folder / "text").write_text("the quick brown fox " * 20)
        changes = {"data": rows_of("text", folder / "text"), "training": config.TrainingConfig(steps=1)}
        changes["evaluation"] = config.EvaluationConfig(context_lengths=(), every=0)
        changes["model"] = dataclasses.replace(settings().model, vocab_size=256)
        loop.train(settings(**changes), folder / "run")

    kept = ("run/checkpoints", "run/config.json")
    files = written(make).items()
    return {name.removeprefix("run/"): content for name, content in files if name.startswith(kept)}


RECORD = {"source": "text", "paths": ["x"], "digest": "0", "bytes": 1}


def read_records(folder):
    line = (folder / "line.json").read_bytes()
    (folder / "metrics.jsonl").write_bytes(line + b"\n" + line + b"\n")
    writers.JsonLines(folder / "metrics.jsonl", start=2).close(failed=False)
    records = workdir.read_description(folder), RECORD
    if different := serialize.differences(*map(serialize.flatten, records)):
        raise ValueError(different)


def zarr_array(**options):
    values = np.arange(8 * 64, dtype=np.uint16).reshape(8, 64)
    return written(lambda folder: builders.write_zarr(folder, values, chunks=(4, 64), **options))


def token_file():
    summary = {"tokenizer": "byte", "vocab_size": 256, "separator": 0, "token_dtype": "uint16"}
    summary |= {"documents": 2, "tokens": 14}
    content = np.tile(np.array([5, 6, 0, 7, 8, 9, 0], "<u2"), 2).tobytes()
    return as_json(prepared=summary) | {"train.bin": content}


LINES = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in ("fox " * 20, "", "é" * 30, None))


def parquet():
    return written(lambda folder: builders.write_parquet(folder / "a.parquet", ["fox " * 20, None, ""]))


def json_lines():
    pytest.importorskip("fsspec")
    return {"line.json": json.dumps({"text": "a"}).encode(), "a.jsonl.gz": gzip.compress(LINES, mtime=0)}


def read_json_lines(folder):
    line = (folder / "line.json").read_bytes()
    (folder / "a.jsonl").write_bytes(LINES + line + b"\n" + LINES)
    for name in ("a.jsonl", "a.jsonl.gz"):
        data.describe(rows_of("jsonl", folder / name))


def tokenizer_files():
    vocabulary = {"[UNK]": 0, "the": 1, "fox": 2, "</s>": 3}
    files = written(lambda folder: builders.write_words(folder / "tokenizer.json", vocabulary, ["</s>"]))
    return files | as_json(tokenizer_config={"eos_token": "</s>"})


def read_tokenizer(folder):
    loaded = tokenizer.load(str(folder))
    loaded.decode(loaded.encode(b"the quick fox").tolist())


def pictures():
    def make(folder):
        for name in ("ape/a.png", "cat/b.jpeg"):
            (folder / name).parent.mkdir()
            PIL.Image.fromarray(np.arange(360, dtype=np.uint8).reshape(12, 10, 3)).save(folder / name)

    return written(make)


def read_rows(source, name="", *, task=None, **changes):
    def read(folder):
        described = rows_of(source, folder / name, **changes)
        rows = data.train_dataset(described, task=task, vocab_size=65_536)
        for index in range(2):
            rows[index]
        data.describe(described)

    return read


TWO = config.TaskConfig(name="classification", classes=2)
ZARR_HEADER = [[("0.0", at, 4, b"\xff\xff\xff\x7f")] for at in (4, 8, 12)]
# Good files, what reads them, and changes that were once a problem. A reader of another format is one more row.
FILES = {
    "settings of a run": (lambda: as_json(config=dataclasses.asdict(settings())), workdir.read_config),
    "config.json of a published model": (published, read_published),
    "weights": (
        lambda: safetensors_parts(saved_weights()),
        lambda folder: weights.load(join_safetensors(folder), settings()),
    ),
    "index of weights": (indexed, lambda folder: weights.load(folder, settings())),
    "state of generation": (
        lambda: safetensors_parts(saved_state()),
        lambda folder: generation.restore_state(join_safetensors(folder), model()),
        [("header.json", ("__metadata__", "model"), "null")],
    ),
    "checkpoint": (run_of_one_step, training.restore_model),
    "records of a run": (
        lambda: as_json(data=RECORD, line={"step": 3, "loss": 1.0}),
        read_records,
        *([("line.json", ("step",), text)] for text in ('"3"', "[]")),
    ),
    "Zarr": (
        zarr_array,
        read_rows("longcrawl64"),
        *([(".zarray", ("chunks", 0), text)] for text in (str(2**34), str(10**18), DEEP[-1])),
    ),
    # The cases change the sizes in the header of a chunk, as in LongCrawl64: of it decompressed, of a block, of it all.
    "Zarr with Blosc": (
        lambda: zarr_array(
            compressor={"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0}
        ),
        read_rows("longcrawl64"),
        *ZARR_HEADER,
    ),
    "token file": (token_file, read_rows("tokens", "train.bin", document_separator=0)),
    "parquet": (parquet, lambda folder: data.describe(rows_of("parquet", folder / "a.parquet"))),
    "JSON lines": (
        json_lines,
        read_json_lines,
        [("a.jsonl.gz", 0, 1000, gzip.compress(bytes(10**6)) * 400)],  # 400 MB of zeros
    ),
    "tokenizer": (tokenizer_files, read_tokenizer, [("tokenizer.json", ("x",), DEEP[-1])]),
    "images": (pictures, read_rows("images", task=TWO, image_size=8)),
    "labeled texts": (
        lambda: {"a.tsv": b"sentence\tlabel\ngood\t1\nbad\t0\n"},
        read_rows("tsv", task=TWO, text_columns=("sentence",)),
        [("a.tsv", (), "x" * 1000)],
        [("a.tsv", 26, 1, bytes(200))],  # a label whose escapes are four times as long as it is
    ),
}
# These take up to a second per input.
EXAMPLES = {"checkpoint": 20, "weights": 40, "index of weights": 40}


def read_bad(read, value):
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, most))
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            read(value)
    except ACCEPTED as error:
        reason = str(error)
    else:
        return True
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    assert "\n" not in reason
    assert len(reason) <= MOST_CHARACTERS
    return False


def try_inputs(read, inputs, examples, cases=()):
    """Gives past problems and random inputs to a reader; at least one must be refused."""
    accepted = []

    def attempt(value):
        accepted.append(read_bad(read, value))

    for case in cases:
        attempt = hypothesis.example(case)(attempt)
    health = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
    hypothesis.settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=health
    )(hypothesis.given(inputs)(attempt))()
    assert not all(accepted)


@pytest.mark.parametrize("name", FILES)
def test_files(name):
    make, read, *cases = FILES[name]
    good = make()

    def read_changed(some):
        with tempfile.TemporaryDirectory() as folder:
            write(changed(good, some), pathlib.Path(folder))
            read(pathlib.Path(folder))

    read_changed([])
    try_inputs(read_changed, changes(good), EXAMPLES.get(name, 200), cases)


def test_flags():
    choices = {s.path: list(s.choices) for group in fields.groups(config.Config) for s in group.settings}
    texts = ["", "\n", "é", "9" * 5000, "x" * 100_000, "'a','b'"]
    words = "none true nan -inf 1e400 1e9 1_000 () ( [ , 1,2 ' \" (((( * a=b 1000000*softmax softmax,linear"
    texts += f"{words} conformal 0*softmax 3* *=1 x=nan -1 0".split()

    def flag(path):
        values = st.sampled_from(texts + choices[path]) | st.text(max_size=20) | st.integers().map(str)
        return values.map(lambda value: f"--config.{path}={value}")

    def read(flags):
        command_line.parse_training(["--config=quickstart", "--workdir=unused", *flags])

    read([])
    flags = st.lists(st.sampled_from(sorted(choices)).flatmap(flag), min_size=1, max_size=4)
    try_inputs(read, flags, 100)
