"""Tokenizers for preparing data and for generation: bytes, `tokenizers` files or `tiktoken` encodings."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Integer

from sympow_jax import extras, hub, spelling
from sympow_jax.config import serialize


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Functions from the bytes of a document to ids, and back.

    Attributes:
        name: name for errors and records.
        vocab_size: upper bound of the ids.
        separator: id that ends a document; None if the tokenizer has none.
        begin: id that the tokenizer puts before a text, as Llama's does; None if it puts none.
        fingerprint: text that differs between tokenizers whose ids differ.
        encode: converts bytes to ids, without `begin`. Raises UnicodeDecodeError if it reads text and the bytes are
            not UTF-8, and ValueError if the tokenizer cannot encode the text.
        decode: converts ids to bytes. The ids need not be whole characters. Unassigned ids give no bytes.
    """

    name: str
    vocab_size: int
    separator: int | None
    fingerprint: str
    encode: Callable[[bytes], Integer[np.ndarray, " tokens"]]
    decode: Callable[[Sequence[int]], bytes]
    begin: int | None = None

    @property
    def identity(self) -> str:
        """Text for records, which differs between tokenizers that make other tokens of the same documents."""
        return f"{self.fingerprint}, separator {self.separator}"

    def end_of_text(self, chosen: int | None, *, setting: str) -> int:
        """Returns the id that ends a document: `chosen`, given as `setting`, or the separator; or raises ValueError."""
        end = self.separator if chosen is None else chosen
        if end is None:
            raise ValueError(f"the tokenizer {self.name} names no end of text; set {setting} to an id")
        return end

    def encode_document(
        self, document: bytes, *, name: str, begin: bool = True
    ) -> Integer[np.ndarray, " tokens"]:
        """Returns the ids of a document, which errors call `name`.

        With `begin`, the id `self.begin` comes first, unless the document has no tokens or that id is the separator
        too. Raises ValueError if the document cannot be encoded.
        """
        try:
            ids = self.encode(document)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{name} is not UTF-8 at byte {error.start}; leave it out, convert it, or use the tokenizer `byte`"
            ) from None
        except ValueError as error:
            raise ValueError(f"{name}: {error}; leave it out") from error
        if not begin or self.begin in (None, self.separator) or not len(ids):
            return ids
        return np.insert(ids, 0, self.begin)


# The separator is byte 0, which text does not contain.
_BYTES = Tokenizer(
    name="byte",
    vocab_size=256,
    separator=0,
    fingerprint="byte",
    encode=lambda document: np.frombuffer(document, np.uint8),
    decode=lambda tokens: bytes(token for token in tokens if 0 <= token < 256),
)

# Names that tokenizers give to the token between documents, in order of preference.
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


