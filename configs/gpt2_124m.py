"""The papers' recipe: 124M parameters in GPT-2's shape on LongCrawl64, 524,288 tokens per batch, Adam at 6e-4.

`--config=configs/gpt2_124m.py:PRESET[,p=POWER][,context=TOKENS][,data=DATA]`, for instance `:softmax` or
`:conformal,p=4,context=16384`; see `sympow_jax.config.PRESETS`. The papers use p = 2, 4 and 6 and contexts
256 to 65,536. `data.paths` and `data.heldout_paths` are the locations of the two arrays, which may be in an object
store. The batch fits on eight devices of 80 GB; with n times fewer devices, set `--config.optimizer.accumulate` n times
as high.

`data=fineweb-edu` reads 10 billion tokens of FineWeb-Edu from the Hugging Face Hub while training, the last of its 14
files held out. Any other value of `data` names your own data, tokenized for GPT-2: a file, a glob or a local folder of
parquet, JSON lines or `.bin`. A hundredth of its documents is held out. Losses are evaluated up to 65,536 tokens on
LongCrawl64, whose documents are that long, and up to the training context on other data.
"""

import dataclasses
import pathlib
from typing import Any

from sympow_jax import config

# Powers of two up to the length of a LongCrawl64 document; the papers train at each.
CONTEXTS = tuple(2**exponent for exponent in range(8, 17))


_FINEWEB = "hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT"
_DATA: dict[str, dict[str, Any]] = {
    "longcrawl64": {
        "source": "longcrawl64",
        "paths": ("data/longcrawl64/train.zarr",),
        "heldout_paths": ("data/longcrawl64/heldout.zarr",),
    },
    "fineweb-edu": {
        "source": "parquet",
        "paths": (f"{_FINEWEB}/00*.parquet", f"{_FINEWEB}/01[0-2]*.parquet"),
        "heldout_paths": (f"{_FINEWEB}/013*.parquet",),
        "tokenizer": "gpt2",
        "packing": "documents",
    },
}
_END_OF_TEXT = 50_256  # of GPT-2's tokenizer


def _own_data(path: str) -> dict[str, Any]:
    """Returns the settings of the user's data, whose source follows from the names of its files."""
    folder = pathlib.Path(path).expanduser()
    names = [file.name for file in folder.rglob("*")] if folder.is_dir() else [path]
    # In a folder, a `.json` describes other files, if there are any.
    others = (name for name in names if not name.endswith(".json"))
    sources = set(map(config.source_of, others)) - {None} or set(map(config.source_of, names)) - {None}
    if len(sources) != 1:
        kinds = "files of several kinds" if sources else "no file of a known kind"
        raise ValueError(
            f"data is {path!r}, which names {kinds}; give {', '.join(_DATA)}, or files that all end in .parquet, in "
            f".jsonl (compressed too) or in .bin"
        )
    (source,) = sources
    reads = {"document_separator": _END_OF_TEXT} if source == "tokens" else {"tokenizer": "gpt2"}
    return {
        "source": source,
        "paths": (path,),
        "heldout_fraction": 0.01,
        "packing": "documents",
        **reads,
    }


def get_config(
    preset: str = "conformal", *, p: int = 2, context: int = 4096, data: str = "longcrawl64"
) -> config.Config:
    """Returns the model named by `preset`, trained on `data` at `context`."""
    config.require_choice("context", context, CONTEXTS)
    attention = config.preset(preset, power=p)
    if p != 2 and attention.kernel not in ("power", "power_delta"):
        raise ValueError(
            f"p is {p}, but the kernel {attention.kernel!r} of preset {preset!r} has none; leave p out"
        )
    if attention.longest_document is not None:
        # Learned positions need a table as long as the context.
        attention = dataclasses.replace(attention, max_document_length=context)
    return config.Config(
        model=config.ModelConfig(**config.MODEL_SIZES["gpt2_124m"], attention=attention),
        data=config.DataConfig(
            **(_DATA[data] if data in _DATA else _own_data(data)),
            context_length=context,
            batch_tokens=524_288,
        ),
        optimizer=config.OptimizerConfig(learning_rate=6e-4),
        training=config.TrainingConfig(steps=100_000),
        evaluation=config.EvaluationConfig(
            # Of other documents, few are longer than a context; a length that none has would be an error.
            context_lengths=CONTEXTS if data == "longcrawl64" else CONTEXTS[: CONTEXTS.index(context) + 1]
        ),
    )
