"""Published models in GGUF files, in the form of a folder of Hugging Face's layout: config, tensors and tokenizer.

The package `gguf`, which is an extra, reads the files and dequantizes their tensors.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Float

from sympow_jax import extras, spelling
from sympow_jax.ops import rotary
from sympow_jax.weights import families, layouts

# Families that llama.cpp has under the same name. Its `llama` includes Mistral, without a window.
_ARCHITECTURES = ("gpt2", "llama", "qwen2", "qwen3", "starcoder2")
# Keys of the sizes, by field of `config.ModelConfig`.
_SIZES = {
    "layers": "block_count",
    "width": "embedding_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "mlp_width": "feed_forward_length",
}
_RMS_EPSILON, _EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_SCALING = "rope.scaling."
_READ = {"context_length", "rope.freq_base", "rope.dimension_count", _RMS_EPSILON, _EPSILON, *_SIZES.values()}
# Keys that shapes of tensors say too, or that say where the weights are from.
_UNREAD = {"vocab_size", "attention.value_length", "tensor_data_layout"}
# Tensor of the numbers that rotation rates are divided by, for Llama 3.1 to 3.3, which differ in `factor` only.
_DIVISORS = "rope_freqs.weight"
_LLAMA3 = {"low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "original_length": 8192}

# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
# The space in tokens of SentencePiece.
_SPACE = "\u2581"
# Regular expressions that split a text before merges, one after the other, by tokenizer.ggml.pre.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SPLITS = {
    "gpt-2": [_GPT2],
    "llama-bpe": [_WORDS % "{1,3}"],
    "qwen2": [_WORDS % ""],
    "refact": [r"\p{N}", _GPT2],
    "smollm": [r"\p{N}", _GPT2],
    "starcoder": [r"\p{N}", _GPT2],
}


def is_file(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path has the suffix of GGUF files."""
    return pathlib.Path(path).suffix == ".gguf"


class _File:
    """Metadata and tensors of a file of a known architecture.

    Attributes:
        library: the package `gguf`.
        architecture: name of the architecture.
        family: its family.
        tensors: tensors of the library by name.
    """

    def __init__(self, path: str):
        with extras.required("gguf", path):
            import gguf
        self.library: Any = gguf
        try:
            reader = gguf.GGUFReader(path)
            # The library has several arrays for each token.
            self._metadata = {key: field.contents() for key, field in reader.fields.items()}
            self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        except Exception as error:  # of any kind, where the bytes have no meaning
            raise ValueError(
                f"{path} is not a GGUF file, or is damaged: {spelling.cut(str(error), 200)}"
            ) from error
        if reader.byte_order != "I":
            raise ValueError(f"{path} has another byte order than this machine")
        if (parts := self.value("split.count", 0)) > 1:
            raise ValueError(f"{path} is one of {parts} parts; join them with llama-gguf-split --merge")
        self.architecture = self.value("general.architecture")
        if self.architecture not in _ARCHITECTURES:
            raise ValueError(
                f"the architecture of {path} is {spelling.shown(self.architecture)}; it must be one of "
                f"{', '.join(_ARCHITECTURES)}"
            )
        self.family = families.FAMILIES[self.architecture]

    def value(self, key: str, default: Any = None) -> Any:
        """Returns a value of the metadata."""
        value = self._metadata.get(key, default)
        # The decimal number that float32 rounds.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def values(self) -> dict[str, Any]:
        """Returns the values of the architecture, by key without its name."""
        start = f"{self.architecture}."
        keys = [key for key in self._metadata if key.startswith(start)]
        return {key.removeprefix(start): self.value(key) for key in keys}


@functools.lru_cache(maxsize=1)
def _read(path: str, *_: int) -> _File:
    """Returns an open file. This takes seconds for a large vocabulary, and an import needs the file three times."""
    return _File(path)


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[_File]:
    """Opens a file; raises ValueError if it cannot be read, or if a value of it is not what it must be."""
    try:
        status = os.stat(path)
        yield _read(os.fspath(path), status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"a value of {path} is missing or of the wrong type: {error!r}") from error