@contextlib.contextmanager
def _errors_as(message: str) -> Iterator[None]:
    """Turns any error of a tokenizer library, whose Rust code raises BaseException if it panics, into a ValueError."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ValueError(f"{message}: {spelling.cut(str(error), 200) or type(error).__name__}") from error


def _encoder(name: str, encode: Callable[[str], Sequence[int]]) -> Callable[[bytes], np.ndarray]:
    """Returns the function from the bytes of a document to ids, made of one that takes text."""

    def encode_bytes(document: bytes) -> Integer[np.ndarray, " tokens"]:
        text = document.decode()
        with _errors_as(f"tokenizer {name} cannot encode a text of {len(text)} characters"):
            return np.asarray(encode(text), np.uint32)

    return encode_bytes


def _from_file(path: pathlib.Path, option: str, *, name: str) -> Tokenizer:
    """Returns the tokenizer of a `tokenizers` file; `option` is the setting and its value, for errors."""
    with extras.required("tokenizers", option):
        import tokenizers
    with _errors_as(f"{option} is not a `tokenizers` file"):
        loaded = tokenizers.Tokenizer.from_file(str(path))
    # Text that spells a special token is encoded as text.
    loaded.encode_special_tokens = True
    # The file may ask for both, for a model's inputs. A document has its own length.
    loaded.no_truncation()
    loaded.no_padding()
    vocabulary = loaded.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise ValueError(f"{option} has no tokens; name the file of a trained tokenizer")
    vocab_size = 1 + max(vocabulary.values())  # ids need not be contiguous

    # The separator, `eos_token` of `tokenizer_config.json`, and the id before a text, `bos_token`.
    config = path.with_name("tokenizer_config.json")
    values = serialize.read_object(config) if path.name == "tokenizer.json" and config.is_file() else {}
    special: dict[str, int | None] = {}
    for key in ("eos_token", "bos_token") if values.get("add_bos_token") is True else ("eos_token",):
        token = values.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and (not isinstance(token, str) or token not in vocabulary):
            raise ValueError(
                f"{option}: the {key} {token!r} of tokenizer_config.json is no token of tokenizer.json; correct it"
            )
        special[key] = None if token is None else vocabulary[token]
    separator, begin = special["eos_token"], special.get("bos_token")
    if separator is None:
        separator = next((vocabulary[token] for token in _END_NAMES if token in vocabulary), None)
    # A post-processor as it is pickled: its JSON without that of the whole vocabulary.
    processor = json.loads(loaded.post_processor.__getstate__()) if loaded.post_processor else {}
    for part in processor.get("processors", [processor]):
        if "cls" in part:
            begin = part["cls"][1]
            break
        if first := (part.get("single") or [{}])[0].get("SpecialToken"):
            begin = part["special_tokens"][first["id"]]["ids"][0]
            break

    # Byte fallback loses a whole run of bytes if one is not UTF-8. Those become U+FFFD first, so that a later byte does
    # not change earlier text.
    ids = [vocabulary.get(f"<0x{byte:02X}>", -1) for byte in range(256)]
    falls_back = -1 not in ids and loaded.decode([ids[65]]) == "A"
    bytes_of = {token: byte for byte, token in enumerate(ids)} if falls_back else {}

    def decode(tokens: Sequence[int]) -> bytes:
        repaired: list[int] = []
        for is_bytes, run in itertools.groupby(tokens, bytes_of.__contains__):
            read = list(run)
            if is_bytes:
                text = bytes(map(bytes_of.__getitem__, read)).decode(errors="replace")
                read = [ids[byte] for byte in text.encode()]
            repaired += read
        repaired = [token for token in repaired if 0 <= token < vocab_size]
        return loaded.decode(repaired, skip_special_tokens=False).encode()

    fingerprint = hashlib.sha256(path.read_bytes()).hexdigest()
    fingerprint += "" if begin is None else f" after {begin}"
    encode = _encoder(name, lambda text: loaded.encode(text, add_special_tokens=False).ids)
    return Tokenizer(name, vocab_size, separator, fingerprint, encode, decode, begin)


def _from_tiktoken(name: str, option: str) -> Tokenizer:
    with extras.required("tokenizers", option):
        import tiktoken
    known = ", ".join(tiktoken.list_encoding_names())
    with _errors_as(
        f"{option} is no file and cannot be had from tiktoken; give byte, a file, a folder as ./NAME, or one of "
        f"{known}, which tiktoken downloads or finds in the folder TIKTOKEN_CACHE_DIR"
    ):
        loaded = tiktoken.get_encoding(name)
    separator = loaded.eot_token if "<|endoftext|>" in loaded.special_tokens_set else None

    def decode(tokens: Sequence[int]) -> bytes:
        found = []
        for token in tokens:
            with contextlib.suppress(KeyError, OverflowError):  # ids need not be contiguous
                found.append(loaded.decode_single_token_bytes(token))
        return b"".join(found)

    vocab_size = loaded.max_token_value + 1
    # tiktoken checks the digest of its files.
    fingerprint, encode = f"{loaded.name} {vocab_size}", _encoder(name, loaded.encode_ordinary)
    return Tokenizer(loaded.name, vocab_size, separator, fingerprint, encode, decode)


def local_name(name: str) -> str:
    """Returns a name that `load` finds without a download, for other processes: a `Tokenizer` cannot be pickled."""
    return str(hub.local_path(name, hub.TOKENIZER)) if hub.is_remote(name) else name


def absolute_name(name: str) -> str:
    """Returns a name of the same tokenizer that `load` finds from any working folder."""
    return os.path.abspath(os.path.expanduser(name)) if _is_path(name) else name


def _is_path(name: str) -> bool:
    return not hub.is_remote(name) and (os.path.sep in name or bool(os.path.splitext(name)[1]))


def load(name: str, *, setting: str = "--tokenizer") -> Tokenizer:
    """Returns the tokenizer `name`.

    Its separator is the `eos_token` of the `tokenizer_config.json` next to its `tokenizer.json`. If there is none, it
    is the first of the usual names, such as `<|endoftext|>`, that the vocabulary has.

    Args:
        name: `byte`, a `tokenizers` JSON file, a folder that has it as `tokenizer.json`, `hf://ORG/NAME[@REVISION]`,
            which is downloaded, or an encoding that tiktoken has cached or can download.
        setting: flag or setting that the name was given as, for errors.

    Raises:
        ValueError: there is no such tokenizer, the download fails, or the library is not installed.
    """
    if name == "byte":
        return _BYTES
    option = f"{setting}={name}"
    if not hub.is_remote(name) and not _is_path(name):
        return _from_tiktoken(name, option)
    path = pathlib.Path(os.path.expanduser(local_name(name)))
    shown = name if hub.is_remote(name) else (path.resolve() if path.is_dir() else path).name
    if path.is_dir() and not (path := path / "tokenizer.json").is_file():
        raise ValueError(
            f"{option} has no tokenizer.json, the only kind of file that is read; transformers writes it: "
            f"AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)"
        )
    if not path.is_file():
        raise ValueError(f"{option}: there is no such file or folder")
    return _from_file(path, option, name=shown)
