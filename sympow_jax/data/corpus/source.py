"""Opens a corpus as the training rows and the held-out documents of a run."""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Integer

from sympow_jax import config as config_lib
from sympow_jax.data import documents
from sympow_jax.data import files as data_files
from sympow_jax.data import tokenizer as tokenizer_lib
from sympow_jax.data.corpus import files, reading, stream, tokenizing

__all__ = ["HELDOUT_TOKENS", "describe", "locations", "open_heldout", "open_rows"]

# Bytes of text in a group. A resumed run reads its group again.
_GROUP_BYTES = 1 << 24
# A piece of a large file has at least 32 of these rows. Half a row on average, 1.6 % of it, is dropped at its end.
_ROWS = 64
_TOKEN_BYTES = 4
# Held-out documents are kept in memory, until they have this number of tokens or this number of groups is read.
HELDOUT_TOKENS = 1 << 24
_HELDOUT_GROUPS = 64
# The tokens of a piece of this number of bytes give the estimate of the number of tokens, and enter the digest.
_SAMPLE_BYTES = 1 << 20
# Pieces of the first file that are read at most until one has documents.
_SAMPLE_PIECES = 16
# Bytes at the middle and at the end of a file that enter the digest, for about this number of files.
_DIGEST_BYTES = 1 << 16
_DIGEST_FILES = 16

# Without a model: more ids than any tokenizer has.
_ANY_VOCABULARY = (1 << 31) - 1


def _column(config: config_lib.DataConfig) -> str:
    return config.text_columns[0] if config.text_columns else "text"


def _find(config: config_lib.DataConfig, *, heldout: bool) -> list[files.CorpusFile]:
    return files.find(*data_files.side(config, heldout=heldout), format=config.source)


def _groups(corpus: list[files.CorpusFile], config: config_lib.DataConfig) -> list[stream.Group]:
    return stream.grouped(corpus, max(_GROUP_BYTES, _ROWS * _TOKEN_BYTES * config.context_length))


def _recipe(
    config: config_lib.DataConfig, first: files.CorpusFile, *, vocab_size: int, heldout: bool
) -> tokenizing.Recipe:
    """Returns the settings of tokenization, after checking that its ids and the separator are below `vocab_size`."""
    texts, separator = reading.holds_text(first, _column(config)), config.document_separator
    if texts:
        tokenizer = tokenizer_lib.load(config.text_tokenizer, setting="data.tokenizer")
        separator = tokenizer.end_of_text(separator, setting="data.document_separator")
        if tokenizer.vocab_size > vocab_size:
            raise ValueError(
                f"data.tokenizer {config.text_tokenizer} has {tokenizer.vocab_size} ids, but model.vocab_size is "
                f"{vocab_size}; raise it to at least {tokenizer.vocab_size}"
            )
    if separator is not None and not 0 <= separator < vocab_size:
        raise ValueError(
            f"the id after each document is {separator}, but model.vocab_size is {vocab_size}; raise it, or choose "
            f"another data.document_separator"
        )
    return tokenizing.Recipe(
        column=_column(config),
        tokenizer=tokenizer_lib.local_name(config.text_tokenizer) if texts else None,
        separator=separator,
        vocab_size=vocab_size,
        shortest=config.shortest_document,
        # All documents of `data.heldout_paths` are held out, and none of `data.paths`.
        heldout_fraction=float(heldout) if config.heldout_paths else config.heldout_fraction,
        heldout=heldout,
    )


def open_rows(
    config: config_lib.DataConfig,
    pack: Callable[[documents.Spans], stream.PackedRows],
    *,
    vocab_size: int,
) -> stream.CorpusRows:
    """Returns the training rows, which `pack` makes of documents. Only the start of the first file is read.

    Raises:
        ValueError: no file is found, one is empty, the column of the first does not exist or is of another type, or
            the tokenizer does not exist or has more ids than the model.
    """
    corpus = _find(config, heldout=False)
    recipe = _recipe(config, corpus[0], vocab_size=vocab_size, heldout=False)
    return stream.CorpusRows(
        recipe,
        _groups(corpus, config),
        pack,
        length=config.context_length,
        seed=config.seed,
        workers=config.tokenizer_workers,
    )


def open_heldout(config: config_lib.DataConfig, *, vocab_size: int) -> documents.Spans:
    """Returns the first held-out documents in the order of files, until they have 2^24 tokens.

    The first 64 groups of text are read at most to find them. That is a GiB of text, or more if `data.context_length`
    is above 65,536. Ids of documents are not compared with `vocab_size` here, but when a document is used.

    Raises:
        ValueError: as `open_rows`, or what is read is corrupt.
    """
    corpus = _find(config, heldout=True)
    recipe = _recipe(config, corpus[0], vocab_size=vocab_size, heldout=True)
    return _read_heldout(
        dataclasses.replace(recipe, vocab_size=_ANY_VOCABULARY),
        tuple(_groups(corpus, config)[:_HELDOUT_GROUPS]),
        workers=config.tokenizer_workers,
    )