def config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the contents of a `config.json` of the model in a file.

    Raises:
        ValueError: the package `gguf` is not installed, the file does not exist or is damaged, or its architecture or a
            value of its metadata is unknown.
    """
    with _opened(path) as file:
        family, given = file.family, file.values()
        unknown = [key for key in given if key not in _READ | _UNREAD and not key.startswith(_SCALING)]
        if unknown:
            raise ValueError(f"{path} has values of an unknown meaning: {spelling.listed(unknown)}")
        values: dict[str, Any] = {"model_type": family.model_type, "architectures": [family.architecture]}
        values |= {
            family.sizes[field]: given[key]
            for field, key in _SIZES.items()
            if field in family.sizes and key in given
        }
        if "token_embd.weight" in file.tensors:
            values["vocab_size"] = int(file.tensors["token_embd.weight"].shape[-1])
        if (epsilon := given.get(_RMS_EPSILON, given.get(_EPSILON))) is not None:
            values[family.epsilon] = epsilon
        values[family.length] = given.get("context_length")
        values["tie_word_embeddings"] = "output.weight" not in file.tensors
        ids = {f"{name}_token_id": file.value(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
        values |= {name: number for name, number in ids.items() if number is not None}
        if not family.rope:
            return values
        # Without attention.key_length, heads are rotated as a whole.
        rotated = given.get("rope.dimension_count")
        if rotated is not None and values.setdefault("head_dim", rotated) != rotated:
            raise ValueError(
                f"{path} rotates {rotated} of the {values['head_dim']} elements of a head, not all"
            )
        values["rope_theta"] = given.get("rope.freq_base", 10_000.0)
        if (kind := given.get(f"{_SCALING}type", "none")) != "none":
            values["rope_scaling"] = {"rope_type": kind}
        elif _DIVISORS in file.tensors:
            divisors = file.tensors[_DIVISORS].data
            scaling: dict[str, Any] = {"factor": float(divisors.max()), **_LLAMA3}
            rates = rotary.rope_rates(2 * len(divisors), base=values["rope_theta"])
            if not np.allclose(rates / rotary.llama3_rates(rates, **scaling), divisors, rtol=1e-4):
                raise ValueError(f"{_DIVISORS} of {path} is not the scaling of Llama 3.1 to 3.3")
            keys = {families.LLAMA3[field]: number for field, number in scaling.items()}
            values["rope_scaling"] = {"rope_type": "llama3", **keys}
        return values


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor with the methods of the library of safetensors. What is read of it is dequantized.

    Attributes:
        stored: the tensor of the package `gguf`.
        dequantize: its function of an array and a type.
        transposed: whether the layout has the transpose.
        heads: number of heads whose rows are in the order of interleaved rotations; 0 if they are not.
    """

    stored: Any
    dequantize: Callable[[Any, Any], Float[np.ndarray, "..."]]
    transposed: bool = False
    heads: int = 0

    def get_shape(self) -> list[int]:
        # The package has the last axis first.
        return [int(size) for size in self.stored.shape[:: 1 if self.transposed else -1]]

    def get_dtype(self) -> str:
        try:
            self.dequantize(self.stored.data[:1], self.stored.tensor_type)
        except NotImplementedError:
            return self.stored.tensor_type.name
        return "F32"

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Float[np.ndarray, "..."]:
        data, kind = self.stored.data, self.stored.tensor_type
        if data.ndim == 1:
            return self.dequantize(data, kind)[index]
        rows, *columns = (index if isinstance(index, tuple) else (index,))[:: -1 if self.transposed else 1]
        order = np.arange(len(data))
        if self.heads:
            # Pair m of a head is in rows 2 m and 2 m + 1 of the file, and in rows m and D/2 + m of the layout.
            order = order.reshape(self.heads, -1, 2).swapaxes(1, 2).ravel()
        part = self.dequantize(data[order[rows]], kind)[:, *columns]
        return part.T if self.transposed else part


def tensors(path: str | os.PathLike[str]) -> dict[str, _Tensor]:
    """Returns the tensors of a file, by the names in the layout of its family; others keep their names.

    Raises:
        ValueError: as `config`.
    """
    with _opened(path) as file:
        layout, given = file.family.layout, file.values()
        heads: dict[str, int] = {}
        if file.architecture == "llama":
            queries = given[_SIZES["heads"]]
            heads = {"attn_q": queries, "attn_k": given.get(_SIZES["kv_heads"], queries)}
        count = len({name.split(".")[1] for name in file.tensors if name.startswith("blk.")})
        # Whether the layout has the transpose: matrices of layers are [size_out, size_in] in a file.
        names = dict.fromkeys([layouts.HEAD, *(layout.prefix + name for name in layout.outside)], False)
        for layer in range(count):
            start = f"{layout.prefix}{layout.layers}{layer}."
            names |= {start + name: not tensor.transposed for name, tensor in layout.layer.items()}
        modules = file.library.get_tensor_name_map(file.library.MODEL_ARCH[file.architecture.upper()], count)
        stored = {name: tensor for name, tensor in file.tensors.items() if name != _DIVISORS}
        found = {}
        for name, transposed in names.items():
            module, _, kind = name.rpartition(".")
            own = modules.get_name(module) or module
            if (tensor := stored.pop(f"{own}.{kind}", None)) is not None:
                interleaved = heads.get(own.rpartition(".")[2], 0)
                found[name] = _Tensor(tensor, file.library.dequantize, transposed, interleaved)
        return found | {name: _Tensor(tensor, file.library.dequantize) for name, tensor in stored.items()}


