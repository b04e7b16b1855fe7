"""Readers of untrusted input: a valid input, a strategy of invalid ones, and past failures."""

import dataclasses
import functools
import gzip
import io
import json
import pathlib
import struct
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import PIL.Image
import safetensors.numpy
from flax import nnx
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from sympow_jax import config, data, generation, loop, models, ops, training, weights
from sympow_jax.commands import command_line
from sympow_jax.config import fields, serialize
from sympow_jax.data import files, sources, tokenizer
from sympow_jax.data.sources import tokens, zarr
from sympow_jax.process import workdir
from sympow_jax.training import writers
from sympow_jax.weights import families
from tools.fuzz import inputs
from tools.fuzz.inputs import Part, Splice

# Errors that programs print as one line (`cli.user_errors`).
ACCEPTED = (ValueError, OSError, NotImplementedError)

# Flags of a command line.
_TEXTS: tuple[str, ...] = ("", "\n", "é", "9" * 5000, "x" * 100_000, "none", "true", "nan", "inf", "-inf")
_TEXTS += ("1e400", "1e9", "1_000", "()", "(", "[", ",", ",,", "1,2", "'", '"', "'a','b'", "((((", "*", "a=b")
_TEXTS += ("1000000*softmax", "softmax,linear", "conformal", "0*softmax", "3*", "*=1", "x=nan", "-1", "0")
_FLAGS = {
    setting.path: setting.choices for group in fields.groups(config.Config) for setting in group.settings
}
_FLAG = st.sampled_from(sorted(_FLAGS)).flatmap(
    lambda path: st.tuples(
        st.sampled_from((path, path, path, path[:-1])),
        st.sampled_from((*_TEXTS, *_FLAGS[path])) | st.text(max_size=20) | st.integers().map(str),
    )
)
# A record of the data of a run.
_DESCRIPTION = {"source": "text", "paths": ["x"], "digest": "0", "bytes": 1}
# Documents of a corpus.
_TEXT = ["the quick fox", None, "", "é" * 30]
_LINES = b"".join(json.dumps({"text": text, "ids": [1]}).encode() + b"\n" for text in _TEXT)
_BLOSC = {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0}
# Lengths of axes.
_SIZES = (1, 2, 3, 4, 8, 17, 64)


@dataclasses.dataclass(frozen=True)
class Reader:
    """A function that reads untrusted input.

    Attributes:
        good: input that must succeed.
        bad: strategy of inputs.
        read: ends in success, or in one of the errors `ACCEPTED`.
        examples: number of inputs for the table.
        cases: inputs that were once a problem, which are tried first.
    """

    good: Any
    bad: st.SearchStrategy
    read: Callable[[Any], Any]
    examples: int = 1000
    cases: Sequence[Any] = ()


def _files(good: Callable[[], inputs.Files], read: Callable[[pathlib.Path], Any], **options: Any) -> Reader:
    """Returns a reader of a folder, whose input is a list of changes to the good files in it."""
    good = functools.cache(good)

    def read_changed(changes: Sequence[inputs.Change]) -> None:
        with tempfile.TemporaryDirectory() as name:
            inputs.write_tree(inputs.changed(good(), changes), folder := pathlib.Path(name))
            read(folder)

    return Reader([], st.deferred(lambda: inputs.changes(good())), read_changed, **options)


def _made(write: Callable[[pathlib.Path], Any]) -> inputs.Files:
    """Returns the files that a function writes to a folder."""
    with tempfile.TemporaryDirectory() as folder:
        write(pathlib.Path(folder))
        return inputs.read_tree(pathlib.Path(folder))


def _json(**files: Any) -> inputs.Files:
    return {f"{name}.json": json.dumps(value).encode() for name, value in files.items()}


@functools.cache
def _settings() -> config.Config:
    attention = config.preset("conformal", exact_window=4)
    return config.Config(
        model=config.ModelConfig(
            vocab_size=32, layers=2, width=16, heads=2, dtype="float32", attention=attention
        ),
        data=config.DataConfig(paths=("x",), context_length=8, batch_tokens=16),
    )


def _data(source: str, path: pathlib.Path, **changes: Any) -> config.DataConfig:
    shared: dict[str, Any] = {"heldout_fraction": 0.0, "context_length": 8, "batch_tokens": 16}
    return config.DataConfig(source=source, paths=(str(path),), **shared | changes)


@functools.cache
def _model() -> models.DecoderLM:
    return models.DecoderLM(_settings().model, rngs=nnx.Rngs(0))


def _read_flags(settings: Sequence[tuple[str, str]]) -> None:
    arguments = [f"--config.{path}={text}" for path, text in settings]
    command_line.parse_training(["--config=quickstart", "--workdir=unused", *arguments])