# The documents that were opened last are cached, because `describe` and the evaluations of a run open the same ones. To
# `describe` no vocabulary is known, so that the documents must not depend on it.
@functools.lru_cache(maxsize=1)
def _read_heldout(
    recipe: tokenizing.Recipe, groups: tuple[stream.Group, ...], *, workers: int
) -> documents.Spans:
    groups_tokens, count = [], 0
    # Closed here, so that the workers have ended when an error leaves this function too.
    with contextlib.closing(tokenizing.tokens_in_order(recipe, groups, workers=workers)) as results:
        for group, tokens in zip(groups, results):
            groups_tokens.append((stream.name_of(group), tokens))
            count += len(tokens.tokens)
            if count >= HELDOUT_TOKENS:
                break
    ends = [np.cumsum(tokens.lengths) for _, tokens in groups_tokens]
    lengths = np.concatenate([tokens.lengths for _, tokens in groups_tokens])
    spans = documents.Spans(
        [tokens.tokens for _, tokens in groups_tokens],
        [name for name, _ in groups_tokens],
        array=np.repeat(np.arange(len(groups_tokens)), [len(tokens.lengths) for _, tokens in groups_tokens]),
        starts=np.concatenate(ends) - lengths,
        lengths=lengths,
    )
    return spans.select(np.flatnonzero(np.cumsum(lengths) - lengths < HELDOUT_TOKENS))


def locations(setting: str, paths: tuple[str, ...], config: config_lib.DataConfig) -> set[str]:
    """Returns the `CorpusFile.location` of each file that the paths name.

    Raises:
        ValueError: as `files.find`.
    """
    return {file.location for file in files.find(setting, paths, format=config.source)}


def describe(config: config_lib.DataConfig) -> dict[str, Any]:
    """Returns counts of files and bytes, an estimate of the tokens, and a SHA-256.

    The training text is sampled; held-out documents are read as in `open_heldout`. The digest is of the names and
    sizes of all files, middles and ends of about 16, and the tokens of about a MiB of text.
    """
    corpus = _find(config, heldout=False)
    heldout = (
        open_heldout(config, vocab_size=_ANY_VOCABULARY)
        if config.heldout_paths or config.heldout_fraction
        else None
    )
    recipe = _recipe(config, corpus[0], vocab_size=_ANY_VOCABULARY, heldout=False)
    tokens, fraction = _sample(recipe, corpus[0])
    size = sum(file.size for file in corpus)
    estimate = int(len(tokens) / fraction * size / corpus[0].size)
    # Half a row of each group, or all of the data if it has less.
    dropped = min(1.0, len(_groups(corpus, config)) * config.context_length / 2 / max(1, estimate))
    note = (
        f"estimated; about {dropped:.1%} are dropped at the ends of parts of the data"
        if len(tokens)
        else f"their number is unknown, because the first {fraction:.1%} of {corpus[0].url} have no training document "
        f"of at least data.shortest_document tokens, {config.shortest_document}"
    )
    matches = corpus + (_find(config, heldout=True) if config.heldout_paths else [])
    digest = hashlib.sha256(tokens.astype("<u4").tobytes())
    for number, file in enumerate(matches):
        digest.update(f"{file.key}\0{file.size}\0".encode("utf-8", "surrogateescape"))
        if number % -(-len(matches) // _DIGEST_FILES) == 0:
            digest.update(_sampled(file))
    named = recipe.tokenizer and tokenizer_lib.load(recipe.tokenizer, setting="data.tokenizer").identity
    return {
        "files": len(matches),
        "bytes": sum(file.size for file in matches),
        **({"tokenizer": named} if named else {}),
        "tokens": estimate,
        "tokens_note": note,
        "heldout_documents": 0 if heldout is None else len(heldout.lengths),
        "heldout_tokens": 0 if heldout is None else int(heldout.lengths.sum()),
        "digest": digest.hexdigest(),
        "digest_of": "names and sizes of all files, middles and ends of some, and tokens of a sample",
    }


def _sample(
    recipe: tokenizing.Recipe, file: files.CorpusFile
) -> tuple[Integer[np.ndarray, " tokens"], float]:
    """Returns the tokens of the first piece that has any, and the fraction of the file up to the end of that piece."""
    tokenize, pieces = tokenizing.PieceTokenizer(recipe), files.pieces([file], _SAMPLE_BYTES)
    # A piece is empty if its row group begins in another piece, or if all of its documents are short.
    sample = pieces[:_SAMPLE_PIECES]
    for number, piece in enumerate(sample, 1):
        tokens = tokenize([piece]).tokens
        if len(tokens):
            return tokens, number / len(pieces)
    return np.empty(0, np.int32), len(sample) / len(pieces)


def _sampled(file: files.CorpusFile) -> bytes:
    with files.CorpusStream(file.url) as opened:
        opened.seek(file.size // 2)
        middle = opened.read(_DIGEST_BYTES)
        opened.seek(max(0, file.size - _DIGEST_BYTES))
        return middle + opened.read(_DIGEST_BYTES)
