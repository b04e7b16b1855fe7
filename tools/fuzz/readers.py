"""Readers of what strangers write: each makes a random input in an empty folder and reads it.

A reader ends in success, or in an error of one of the types of `ACCEPTED`.
"""

import dataclasses
import functools
import gzip
import json
import pathlib
import random
import struct
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from flax import nnx

from sympow_jax import config, generation, models, ops, training, weights
from sympow_jax.commands import command_line, train
from sympow_jax.config import fields
from sympow_jax.data import longcrawl64, tokenizer, tokens
from sympow_jax.training import workdir, writers
from sympow_jax.weights import families
from tools.fuzz import inputs

# What programs print as one line (`cli.user_errors`).
ACCEPTED = (ValueError, OSError, NotImplementedError)

Reader = Callable[[random.Random, pathlib.Path], None]


@functools.cache
def _settings() -> config.Config:
    return config.Config(
        model=config.ModelConfig(
            vocab_size=32,
            layers=2,
            width=16,
            heads=2,
            dtype="float32",
            attention=config.preset("conformal", exact_window=4),
        ),
        data=config.DataConfig(paths=("x",), context_length=8, batch_tokens=16),
    )


@functools.cache
def _model() -> models.DecoderLM:
    return models.DecoderLM(_settings().model, rngs=nnx.Rngs(0))


def _made(write: Callable[[pathlib.Path], Any]) -> dict[str, bytes]:
    """Returns the files that a function writes to a folder."""
    with tempfile.TemporaryDirectory() as folder:
        write(pathlib.Path(folder))
        return inputs.read_tree(pathlib.Path(folder))


def flags(source: random.Random, folder: pathlib.Path) -> None:
    """Reads a command line of training with random settings."""
    settings = [setting for group in fields.groups(config.Config) for setting in group.settings]
    chosen = source.choices(settings, k=source.randint(1, 4))
    arguments = []
    for setting in chosen:
        texts = (*inputs.TEXTS, *setting.choices)
        name = setting.path if source.random() < 0.95 else setting.path[:-1]
        arguments.append(f"--config.{name}={source.choice(texts)}")
    command_line.parse_training(["--config=quickstart", f"--workdir={folder}", *arguments])


def settings_json(source: random.Random, folder: pathlib.Path) -> None:
    """Reads the settings of a run, or of weights."""
    path = folder / "config.json"
    path.write_text(inputs.json_text(dataclasses.asdict(_settings()), source))
    source.choice((weights.read_settings, lambda path: workdir.read_config(path.parent)))(path)


