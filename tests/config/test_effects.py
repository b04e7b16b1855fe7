"""Tests that settings without effect are named, and that those that are named have none."""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import PIL.Image
import pytest
from flax import nnx

from sympow_jax import config, data, layers
from sympow_jax.config import effects, loading
from sympow_jax.config.attention import KERNELS
from tests.data import builders

A = "model.attention."
# Other values, which fit each other, of settings of layers and rows that not every run reads.
OTHERS: dict[str, Any] = {
    "model.state_dtype": "bfloat16",
    A + "decay_bias": 3.0,
    A + "learned_rope_start": "paper",
    A + "power": 4,
    A + "negative_eigenvalues": True,
    A + "feature_map": "relu",
    A + "normalizer": "rotated",
    A + "form": "chunked",
    A + "chunk_size": 4,
    A + "exact_window": 2,
    A + "window": 4,
    A + "max_document_length": 512,
    A + "rope.base": 500.0,
    A + "rope.layout": "halves",
    A + "rope.factor": 3.0,
    A + "rope.low_frequency_factor": 0.5,
    A + "rope.high_frequency_factor": 3.0,
    A + "rope.original_length": 100,
    A + "lrpe.basis": "householder",
    A + "lrpe.rates": "c",
    A + "lrpe.reference_length": 99,
    "data.token_dtype": "uint32",
    "data.document_separator": 1,
    "data.text_columns": ("other",),
    "data.label_column": "other",
    "data.labels": ("1", "0"),
    "data.tokenizer_workers": 1,
    "data.image_size": 4,
    "data.packing": "documents",
}
BASE = config.Config(
    model=config.ModelConfig(vocab_size=256, layers=1, width=16, heads=2, dtype="float32"),
    data=config.DataConfig(context_length=16, batch_tokens=32),
)
SCALED = config.RopeConfig(base=10_000.0, scaling="llama3")
LAYERS = [
    *({"kernel": kernel, "position": "none"} for kernel in KERNELS),
    {"kernel": "linear", "feature_map": "symmetric"},
    {"kernel": "linear", "decay": "none", "causal": False},
    {"kernel": "power", "softmax_window": True},
    *({"decay": "none", "position": position} for position in ("none", "rope", "lrpe", "learned_rope")),
    *({"decay": "none", "position": position, "rope": SCALED} for position in ("rope", "learned_rope_pairs")),
    {"decay": "none", "position": "learned_rope", "learned_rope_start": "paper"},
    *({"position": "lrpe", "lrpe": config.LrpeConfig(rates=rates)} for rates in ("b", "rope")),
    {"position": "lrpe", "lrpe": config.LrpeConfig(core="permutation")},
]


def named(settings: config.Config) -> set[str]:
    return {text.partition(" ")[0] for text in effects.without_effect(settings)}


def program(settings: config.Config) -> str:
    """Returns the program of a layer that is initialized and called, and makes a state, with its constants.

    A layer that is not causal makes no state.
    """

    def run(key, x, segment_ids):
        layer = layers.make_attention(settings.model, rngs=nnx.Rngs(key))
        state = layer.init_state(1, max_length=4096) if settings.model.attention.causal else None
        return layer(x, segment_ids=segment_ids), state

    documents = jnp.zeros((1, 16), jnp.int32)
    return jax.jit(run).lower(jax.random.key(0), jnp.zeros((1, 16, 16)), documents).as_text()


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: "-".join(map(str, layer.values()))[:50])
def test_a_layer_reads_the_settings_of_attention_that_are_not_named(layer):
    attention = config.AttentionConfig(**layer)
    task = "next_token" if attention.causal else "masked_token"
    base = loading.replace(BASE, {"model.attention": attention, "task.name": task})
    assert not effects.without_effect(base)
    changes = {path: value for path, value in OTHERS.items() if path.startswith("model.")}
    single = {path: loading.replace(base, {path: value}) for path, value in changes.items()}
    without = {path for path in changes if named(single[path])}
    before = program(base)
    assert program(loading.replace(base, {path: changes[path] for path in without})) == before
    for path in changes.keys() - without - {x for x, one in single.items() if one == base}:
        assert program(single[path]) != before, path


