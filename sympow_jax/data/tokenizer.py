"""Tokenizers for preparing data and for generation: bytes, a `tokenizers` file or a `tiktoken` encoding."""

import dataclasses
import importlib
import os
import pathlib
import types
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Integer

__all__ = ["Tokenizer", "load"]


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Functions from the bytes of a document to ids, and back.

    Attributes:
        name: name for errors and records.
        vocab_size: upper bound of the ids.
        separator: id that ends a document; None if the tokenizer has none.
        encode: converts bytes to ids.
        decode: converts ids to bytes. The ids need not be whole characters. Unassigned ids give no bytes.
    """

    name: str
    vocab_size: int
    separator: int | None
    encode: Callable[[bytes], Integer[np.ndarray, " tokens"]]
    decode: Callable[[Sequence[int]], bytes]


# The separator is byte 0, which text does not contain.
_BYTES = Tokenizer(
    name="byte",
    vocab_size=256,
    separator=0,
    encode=lambda document: np.frombuffer(document, np.uint8),
    decode=lambda tokens: bytes(tokens),
)

# Names that tokenizers give to the token between documents, in order of preference.
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


def _import(library: str, option: str) -> types.ModuleType:
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise ValueError(
            f"{option} needs the package {library!r}, which is not installed; "
            f"install the optional extra with pip install 'sympow-jax[tokenizers]'"
        ) from error


def _from_json(path: pathlib.Path, option: str) -> Tokenizer:
    library = _import("tokenizers", option)
    try:
        loaded = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{option} is not a `tokenizers` file: {error}") from error
    # Text that spells a special token is encoded as text.
    loaded.encode_special_tokens = True
    ends = (loaded.token_to_id(name) for name in _END_NAMES)

    def encode(document: bytes) -> Integer[np.ndarray, " tokens"]:
        return np.asarray(loaded.encode(document.decode(), add_special_tokens=False).ids, np.uint32)

    def decode(tokens: Sequence[int]) -> bytes:
        return loaded.decode(list(tokens), skip_special_tokens=False).encode()

    # Ids need not be contiguous.
    vocab_size = 1 + max(loaded.get_vocab(with_added_tokens=True).values())
    separator = next((end for end in ends if end is not None), None)
    return Tokenizer(path.name, vocab_size, separator, encode, decode)


def _from_tiktoken(name: str, option: str) -> Tokenizer:
    library = _import("tiktoken", option)
    try:
        loaded = library.get_encoding(name)
    except Exception as error:  # an unknown name, or any error of the download
        known = ", ".join(library.list_encoding_names())
        raise ValueError(
            f"{option} is no file and cannot be had from tiktoken ({type(error).__name__}); give byte, a file, or one "
            f"of {known}, which tiktoken downloads or finds in the folder TIKTOKEN_CACHE_DIR"
        ) from error

    def encode(document: bytes) -> Integer[np.ndarray, " tokens"]:
        return np.asarray(loaded.encode_ordinary(document.decode()), np.uint32)

    def token_bytes(token: int) -> bytes:
        try:
            return loaded.decode_single_token_bytes(token)
        except KeyError:  # ids need not be contiguous
            return b""

    def decode(tokens: Sequence[int]) -> bytes:
        return b"".join(map(token_bytes, tokens))

    return Tokenizer(loaded.name, loaded.max_token_value + 1, loaded.eot_token, encode, decode)


def load(name: str, *, setting: str = "--tokenizer") -> Tokenizer:
    """Returns the tokenizer `name`.

    Args:
        name: `byte`, a `tokenizers` JSON file, or an encoding that tiktoken has cached or can download.
        setting: flag or setting that the name was given as, for errors.

    Raises:
        ValueError: the file or encoding does not exist or is of another kind, or the library is not installed.
    """
    if name == "byte":
        return _BYTES
    option = f"{setting}={name}"
    if os.path.sep in name or os.path.splitext(name)[1]:
        path = pathlib.Path(name).expanduser()
        if not path.is_file():
            raise ValueError(f"{option}: there is no such file")
        return _from_json(path, option)
    return _from_tiktoken(name, option)
