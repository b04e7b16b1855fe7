"""A corpus of text or token ids in parquet and JSON lines, larger than memory, local or remote."""

import dataclasses
import functools
import hashlib
import importlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from sympow_jax.data import documents, files, rows, sources
from sympow_jax.data import tokenizer as tokenizer_lib
from sympow_jax.data.corpus import encoding as encoding_lib
from sympow_jax.data.corpus import pieces, stream

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


class Source(sources.Source):
    """Training rows and held-out documents of a corpus."""

    def _groups(self, *, heldout: bool) -> list[pieces.Group]:
        size = max(pieces.GROUP_BYTES, _ROWS * _TOKEN_BYTES * self.config.context_length)
        return pieces.grouped(((file, self.config.source) for file in self.opened(heldout=heldout)), size)

    def _encoding(self, *, heldout: bool) -> encoding_lib.Encoding:
        """Returns the way to tokens, after checking that the ids and the separator are in the vocabulary."""
        config, vocab_size, first = self.config, self.vocab_size, self._groups(heldout=heldout)[0][0].file
        reader = importlib.import_module(f"sympow_jax.data.corpus.{config.source}")
        column, separator = (*config.text_columns, "text")[0], config.document_separator
        if texts := reader.holds_text(first, column):
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
        return encoding_lib.Encoding(
            column=column,
            tokenizer=tokenizer_lib.local_name(config.text_tokenizer) if texts else None,
            separator=separator,
            vocab_size=vocab_size,
            shortest=config.shortest_document,
            # All documents of `data.heldout_paths` are held out, and none of `data.paths`.
            heldout_fraction=float(heldout) if config.heldout_paths else config.heldout_fraction,
            heldout=heldout,
        )

    def rows(self, pack: Callable[[documents.Spans], rows.Rows]) -> stream.CorpusRows:
        """Returns the training rows, which `pack` makes of documents. Only the start of the first file is read."""
        return stream.CorpusRows(
            self._encoding(heldout=False), self._groups(heldout=False), self.config, pack
        )

    def side(self, *, heldout: bool) -> documents.Spans:
        """Returns the first held-out documents in the order of files, until they have 2^24 tokens.

        At most the first 64 groups of text, a GiB, are read to find them. Ids of documents are not compared with the
        vocabulary here, but when a document is used.
        """
        encoding = dataclasses.replace(self._encoding(heldout=heldout), vocab_size=sources.ANY_VOCABULARY)
        groups = tuple(self._groups(heldout=heldout)[:_HELDOUT_GROUPS])
        return _read_heldout(encoding, groups, workers=self.config.tokenizer_workers)

    def describe(self) -> dict[str, Any]:
        """Returns counts of files and bytes, an estimate of the tokens from a sample, and a SHA-256."""
        config, corpus = self.config, self.opened(heldout=False)
        groups = self._groups(heldout=False)
        held = config.heldout_paths or config.heldout_fraction
        heldout = self.side(heldout=True).lengths if held else np.empty(0, np.int64)
        encoding = dataclasses.replace(self._encoding(heldout=False), vocab_size=sources.ANY_VOCABULARY)
        encode, tokens, read = encoding_lib.Encoder(encoding), np.empty(0, np.int32), 0.0
        # A piece is empty if its row group begins in another piece, or if all of its documents are short.
        sample = pieces.grouped([(corpus[0], config.source)], _SAMPLE_BYTES)
        for number, piece in enumerate(sample[:_SAMPLE_PIECES], 1):
            tokens, read = encode(piece).tokens, number / len(sample)
            if len(tokens):
                break
        estimate = int(len(tokens) / read * sum(file.size for file in corpus) / corpus[0].size)
        # Half a row of each group, or all of the data if it has less.
        dropped = len(groups) * config.context_length / 2 / max(1, estimate)
        note = f"estimated; about {min(1.0, dropped):.1%} are dropped at the ends of parts of the data"
        if not len(tokens):
            note = (
                f"their number is unknown, because the first {read:.1%} of {corpus[0].path} have no training document "
                f"of at least data.shortest_document tokens, {config.shortest_document}"
            )
        matches = [*itertools.chain(*self.all_opened())]
        digest = hashlib.sha256(tokens.astype("<u4").tobytes())
        for number, file in enumerate(matches):
            digest.update(f"{file.key}\0{file.size}\0".encode("utf-8", "surrogateescape"))
            if number % -(-len(matches) // _DIGEST_FILES) == 0:
                with files.errors(file.path), files.open_file(file.path) as opened:
                    for place in (file.size // 2, max(0, file.size - _DIGEST_BYTES)):
                        opened.seek(place)
                        digest.update(opened.read(_DIGEST_BYTES))
        description = sources.described(matches, None, heldout) | {
            "tokens": estimate,
            "tokens_note": note,
            "streams": stream.count_streams(groups, config.batch_size),
            "digest": digest.hexdigest(),
            "digest_of": "names and sizes of all files, middles and ends of some, and tokens of a sample",
        }
        if encoding.tokenizer is not None:
            tokenizer = tokenizer_lib.load(encoding.tokenizer, setting="data.tokenizer")
            description["tokenizer"] = tokenizer.identity
        return description


# The documents that were opened last are cached, because `describe` and the evaluations of a run open the same ones;
# they may not depend on the vocabulary, which `describe` does not know.
@functools.lru_cache(maxsize=1)
def _read_heldout(
    encoding: encoding_lib.Encoding, groups: tuple[pieces.Group, ...], *, workers: int
) -> documents.Spans:
    read: list[encoding_lib.Tokens] = []
    with encoding_lib.open_workers(encoding, min(workers, len(groups))) as submit:
        for tokens in encoding_lib.in_order(submit, groups, ahead=workers + 1):
            read.append(tokens)
            if sum(len(part.tokens) for part in read) >= HELDOUT_TOKENS:
                break
    spans = documents.Spans(
        [part.tokens for part in read].__getitem__,
        [*map(pieces.name_of, groups[: len(read)])],
        [part.lengths for part in read],
    )
    return spans.select(np.cumsum(spans.lengths) - spans.lengths < HELDOUT_TOKENS)