def _good_settings() -> inputs.Files:
    return _json(config=dataclasses.asdict(_settings()))


def _good_published() -> inputs.Files:
    configs = {}
    for name, family in families.FAMILIES.items():
        sizes = dict.fromkeys(family.sizes.values(), 2) | {family.sizes["vocab_size"]: 32}
        required = {family.length: 16, "model_type": family.model_type, "eos_token_id": 3}
        configs[name] = required | dict(family.defaults) | dict(family.fixed) | sizes
    scaled: dict[str, Any] = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    scaled |= {"original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
    scaled = {"rope_scaling": scaled, "layer_types": ["full_attention"] * 2}
    return _json(**configs, scaled=configs["llama"] | scaled)


def _read_published(folder: pathlib.Path) -> None:
    for path in sorted(folder.iterdir()):
        weights.read_settings(path.rename(folder / "config.json"))


def _weights() -> bytes:
    files = _made(lambda folder: weights.save(folder / "model.safetensors", _settings(), _model()))
    return files["model.safetensors"]


def _good_tensors() -> inputs.Files:
    content = _weights()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    return {"length": b"", "header.json": content[8:end], "tensors": content[end:]}


def _read_tensors(folder: pathlib.Path) -> None:
    files = inputs.read_tree(folder)
    length, header, content = (files.get(name, b"") for name in ("length", "header.json", "tensors"))
    length = length or struct.pack("<Q", len(header))
    (folder / "model.safetensors").write_bytes(length + header + content)
    weights.load(folder / "model.safetensors", _settings())


def _good_index() -> inputs.Files:
    tensors = safetensors.numpy.load(_weights())
    files, weight_map = {}, dict[str, str]()
    for number in range(2):
        shard = {name: tensors[name] for name in sorted(tensors)[number::2]}
        files[f"model-{number}.safetensors"] = safetensors.numpy.save(shard)
        weight_map |= dict.fromkeys(shard, f"model-{number}.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    return files | _json(**{"model.safetensors.index": index})


def _good_state() -> inputs.Files:
    state = generation.Program(_model()).init_state(2)
    return _made(lambda folder: generation.save_state(folder / "state", _model(), state))


def _read_state(folder: pathlib.Path) -> None:
    generation.restore_state(folder / "state", _model())


def _good_members() -> inputs.Files:
    with zipfile.ZipFile(io.BytesIO(_good_state()["state"])) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    header = np.load(io.BytesIO(members.pop("header.npy")))
    return {"header.json": str(header).encode(), **members}


def _read_members(folder: pathlib.Path) -> None:
    members = inputs.read_tree(folder)
    header = members.pop("header.json", b"").decode("utf-8", "replace")
    with zipfile.ZipFile(folder / "state", "w") as archive:
        with archive.open("header.npy", "w") as stream:
            np.lib.format.write_array(stream, np.array(header))
        for name, content in members.items():
            archive.writestr(name, content)
    _read_state(folder)


def _good_run() -> inputs.Files:
    """Returns the files of a run of one step."""

    def write(folder: pathlib.Path) -> None:
        (folder / "text").write_text("the quick brown fox " * 20)
        settings = dataclasses.replace(
            _settings(),
            model=dataclasses.replace(_settings().model, vocab_size=256, layers=1),
            data=_data("text", folder / "text"),
            training=config.TrainingConfig(steps=1),
            evaluation=config.EvaluationConfig(context_lengths=(), every=0),
        )
        loop.train(settings, folder / "run")

    kept = ("run/checkpoints", "run/config.json")
    return {
        name.removeprefix("run/"): content for name, content in _made(write).items() if name.startswith(kept)
    }


def _read_records(folder: pathlib.Path) -> None:
    line = inputs.read_tree(folder).get("line.json", b"")
    (folder / "metrics.jsonl").write_bytes(line + b"\n" + line + b"\n")
    (folder / "checkpoints" / "1").mkdir(parents=True)
    writers.JsonLines(folder / "metrics.jsonl", start=2).close(failed=False)
    workdir.record_data(folder, _DESCRIPTION)


def _good_zarr(**changes: Any) -> inputs.Files:
    """Returns the files of an array with these changes of its metadata."""

    def write(folder: pathlib.Path) -> None:
        import tensorstore

        values = np.arange(8 * 64, dtype=np.uint16).reshape(8, 64)
        metadata = zarr.metadata(8, 64, values.dtype) | {"chunks": [4, 64]} | changes
        spec = {**zarr.spec(str(folder)), "metadata": metadata}
        tensorstore.open(spec, create=True).result().write(values).result()

    return _made(write)


def _read_zarr(folder: pathlib.Path) -> None:
    settings = _data("longcrawl64", folder)
    source = zarr.Source(settings)
    rows = source.side(heldout=False)
    for row in range(min(8, len(rows.lengths))):
        rows.read(row, 0, 8)
    source.describe()


def _good_tokens() -> inputs.Files:
    summary = {"tokenizer": "byte", "vocab_size": 256, "separator": 0, "token_dtype": "uint16"}
    files = _json(prepared=summary | {"documents": 2, "tokens": 7}, settings={"separator": 0})
    return files | {"train.bin": np.array([5, 6, 0, 7, 8, 9, 0], "<u2").tobytes()}


def _read_tokens(folder: pathlib.Path) -> None:
    separator: Any = serialize.read_object(folder / "settings.json").get("separator")
    settings = _data("tokens", folder / "train.bin", document_separator=separator, heldout_fraction=0.5)
    source = tokens.Source(settings)
    for heldout in (False, True):
        spans = source.side(heldout=heldout)
        for document, length in enumerate(spans.lengths):
            spans.read(document, 0, int(length))
    source.describe()


def _good_corpus() -> inputs.Files:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"text": _TEXT, "ids": [[1, 2], [3], [], [4]]})
    files = _made(lambda folder: pq.write_table(table, folder / "a.parquet"))
    return files | _json(line={"text": "a", "ids": [1]}) | {"a.jsonl.gz": gzip.compress(_LINES, mtime=0)}


