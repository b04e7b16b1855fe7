"""Measures the speed of reading and tokenizing a corpus, and the tokens that packing drops.

    uv run --extra corpora --extra tokenizers python -m benchmarks.reading --out=benchmarks/results/reading.json

The corpus is the Python source of the standard library and of the installed packages, one document per file. The
tokenizer `bpe` is a byte-level BPE that is trained on a part of it. Training speed is the tokens per second that one
process consumes while `data.tokenizer_workers` processes tokenize. It excludes the start of the workers. `sympow
prepare` is timed from start to finished output, including the start of its processes; `workers=1` is a thread.
"""

import functools
import itertools
import json
import pathlib
import sysconfig
import tempfile
import time
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
import zstandard

from benchmarks import _rows
from sympow_jax import config, data
from sympow_jax.data import prepare
from sympow_jax.data.corpus import stream

FORMATS = ("parquet", "jsonl", "jsonl.zst")
# Tokenizer, format and number of worker processes.
CASES = [
    *(("byte", kind, 0) for kind in FORMATS),
    *(("bpe", kind, 0) for kind in FORMATS),
    *(("bpe", "parquet", workers) for workers in (1, 2)),
]
# Format and number of worker processes of `sympow prepare`.
PREPARATIONS = [(kind, workers) for kind in ("bin", "longcrawl64") for workers in (1, 2)]
CONTEXTS = (1024, 8192, 65536)
_VOCAB_SIZE = 16_384
_TRAINING_DOCUMENTS = 400
# Groups of about 16 MiB of text that are timed after the first, which includes the start of the workers.
_GROUPS = 4


def texts(megabytes: float) -> list[str]:
    """Returns the documents, in an order that mixes packages, up to a size."""
    roots = {pathlib.Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")}
    paths = {path for root in roots for path in root.rglob("*.py")}
    documents, size = [], 0
    # Hundreds of files have the same name; their whole paths make the order the same in every run.
    for path in sorted(paths, key=lambda path: (path.name, str(path))):
        if size >= megabytes * 1e6:
            break
        if text := path.read_text(encoding="utf-8", errors="replace"):
            documents.append(text)
            size += len(text.encode())
    return documents


def write_corpus(folder: pathlib.Path, documents: list[str]) -> None:
    """Writes the documents in every format, and the tokenizer."""
    pq.write_table(pa.table({"text": documents}), folder / "corpus.parquet", row_group_size=100)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
    (folder / "corpus.jsonl").write_bytes(lines)
    (folder / "corpus.jsonl.zst").write_bytes(zstandard.compress(lines))
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(documents[:: -(-len(documents) // _TRAINING_DOCUMENTS)], trainer)
    bpe.save(str(folder / "bpe.json"))


def _open_rows(
    folder: pathlib.Path, tokenizer: str, kind: str, *, workers: int = 0, context_length: int = 1024
) -> stream.CorpusRows:
    settings = config.DataConfig(
        source=kind.split(".")[0],
        paths=(str(folder / f"corpus.{kind}"),),
        tokenizer="byte" if tokenizer == "byte" else str(folder / f"{tokenizer}.json"),
        tokenizer_workers=workers,
        heldout_fraction=0.0,
        context_length=context_length,
        batch_tokens=context_length,
    )
    corpus = data.train_dataset(settings, vocab_size=_VOCAB_SIZE)
    assert isinstance(corpus, stream.CorpusRows)
    return corpus


def measure_speed(folder: pathlib.Path, size: int, tokenizer: str, kind: str, workers: int) -> dict:
    """Returns the speed of a case; `size` is the number of bytes of the corpus."""
    corpus = _open_rows(folder, tokenizer, kind, workers=workers)
    with corpus.open_workers() as submit:
        groups = corpus.tokens(submit, itertools.count())
        next(groups)
        began = time.perf_counter()
        count = sum(len(group.tokens) for _, group in itertools.islice(groups, _GROUPS))
        seconds = time.perf_counter() - began
    bytes_per_token = size * _GROUPS / corpus.groups_per_epoch / count
    case = {"tokenizer": tokenizer, "format": kind, "workers": workers}
    return case | {"tokens_per_second": count / seconds, "bytes_per_token": bytes_per_token}


def measure_preparation(folder: pathlib.Path, kind: str, workers: int) -> dict:
    """Returns the speed of `sympow prepare` for a format."""
    write = prepare.write_bin if kind == "bin" else prepare.write_longcrawl64
    options = prepare.Options(tokenizer=str(folder / "bpe.json"), text_column="text", workers=workers)
    began = time.perf_counter()
    summary = write(str(folder / f"{workers}.{kind}"), [str(folder / "corpus.parquet")], options)
    seconds = time.perf_counter() - began
    speed = {"tokens_per_second_per_worker": summary["tokens"] / seconds / workers}
    case = {"format": kind, "workers": workers}
    return case | {"tokens": summary["tokens"], "seconds": seconds} | speed


def measure_waste(folder: pathlib.Path, context_length: int) -> dict:
    """Returns the tokens that an epoch of a context length drops."""
    corpus = _open_rows(folder, "bpe", "parquet", context_length=context_length)
    tokens = packed = 0
    with corpus.open_workers() as submit:
        for number, group in corpus.tokens(submit, range(corpus.groups_per_epoch)):
            tokens += len(group.tokens)
            packed += len(corpus.rows_of_group(number, group)) * context_length
    return {"context_length": context_length, "tokens": tokens, "dropped": tokens - packed}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the results and writes them to a file."""
    parser = _rows.make_parser(__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the JSON file to write")
    parser.add_argument("--megabytes", type=float, default=64, help="size of the corpus, 64")
    options = parser.parse_args(arguments)
    if not options.megabytes > 0:
        parser.error(f"--megabytes is {options.megabytes:g}; it must be above 0")
    documents = texts(options.megabytes)
    size = sum(len(text.encode()) for text in documents)
    report: dict = {"machine": _rows.machine(), "documents": len(documents), "bytes": size}
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        write_corpus(folder, documents)
        measured = {
            "speeds": [functools.partial(measure_speed, folder, size, *case) for case in CASES],
            "preparations": [functools.partial(measure_preparation, folder, *case) for case in PREPARATIONS],
            "waste": [functools.partial(measure_waste, folder, length) for length in CONTEXTS],
        }
        for name, calls in measured.items():
            report[name] = []
            for call in calls:
                report[name].append(row := call())
                _rows.say(row)
    _rows.write(options.out, report)


if __name__ == "__main__":
    main()
