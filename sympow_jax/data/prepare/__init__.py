"""Turns text into token files.

Without `--text_column`, every file is a document. With it, files are parquet or JSON lines, also compressed, local or
remote, and every row or line is a document, whose text is in this column or field.

`bin` writes the tokens of all documents, each followed by the separator. Next to it, it writes a JSON file with the
tokenizer, the size of its vocabulary, the separator and the dtype.

`longcrawl64` writes the same tokens as a Zarr v2 array in LongCrawl64's layout: documents and separators are
concatenated and cut into rows of `row_tokens`. A long document continues in the next row, short documents
share a row, and nothing is padded. The rest at the end, less than a row, is dropped, and its size is printed.
(LongCrawl64 itself has one document per row: it has only long documents, without their ends.)

The work is done in pieces of some MB of text, by `--workers` processes. A command that was stopped, for whatever
reason, continues when it is repeated. Its output does not depend on the number of workers or of repetitions.
"""

from sympow_jax.data.prepare.outputs import Options, Progress, write_bin, write_longcrawl64

__all__ = ["Options", "Progress", "write_bin", "write_longcrawl64"]