@pytest.mark.parametrize(
    ("source", "task", "settings", "count"),
    [
        ("text", config.TaskConfig(), {}, 7),
        ("tokens", config.TaskConfig(), {}, 5),
        ("tsv", config.TaskConfig(name="regression"), {"text_columns": ("text",)}, 5),
        ("images", config.TaskConfig(name="classification", classes=2), {"image_size": 8}, 7),
        ("listops", config.TaskConfig(name="classification", classes=10), {"context_length": 2048}, 8),
    ],
)
def test_rows_do_not_depend_on_settings_of_data_that_are_named(tmp_path, source, task, settings, count):
    """count: how many of the changed settings have no effect."""
    lines = b"text\tlabel\n" + b"one\t0\ntwo\t1\n" * 9
    builders.write_files(tmp_path, {"text/1": b"document " * 9, "text/2": b"another " * 9, "tsv": lines})
    builders.write_bin(tmp_path / "tokens", [range(1, 90)])
    for path in ("images/dark", "images/light"):
        (tmp_path / path).mkdir(parents=True)
        PIL.Image.new("RGB", (8, 8)).save(tmp_path / path / "1.png")
    paths = () if source == "listops" else (str(tmp_path / source),)
    base = builders.data_config(source=source, paths=paths, **settings)
    changes = {path[5:]: value for path, value in OTHERS.items() if path.startswith("data.")}
    changed = {"data": dataclasses.replace(base, **changes)}
    found = named(types.SimpleNamespace(**vars(BASE) | changed | {"task": task}))
    assert len(found) == count
    without = dataclasses.replace(base, **{x: y for x, y in changes.items() if f"data.{x}" in found})
    one, other = (data.train_dataset(x, task=task, vocab_size=256) for x in (base, without))
    for index in range(3):
        builders.assert_same(one[index], other[index])


def test_each_setting_without_effect_is_named_with_its_reason():
    texts = {A + "power": "4", A + "rope.base": "500", A + "window": "7", "training.max_skips": "3"}
    softmax = config.load("quickstart:softmax")
    assert effects.without_effect(config.override(softmax, texts)) == [
        f"{A}power ({A}kernel is softmax, {A}feature_map is elu)",
        f"{A}window ({A}kernel is softmax, {A}softmax_window is false)",
        "training.max_skips (training.skip_nonfinite is false)",
    ]
    # One layer that reads a setting is enough.
    mixed = config.override(softmax, texts | {"model.attention_pattern": "softmax,sympow_gated_window"})
    assert named(mixed) == {"training.max_skips"}
    replaced = config.override(mixed, {A + "decay": "alibi"})
    assert named(replaced) == {A + "decay", "training.max_skips"}
    # The condition of a condition.
    lrpe = {A + "position": "lrpe", A + "lrpe.core": "permutation", A + "lrpe.rates": "b"}
    permuted = config.override(softmax, lrpe | {A + "kernel": "linear", A + "lrpe.reference_length": "99"})
    assert named(permuted) == {A + "lrpe.rates", A + "lrpe.reference_length"}


def test_settings_that_must_be_those_of_the_run_to_start_from_are_read():
    starts = {"task.initial_run": "runs/first"}
    # Its parameters have a second table, which classes are not read from.
    encoder = {"task.name": "classification", "task.classes": 2, "model.tied_head": False}
    encoder |= {A + "causal": False, A + "decay": "none", A + "kernel": "linear", A + "exact_window": 2}
    assert named(loading.replace(BASE, starts | encoder)) == {A + "exact_window"}
    # A position that all layers replace need not fit the heads.
    odd = {"model.width": 6, "model.attention_pattern": ("softmax_alibi",), A + "chunk_size": 8}
    assert not named(loading.replace(BASE, starts | odd))


def test_configs_and_presets_have_no_settings_without_effect():
    specs = [f"{name}:{preset}" for name in ("quickstart", "gpt2_124m") for preset in config.PRESETS]
    for method in config.LRPE_METHODS:
        specs += [f"{name}:{method}" for name in ("wikitext103", "roberta_wikibook", "deit_small")]
        specs += [f"lra:{task},{method}" for task in ("text", "listops", "retrieval", "pathfinder", "image")]
        specs += [f"glue:{task},{method}" for task in ("cola", "stsb", "mnli")]
    for spec in (*specs, "gpt2", "text:a", "gpt2_124m:softmax,data=fineweb-edu"):
        assert not effects.without_effect(config.load(spec)), spec
