"""Settings that a run reads, given the others, and those that have no effect."""

import itertools
import operator
import types
from collections.abc import Iterable, Mapping
from typing import Any

from sympow_jax.config import data, fields, literals, run
from sympow_jax.config.attention import kernels
from sympow_jax.config.attention.settings import AttentionConfig
from sympow_jax.config.task import Predicted

_LEARNED_ROPES = ("learned_rope", "learned_rope_pairs")
_ROPES = ("rope", *_LEARNED_ROPES)
_FORMED = {"kernel": ("power", "power_delta", "linear"), "causal": (True,)}
_RATED = ("orthogonal", "unitary", "mixed")
_SCALED = ({"rope.scaling": ("llama3",)},)
_DOCUMENTS = tuple(name for name, kind in data.SOURCES.items() if Predicted.TOKEN in kind.predicted)
_STORED = tuple(name for name, kind in data.SOURCES.items() if kind.stored)
_FILES = tuple(name for name, kind in data.SOURCES.items() if not kind.generated)

# Maps the path of a setting, or of a group of them, to alternatives: it is read if all conditions of one of these hold,
# each another setting and the values that it may have.
_Rules = Mapping[str, tuple[Mapping[str, tuple[Any, ...]], ...]]
_OF_ATTENTION: _Rules = {
    "decay_bias": ({"decay": tuple(name for name, kind in kernels.DECAYS.items() if kind.is_projected)},),
    "learned_rope_start": ({"position": _LEARNED_ROPES},),
    "power": (
        {"kernel": ("power", "power_delta")},
        {"kernel": ("linear",), "feature_map": ("symmetric", "tensor")},
    ),
    "negative_eigenvalues": ({"kernel": ("power_delta",)},),
    "feature_map": ({"kernel": ("linear",)},),
    "normalizer": ({"kernel": ("linear",), "position": (*_ROPES, "lrpe")},),
    "form": (_FORMED,),
    # Bidirectional attention to documents saves a state per chunk.
    "chunk_size": (_FORMED, {"kernel": ("linear",), "causal": (False,)}),
    "exact_window": ({"kernel": ("power", "linear"), "causal": (True,)},),
    "window": ({"kernel": ("sliding_window",)}, {"softmax_window": (True,)}),
    "max_document_length": (
        {"position": ("learned_absolute",)},
        {"position": ("rope",), "rope.base": (None,)},
        {"position": _LEARNED_ROPES, "rope.base": (None,), "learned_rope_start": ("paper",)},
        {"position": ("lrpe",), "lrpe.core": _RATED, "lrpe.rates": ("rope",)},
    ),
    "rope": ({"position": _ROPES},),
    **dict.fromkeys(("rope.factor", "rope.low_frequency_factor"), _SCALED),
    **dict.fromkeys(("rope.high_frequency_factor", "rope.original_length"), _SCALED),
    "lrpe": ({"position": ("lrpe",)},),
    "lrpe.rates": ({"lrpe.core": _RATED},),
    "lrpe.reference_length": ({"lrpe.core": _RATED, "lrpe.rates": ("b", "c", "cosine")},),
}
READ_IF: _Rules = {
    "model.vocab_size": ({"model.patch_size": (None,)},),
    "model.tied_head": ({"model.patch_size": (None,)},),
    "model.state_dtype": ({f"model.attention.{name}": values for name, values in _FORMED.items()},),
    **{
        f"model.attention.{path}": tuple({f"model.attention.{x}": y for x, y in row.items()} for row in rows)
        for path, rows in _OF_ATTENTION.items()
    },
    "task.classes": ({"task.name": ("classification",)},),
    "task.mask_token": ({"task.name": ("masked_token",)},),
    "data.heldout_fraction": ({"data.source": _FILES, "data.heldout_paths": ((),)},),
    "data.token_dtype": ({"data.source": _STORED},),
    "data.document_separator": (
        {"data.source": (*_STORED, *data.CORPUS_SOURCES)},
        {"data.source": ("tsv",), "task.dual_encoder": (False,)},
    ),
    "data.text_columns": ({"data.source": (*data.CORPUS_SOURCES, "tsv")},),
    "data.label_column": ({"data.source": ("tsv",)},),
    "data.labels": ({"data.source": ("tsv",), "task.name": ("classification",)},),
    "data.tokenizer_workers": ({"data.source": data.CORPUS_SOURCES},),
    "data.image_size": ({"data.source": ("images",)},),
    "data.image_tokens": ({"data.source": ("images",)},),
    "data.packing": ({"data.source": _DOCUMENTS},),
    "training.max_skips": ({"training.skip_nonfinite": (True,)},),
    "evaluation.documents": ({"task.name": ("next_token",)},),
}


def without_effect(config: run.Config) -> list[str]:
    """Returns the settings that are not at their defaults and that nothing in a run reads, each with the reason.

    An example is "model.attention.power (model.attention.kernel is softmax)". A setting of attention is read if any
    layer reads it.
    """
    # A retrofit also checks the attention that it replaces against that of the initial run.
    original = () if config.task.initial_run is None else (config.model.attention,)
    # Namespaces for each kind of layer instead of configs: a model of that kind alone may not be valid.
    kinds = dict.fromkeys((*config.model.attentions, *original))
    models = [types.SimpleNamespace(**vars(config.model) | {"attention": kind}) for kind in kinds]
    runs = [types.SimpleNamespace(**vars(config) | {"model": model}) for model in models]
    found = []
    for setting in itertools.chain.from_iterable(group.settings for group in fields.groups(run.Config)):
        value = operator.attrgetter(setting.path)
        if value(config) == setting.default:
            continue
        reasons = [_reasons(READ_IF, one, setting.path) for one in runs]
        for one, own in zip(runs, reasons, strict=True):
            if value(one) != value(config):
                own.append("model.attention_pattern replaces it")
        if all(reasons):
            found.append(f"{setting.path} ({', '.join(dict.fromkeys(itertools.chain(*reasons)))})")
    return found


def unread(attention: AttentionConfig) -> set[str]:
    """Returns the settings of attention, such as "rope.base", that nothing in a layer with these settings reads."""
    paths = (setting.path for group in fields.groups(AttentionConfig) for setting in group.settings)
    return {path for path in paths if _reasons(_OF_ATTENTION, attention, path)}


def _reasons(rules: _Rules, config: Any, path: str) -> list[str]:
    """Returns why nothing reads a setting; empty if something does."""
    # The rules of the setting and of each group around it must all hold.
    found = [rows for ruled, rows in rules.items() if f"{path}.".startswith(f"{ruled}.")]
    return [reason for rows in found for reason in _unmet(config, rows)]


def _unmet(config: Any, rows: Iterable[Mapping[str, tuple[Any, ...]]]) -> list[str]:
    """Returns "path is value" for each condition of any row that does not hold, or nothing if all of one row hold."""
    unmet = [
        [
            f"{path} is {literals.written(value)}"
            for path, values in row.items()
            if (value := operator.attrgetter(path)(config)) not in values
        ]
        for row in rows
    ]
    return [*itertools.chain(*unmet)] if all(unmet) else []