def _read_corpus(folder: pathlib.Path) -> None:
    from sympow_jax.data.corpus import jsonl, parquet, pieces

    line = folder / "line.json"
    if line.exists():
        (folder / "a.jsonl").write_bytes(_LINES + line.read_bytes() + b"\n" + _LINES)
    for kind, module in (("parquet", parquet), ("jsonl", jsonl)):
        found = files.find("data.paths", [str(folder)], suffix=sources.SOURCES[kind].suffixes)
        for column, size in (("text", 10), ("text", 1 << 20), ("ids", 10)):
            reader = module.Reader(column, texts=column == "text")
            for group in pieces.grouped(((file, kind) for file in found), size):
                for piece in group:
                    reader.read(piece)


def _good_tokenizer() -> inputs.Files:
    import tokenizers

    vocabulary = {"[UNK]": 0, "the": 1, "fox": 2, "</s>": 3}
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    built.add_special_tokens(["</s>"])
    return {"tokenizer.json": built.to_str().encode()} | _json(tokenizer_config={"eos_token": "</s>"})


def _read_tokenizer(folder: pathlib.Path) -> None:
    loaded = tokenizer.load(str(folder))
    loaded.decode(loaded.encode(b"the quick fox").tolist())


def _good_images() -> inputs.Files:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 10, 3)).astype(np.uint8)

    def write(folder: pathlib.Path) -> None:
        for name in ("ape/a.png", "cat/b.jpeg"):
            (folder / name).parent.mkdir()
            PIL.Image.fromarray(pixels).save(folder / name)

    return _made(write)


def _read_rows(settings: config.DataConfig) -> None:
    task = config.TaskConfig(name="classification", classes=2)
    rows: Any = data.train_dataset(settings, task=task, vocab_size=256)
    for index in range(2):
        rows[index]
    data.describe(settings)


def _seldom(usual: Any, *others: Any) -> st.SearchStrategy:
    return st.integers(0, 9).flatmap(lambda n: st.sampled_from(others) if n == 9 else st.just(usual))


@st.composite
def _attention(draw: st.DrawFn) -> dict[str, Any]:
    """Returns arguments of power attention, few of which are bad."""
    batch, time, heads, dim = (draw(st.sampled_from(_SIZES)) for _ in range(4))

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        axes = [draw(_seldom(length, *_SIZES, 0)) for length in shape]
        dtype = draw(_seldom("float32", "int32", "bool", "float16", "complex64"))
        return jax.ShapeDtypeStruct(draw(_seldom(axes, axes[:-1], [*axes, 1])), dtype)

    arguments: dict[str, Any] = {name: array(batch, time, heads, dim) for name in ("query", "key", "value")}
    arguments["log_decay"] = array(batch, time, heads) if draw(st.booleans()) else None
    if draw(st.booleans()):
        dtype = draw(_seldom("int32", "int64", "uint8", "float32", "bool"))
        ids = draw(arrays.arrays("int32", (batch, time), elements=st.integers(-2, 100))).astype(dtype)
        arguments["segment_ids"] = draw(_seldom(ids, ids[:, :-1], ids[0], ids.T, ids[None]))
    return arguments | {
        "power": draw(_seldom(2, 4, 0, -2, 3, 1000, 2**40)),
        "form": draw(_seldom(None, "attention", "chunked", "recurrent", "step", "")),
        "implementation": draw(_seldom(None, "xla", "reference", "mosaic_gpu", "x")),
        "chunk_size": draw(_seldom(None, 2, 0, -1, 10**9)),
        "exact_window": draw(_seldom(64, 0, 4, -1, 10**9)),
        "return_state": draw(st.booleans()),
    }


