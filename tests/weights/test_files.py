"""Tests of writing and reading weights: bitwise identical models, and errors for invalid files."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from sympow_jax import config, models, weights
from tests.models import families

DECODER = {"vocab_size": 32, "layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "dtype": "float32"}


def decoder(name="conformal_paper", *, layers=2, biases=False, **attention) -> config.Config:
    chosen = config.preset(name, **{"exact_window": 4, **attention})
    return config.Config(
        model=config.ModelConfig(**DECODER | {"layers": layers, "biases": biases}, attention=chosen),
        data=config.DataConfig(context_length=8, batch_tokens=8),
    )


def encoder(task="masked_token", **model) -> config.Config:
    shape = {"vocab_size": 32, "layers": 1, "width": 16, "heads": 2, "dtype": "float32", **model}
    attention = config.preset("linear", causal=False)
    return config.Config(
        model=config.ModelConfig(attention=attention, **shape),
        task=config.TaskConfig(name=task, classes=3 if task == "classification" else None),
        data=config.DataConfig(context_length=16, batch_tokens=16),
    )


RUNS = {
    "conformal_paper": decoder(),
    "qwen3": dataclasses.replace(decoder(), model=families.settings("qwen3")),
    "gpt2": decoder("gpt2", biases=True, max_document_length=8),
    "channels": decoder("conformal_paper", decay="channel_constant", position="learned_rope_pairs"),
    "lrpe": decoder("linear_lrpe", lrpe=config.LrpeConfig(basis="householder", learned_rates=True)),
    "spe": decoder("linear", position="spe"),
    "batch norm": encoder(norm="batch"),
    "classes": encoder("classification"),
}


def make_model(settings: config.Config, seed=0) -> models.Model:
    model = models.make(settings.model, settings.task, rngs=nnx.Rngs(seed))
    generator = np.random.default_rng(seed)
    nnx.update(
        model,
        jax.tree.map(
            lambda x: jnp.asarray(x + 0.3 * generator.normal(size=x.shape), jnp.float32), nnx.state(model)
        ),
    )
    return model


def variables(model: models.Model) -> dict[str, np.ndarray]:
    tree = nnx.to_pure_dict(nnx.state(model))
    return {models.parameter_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize("name", RUNS)
def test_a_round_trip_is_exact(tmp_path, name):
    settings = RUNS[name]
    model, path = make_model(settings), tmp_path / "model.safetensors"
    count = weights.save(path, settings, model)
    assert path.stat().st_mode == weights.settings_path(path).stat().st_mode
    assert weights.read_settings(weights.settings_path(path)) == settings
    actual, expected = variables(weights.load(path, settings)), variables(model)
    assert count == sum(leaf.size for leaf in expected.values())
    assert actual.keys() == expected.keys() == safetensors.numpy.load_file(path).keys()
    for key, leaf in expected.items():
        assert actual[key].dtype == leaf.dtype
        np.testing.assert_array_equal(actual[key], leaf)


def test_names(tmp_path):
    """Compares with the names in the documentation."""
    settings = decoder("conformal_paper", layers=1, biases=True)
    path = tmp_path / "model.safetensors"
    weights.save(path, settings, make_model(settings))
    actual = {name: x.shape for name, x in safetensors.numpy.load_file(path).items()}
    projections = {
        "attention.query": (16, 16),
        "attention.key": (16, 8),
        "attention.value": (16, 8),
        "attention.out": (16, 16),
        "mlp.up": (16, 64),
        "mlp.down": (64, 16),
    }
    norms = ("embedding_norm", "final_norm", "blocks.0.attention_norm", "blocks.0.mlp_norm")
    assert actual == (
        {
            "embedding": (32, 16),
            "blocks.0.attention.decay.kernel": (16, 2),
            "blocks.0.attention.rate.kernel": (16, 2),
        }
        | {f"{name}.{part}": (16,) for name in norms for part in ("scale", "bias")}
        | {f"blocks.0.{name}.kernel": shape for name, shape in projections.items()}
        | {f"blocks.0.{name}.bias": shape[1:] for name, shape in projections.items()}
    )


def test_bfloat16_rounds(tmp_path):
    settings, path = RUNS["conformal_paper"], tmp_path / "model.safetensors"
    model = make_model(settings)
    weights.save(path, settings, model, dtype="bfloat16")
    actual = variables(weights.load(path, settings))
    for name, leaf in variables(model).items():
        assert actual[name].dtype == jnp.float32
        np.testing.assert_array_equal(actual[name], leaf.astype(jnp.bfloat16).astype(jnp.float32))
    full = tmp_path / "full.safetensors"
    weights.save(full, settings, model)
    assert path.stat().st_size < 0.7 * full.stat().st_size


def test_missing_and_existing_files(tmp_path):
    settings, path = decoder(layers=1), tmp_path / "a" / "model.safetensors"
    model = make_model(settings)
    with pytest.raises(ValueError, match="there is no file"):
        weights.load(path, settings)
    with pytest.raises(ValueError, match=r"does not end in \.safetensors"):
        weights.save(tmp_path / "model.json", settings, model)
    with pytest.raises(ValueError, match="dtype is 'int8'; it must be one of float32, bfloat16"):
        weights.save(path, settings, model, dtype="int8")
    weights.save(path, settings, model)
    assert sorted(x.name for x in path.parent.iterdir()) == ["model.json", "model.safetensors"]
    with pytest.raises(ValueError, match=r"model\.safetensors exists; remove it or choose another name"):
        weights.save(path, settings, model)


def test_weights_that_are_not_finite(tmp_path):
    settings, path = RUNS["conformal_paper"], tmp_path / "model.safetensors"
    weights.save(path, settings, make_model(settings))
    tensors = safetensors.numpy.load_file(path)
    tensors["blocks.1.mlp.up.kernel"][3, :2] = np.nan, np.inf
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp\.up\.kernel has 2 of 1,024 numbers that are NaN"):
        weights.load(path, settings)


def test_an_export_that_was_stopped_before_its_weights_is_repeated(tmp_path):
    settings, path = RUNS["conformal_paper"], tmp_path / "model.safetensors"
    model = make_model(settings)
    weights.save(path, settings, model)
    path.unlink()
    weights.save(path, settings, model)
    path.unlink()
    path.with_suffix(".json").write_text("{}")
    with pytest.raises(ValueError, match=r"model\.json exists"):
        weights.save(path, settings, model)


def test_which_settings_belong_to_a_file(tmp_path):
    path = tmp_path / "model.safetensors"
    assert weights.settings_path(path) == tmp_path / "model.json"
    (tmp_path / "config.json").write_text("{}")
    assert weights.settings_path(path) == tmp_path / "config.json"
    (tmp_path / "model.json").write_text("{}")
    assert weights.settings_path(path) == tmp_path / "model.json"