def tokenizer(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """Returns files of `transformers` for the vocabulary of a file, by name; none if it has no vocabulary.

    Raises:
        ValueError: as `config`, or the kind of the vocabulary is unknown.
    """
    with _opened(path) as file:
        start = "tokenizer.ggml."
        kind, splits, tokens = (file.value(start + name) for name in ("model", "pre", "tokens"))
        if not tokens:
            return {}
        types = file.value(f"{start}token_type", [_NORMAL] * len(tokens))
        ids = {token: number for number, token in enumerate(tokens) if types[number] != _UNUSED}
        keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        numbers = {name: file.value(f"{start}{key}_token_id") for name, key in keys.items()}
        special = {name: tokens[number] for name, number in numbers.items() if number is not None}
        parts: dict[str, Any]
        if kind == "gpt2" and splits in _SPLITS:
            steps: list[dict[str, Any]] = [
                {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
                for regex in _SPLITS[splits]
            ]
            level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
            parts = {
                # Qwen's own tokenizer has it, which its files do not say.
                "normalizer": {"type": "NFC"} if splits == "qwen2" else None,
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, level]},
                "decoder": level,
            }
            pairs = [merge.split(" ", 1) for merge in file.value(f"{start}merges")]
            begins, options = splits == "llama-bpe", {"ignore_merges": splits == "llama-bpe"}
        elif kind == "llama":
            steps = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
            back: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}]
            back += [{"type": "ByteFallback"}, {"type": "Fuse"}]
            if file.value(f"{start}add_space_prefix", True):
                steps.insert(0, {"type": "Prepend", "prepend": _SPACE})
                back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
            parts = {
                "normalizer": {"type": "Sequence", "normalizers": steps},
                "decoder": {"type": "Sequence", "decoders": back},
            }
            # The pair whose token has the highest score is merged first.
            normal = [token for token, number in ids.items() if types[number] == _NORMAL]
            scores = dict(zip(tokens, file.value(f"{start}scores"), strict=True))
            cuts = (
                (x[:n], x[n:]) for x in sorted(normal, key=lambda x: -scores[x]) for n in range(1, len(x))
            )
            known = set(normal)
            pairs = [pair for pair in cuts if known.issuperset(pair)]
            begins = True
            options = {
                "unk_token": special.get("unk_token", "<unk>"),
                "fuse_unk": True,
                "byte_fallback": True,
            }
        else:
            raise ValueError(
                f"{path} has a vocabulary of the unknown kind {spelling.shown(kind)}, {spelling.shown(splits)}; name "
                f"the model's tokenizer with --config.data.tokenizer=NAME"
            )
        parts["model"] = {"type": "BPE", "vocab": ids, "merges": pairs, **options}
        if file.value(f"{start}add_bos_token", begins):
            # Puts the first token before a text.
            begin = special["bos_token"]
            one, two = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
            first = {"SpecialToken": {"id": begin, "type_id": 0}}
            parts["post_processor"] = {
                **{"type": "TemplateProcessing", "single": [first, one], "pair": [first, one, first, two]},
                "special_tokens": {begin: {"id": begin, "ids": [ids[begin]], "tokens": [begin]}},
            }
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        parts["added_tokens"] = [
            {"id": number, "content": token, "special": types[number] != _USER_DEFINED, **flags}
            for token, number in ids.items()
            if types[number] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
        config_ = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **special,
        }
        if (template := file.value("tokenizer.chat_template")) is not None:
            config_["chat_template"] = template
        files = {"tokenizer.json": {"version": "1.0", **parts}, "tokenizer_config.json": config_}
        return {name: json.dumps(values, ensure_ascii=False).encode() for name, values in files.items()}