def _trace_attention(arguments: dict[str, Any]) -> None:
    traced = {name: x for name, x in arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}
    others = {name: x for name, x in arguments.items() if name not in traced}
    jax.eval_shape(lambda operands: ops.power_attention(**operands, **others), traced)


@st.composite
def _prompts(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int | None]:
    """Returns tokens and lengths of prompts, and a maximum length."""
    lengths = np.array([draw(_seldom(3, 1, 6, 0, 7, -1, 2**31 - 1)) for _ in range(2)])
    others = (lengths[:1], lengths.astype(float), lengths[None], lengths.astype(np.uint64))
    lengths = draw(_seldom(lengths, *others))
    rows = np.zeros((2, 6), np.int32) + draw(_seldom(31, 32, -1))
    rows = draw(_seldom(rows, rows[0], rows.astype(np.float32), rows[:, :0], rows[:0], rows[None]))
    return rows, lengths, draw(_seldom(None, 6, 3, 0, -1))


def _read_prompts(prompts: tuple[np.ndarray, np.ndarray, int | None]) -> None:
    rows, lengths, longest = prompts
    generation.Program(_model()).prefill(rows, lengths, max_length=longest)


# A reader of another format is one more row.
READERS: Mapping[str, Reader] = {
    "flags of a command line": Reader([], st.lists(_FLAG, min_size=1, max_size=4), _read_flags),
    "settings of a run": _files(_good_settings, workdir.read_config),
    "settings of weights": _files(
        _good_settings, lambda folder: weights.read_settings(folder / "config.json")
    ),
    "config.json of a published model": _files(_good_published, _read_published, examples=2000),
    "weights: a safetensors file": _files(_good_tensors, _read_tensors, examples=400),
    "weights: index of several files": _files(
        _good_index, lambda folder: weights.load(folder, _settings()), examples=300
    ),
    "saved state: its archive": _files(_good_state, _read_state, examples=200),
    "saved state: its header and arrays": _files(
        _good_members, _read_members, examples=300, cases=[[Part("header.json", ("model", "x"), "null")]]
    ),
    "checkpoint and its metadata": _files(_good_run, training.restore_model, examples=120),
    "data.json and metrics.jsonl": _files(
        lambda: _json(data=_DESCRIPTION, line={"step": 3, "loss": 1.0}),
        _read_records,
        cases=[[Part("line.json", ("step",), text)] for text in ('"3"', "[]")],
    ),
    "Zarr array": _files(
        _good_zarr,
        _read_zarr,
        cases=[[Part(".zarray", ("chunks", 0), text)] for text in (str(2**34), str(10**18), inputs.DEEP[-1])],
    ),
    "Zarr array with Blosc, as in LongCrawl64": _files(
        functools.partial(_good_zarr, compressor=_BLOSC),
        _read_zarr,
        # Fields of the header: bytes after decompression, of a block and of the chunk.
        cases=[[Splice("0.0", at, 4, b"\xff\xff\xff\x7f")] for at in (4, 8, 12)],
    ),
    "token file and its sidecar": _files(_good_tokens, _read_tokens),
    "parquet and JSON lines": _files(
        _good_corpus,
        _read_corpus,
        examples=300,
        # 400 MB of zeros.
        cases=[[Splice("a.jsonl.gz", 0, 1000, gzip.compress(bytes(10**6)) * 400)]],
    ),
    "tokenizer files": _files(
        _good_tokenizer, _read_tokenizer, cases=[[Part("tokenizer.json", ("x",), inputs.DEEP[-1])]]
    ),
    "images": _files(
        _good_images,
        lambda folder: _read_rows(_data("images", folder, image_size=8)),
        examples=500,
    ),
    "lines of texts and labels": _files(
        lambda: {"a.tsv": b"sentence\tlabel\ngood\t1\nbad\t0\n"},
        lambda folder: _read_rows(_data("tsv", folder, text_columns=("sentence",))),
        examples=500,
        # A label whose escapes are four times as long as it is.
        cases=[[Part("a.tsv", (), "x" * 1000)], [Splice("a.tsv", 26, 1, bytes(200))]],
    ),
    "shapes and segment ids of power attention": Reader(
        {name: jax.ShapeDtypeStruct((1, 4, 2, 8), "float32") for name in ("query", "key", "value")},
        _attention(),
        _trace_attention,
        examples=200,
    ),
    "tokens and lengths of prompts": Reader(
        (np.zeros((2, 6), np.int32), np.array([3, 6]), None), _prompts(), _read_prompts, examples=100
    ),
}