@functools.cache
def _published() -> list[dict[str, Any]]:
    configs = []
    for family in families.FAMILIES.values():
        sizes = {key: 2 for key in family.sizes.values()} | {family.sizes["vocab_size"]: 32}
        required = {family.length: 16, "model_type": family.model_type, "eos_token_id": 3}
        configs.append(required | dict(family.defaults) | dict(family.fixed) | sizes)
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled |= {"original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
    llama = next(values for values in configs if values["model_type"] == "llama")
    return [*configs, llama | {"rope_scaling": scaled, "layer_types": ["full_attention"] * 2}]


def published_config(source: random.Random, folder: pathlib.Path) -> None:
    """Reads the `config.json` of a published model."""
    path = folder / "config.json"
    path.write_text(inputs.json_text(source.choice(_published()), source))
    weights.read_settings(path)


@functools.cache
def _weights() -> dict[str, bytes]:
    return _made(lambda folder: weights.save(folder / "model.safetensors", _settings(), _model()))


def weights_file(source: random.Random, folder: pathlib.Path) -> None:
    """Reads a safetensors file, with a changed header, changed tensors or changed bytes."""
    path, content = folder / "model.safetensors", _weights()["model.safetensors"]
    match source.randrange(3):
        case 0:
            path.write_bytes(inputs.changed_bytes(content, source))
        case 1:
            (size,) = struct.unpack("<Q", content[:8])
            header = inputs.json_text(json.loads(content[8 : 8 + size]), source).encode()
            length = source.choice((len(header), len(header), len(header) + 1, 2**40, 2**63))
            path.write_bytes(struct.pack("<Q", length) + header + content[8 + size :])
        case 2:
            tensors = safetensors.numpy.load(content)
            name = source.choice(list(tensors))
            dtype = source.choice((np.float32, np.float16, np.int64, np.uint8, np.bool_))
            shape = source.choice(
                ((), (0,), (1,), tensors[name].shape, tensors[name].shape[::-1], (1 << 20,))
            )
            value = source.choice((0.0, 1.0, float("nan"), float("inf"), 1e38))
            with np.errstate(all="ignore"):
                tensors[name] = np.full(shape, value).astype(dtype)
            tensors |= {str(number): np.zeros(1) for number in range(source.choice((0, 0, 1, 2000)))}
            safetensors.numpy.save_file(tensors, path)
    weights.load(path, _settings())


def weights_index(source: random.Random, folder: pathlib.Path) -> None:
    """Reads a folder of several safetensors files and their index."""
    tensors = safetensors.numpy.load(_weights()["model.safetensors"])
    names = sorted(tensors)
    shards = {f"model-{number}.safetensors": names[number::2] for number in range(2)}
    index = {
        "metadata": {"total_size": 1},
        "weight_map": {x: shard for shard, xs in shards.items() for x in xs},
    }
    for shard, held in shards.items():
        if source.random() < 0.95:
            safetensors.numpy.save_file({name: tensors[name] for name in held}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(inputs.json_text(index, source))
    weights.load(folder, _settings())


@functools.cache
def _state() -> dict[str, bytes]:
    state = generation.init_state(_model(), 2)
    return _made(lambda folder: generation.save_state(folder / "state", _model(), state))


def state_file(source: random.Random, folder: pathlib.Path) -> None:
    """Reads a saved state, with changed bytes, or with a changed member in a good archive."""
    path = folder / "state"
    path.write_bytes(_state()["state"])
    if source.random() < 0.4:
        path.write_bytes(inputs.changed_bytes(path.read_bytes(), source))
    else:
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        name = source.choice(["header.npy", *members])
        if name == "header.npy" and source.random() < 0.9:
            with np.load(path) as file:
                values = json.loads(str(file["header"]))
            with (folder / "header.npy").open("wb") as file:
                np.lib.format.write_array(file, np.array(inputs.json_text(values, source)))
            members[name] = (folder / "header.npy").read_bytes()
        else:
            members[name] = inputs.changed_bytes(members[name], source)
        if source.random() < 0.1:
            del members[name]
        compression = source.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
        with zipfile.ZipFile(path, "w", compression) as archive:
            for member, content in members.items():
                archive.writestr(member, content)
    generation.restore_state(path, _model())


@functools.cache
def _run() -> dict[str, bytes]:
    """Returns the files of a run of one step."""

    def write(folder: pathlib.Path) -> None:
        (folder / "text").write_text("the quick brown fox " * 20)
        settings = dataclasses.replace(
            _settings(),
            model=dataclasses.replace(_settings().model, vocab_size=256, layers=1),
            data=config.DataConfig(paths=(str(folder / "text"),), context_length=8, batch_tokens=16),
            training=config.TrainingConfig(steps=1),
            evaluation=config.EvaluationConfig(context_lengths=(), every=0),
        )
        train.train(settings, folder / "run")

    files = _made(write)
    kept = ("run/checkpoints", "run/config.json")
    return {name.removeprefix("run/"): content for name, content in files.items() if name.startswith(kept)}


def checkpoint(source: random.Random, folder: pathlib.Path) -> None:
    """Restores a checkpoint of which one file, of metadata in most cases, is changed."""
    files = _run()
    names = [name for name in files if not name.endswith((".npy", "/data")) and "/d/" not in name]
    names = names if source.random() < 0.8 else list(files)
    chosen = inputs.changed_tree({name: files[name] for name in names}, source)
    inputs.write_tree(
        {name: content for name, content in files.items() if name not in names} | chosen, folder
    )
    training.restore_model(folder)


def records(source: random.Random, folder: pathlib.Path) -> None:
    """Reads the other files of a workdir: the description of its data and its metrics."""
    description = {"source": "text", "paths": ["x"], "digest": "0", "bytes": 1}
    (folder / "data.json").write_text(inputs.json_text(description, source))
    (folder / "metrics.jsonl").write_text(
        "".join(inputs.json_text({"step": 3, "loss": 1.0}, source) + "\n" for _ in "ab")
    )
    (folder / "checkpoints" / "1").mkdir(parents=True)
    writers.JsonLines(folder / "metrics.jsonl", start=2).close(failed=False)
    workdir.record_data(folder, description)


@functools.cache
def _zarr() -> dict[str, bytes]:
    def write(folder: pathlib.Path) -> None:
        values = np.arange(8 * 64, dtype=np.uint16).reshape(8, 64)
        metadata = longcrawl64.metadata(8, 64, values.dtype) | {"chunks": [4, 64]}
        import tensorstore

        spec = {**longcrawl64.spec(str(folder)), "metadata": metadata}
        tensorstore.open(spec, create=True).result().write(values).result()

    return _made(write)


def zarr(source: random.Random, folder: pathlib.Path) -> None:
    """Reads every row of a Zarr array."""
    inputs.write_tree(inputs.changed_tree(_zarr(), source), folder)
    settings = config.DataConfig(
        source="longcrawl64", paths=(str(folder),), context_length=8, batch_tokens=16, heldout_fraction=0.0
    )
    rows = longcrawl64.open_documents(settings, heldout=False)
    for row in range(min(8, len(rows.lengths))):
        rows.read(row, 0, 8)
    longcrawl64.describe(settings)


def token_file(source: random.Random, folder: pathlib.Path) -> None:
    """Reads every document of a `.bin` file."""
    good = {"train.bin": np.array([5, 6, 0, 7, 8, 9, 0], "<u2").tobytes()}
    summary = {"tokenizer": "byte", "vocab_size": 256, "separator": 0, "token_dtype": "uint16"}
    good["train.bin.json"] = json.dumps(summary | {"documents": 2, "tokens": 7}).encode()
    inputs.write_tree(inputs.changed_tree(good, source), folder)
    settings = config.DataConfig(
        source="tokens",
        paths=(str(folder / "train.bin"),),
        document_separator=source.choice((0, None, 7, 2**16)),
        context_length=8,
        batch_tokens=16,
    )
    for heldout in (False, True):
        spans = tokens.open_documents(settings, heldout=heldout)
        for document, length in enumerate(spans.lengths):
            spans.read(document, 0, int(length))
    tokens.describe(settings)


@functools.cache
def _corpora() -> dict[str, bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = ["the quick fox", None, "", "é" * 30]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()

    def write(folder: pathlib.Path) -> None:
        (folder / "a.jsonl").write_bytes(lines)
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
        pq.write_table(pa.table({"text": texts, "ids": [[1, 2], [3], [], [4]]}), folder / "a.parquet")

    return _made(write)


def corpus_file(source: random.Random, folder: pathlib.Path) -> None:
    """Reads all documents of a parquet or JSON lines file."""
    from sympow_jax.data import corpus

    name = source.choice(list(_corpora()))
    content = _corpora()[name]
    if name == "a.jsonl" and source.random() < 0.7:
        lines = content.decode().splitlines()
        lines[source.randrange(len(lines))] = inputs.json_text({"text": "a", "ids": [1]}, source)
        content = "\n".join(lines).encode()
    elif name.endswith(".gz") and source.random() < 0.2:
        content = gzip.compress(bytes(source.choice((10**6, 4 * 10**8))), mtime=0)
    else:
        content = inputs.changed_bytes(content, source)
    (folder / name).write_bytes(content)
    found = corpus.find("data.paths", [str(folder)], format="parquet" if name == "a.parquet" else "jsonl")
    texts = source.random() < 0.7
    reader = corpus.Reader("text" if texts else "ids", texts=texts)
    for piece in corpus.pieces(found, source.choice((10, 1 << 20))):
        reader.read(piece)


@functools.cache
def _tokenizer() -> dict[str, Any]:
    import tokenizers

    vocabulary = {"[UNK]": 0, "the": 1, "fox": 2, "</s>": 3}
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    built.add_special_tokens(["</s>"])
    return json.loads(built.to_str())


def tokenizer_file(source: random.Random, folder: pathlib.Path) -> None:
    """Reads a `tokenizers` file, encodes a text and decodes it."""
    path = folder / "tokenizer.json"
    path.write_text(inputs.json_text(_tokenizer(), source))
    loaded = tokenizer.load(str(path))
    loaded.decode(loaded.encode(b"the quick fox").tolist())


def arguments(source: random.Random, folder: pathlib.Path) -> None:
    """Traces power attention with random shapes, dtypes, segment ids and options."""
    del folder
    sizes = (1, 2, 3, 4, 8, 17, 64)
    batch, time, heads, dim = (source.choice(sizes) for _ in range(4))

    def seldom(usual: Any, *others: Any) -> Any:
        return source.choice(others) if source.random() < 0.1 else usual

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        axes = [seldom(length, *sizes, 0) for length in shape]
        axes = seldom(axes, axes[:-1], [*axes, 1])
        return jax.ShapeDtypeStruct(axes, seldom("float32", "int32", "bool", "float16", "complex64"))

    query, key, value = (array(batch, time, heads, dim) for _ in range(3))
    decay = array(batch, time, heads) if source.random() < 0.5 else None
    segments: Any = None
    if source.random() < 0.7:
        segments = np.random.default_rng(source.randrange(2**32)).integers(-2, 100, (batch, time))
        segments = segments.astype(seldom("int32", "int64", "uint8", "float32", "bool"))
        segments = seldom(segments, segments[:, :-1], segments[0], segments.T, segments[None])
    options = {
        "power": seldom(2, 4, 0, -2, 3, 1000, 2**40),
        "form": seldom(None, "attention", "chunked", "recurrent", "step", ""),
        "implementation": seldom(None, "xla", "reference", "mosaic_gpu", "x"),
        "chunk_size": seldom(None, 2, 0, -1, 10**9),
        "exact_window": seldom(64, 0, 4, -1, 10**9),
        "return_state": source.choice((False, True)),
    }

    def call(query, key, value, decay):
        return ops.power_attention(query, key, value, log_decay=decay, segment_ids=segments, **options)

    jax.eval_shape(call, query, key, value, decay)


def prompts(source: random.Random, folder: pathlib.Path) -> None:
    """Gives random arrays of lengths and tokens to `generation.prefill`."""
    del folder
    rows = np.zeros((2, 6), np.int32)

    def seldom(usual: Any, *others: Any) -> Any:
        return source.choice(others) if source.random() < 0.2 else usual

    lengths = np.array([seldom(source.choice((1, 3, 6)), 0, 7, -1, 2**31 - 1) for _ in range(2)])
    lengths = seldom(lengths, lengths[:1], lengths.astype(float), lengths[None], lengths.astype(np.uint64))
    given = rows + seldom(31, 32, -1)
    given = seldom(given, rows[0], rows.astype(np.float32), rows[:, :0], rows[:0], rows[None])
    generation.prefill(_model(), given, lengths, max_length=seldom(None, 6, 3, 0, -1))


# A reader of another format is one more row.
READERS: Mapping[str, Reader] = {
    "flags of a command line": flags,
    "settings of a run or of weights": settings_json,
    "config.json of a published model": published_config,
    "weights: safetensors file": weights_file,
    "weights: index of several files": weights_index,
    "saved state": state_file,
    "checkpoint and its metadata": checkpoint,
    "data.json and metrics.jsonl": records,
    "Zarr array": zarr,
    "token file and its sidecar": token_file,
    "parquet and JSON lines": corpus_file,
    "tokenizer file": tokenizer_file,
    "shapes and segment ids of power attention": arguments,
    "tokens and lengths of prompts": prompts,
}
