"""Tests of published transformers: the logits of the original software, exact round trips, and files with faults."""

import dataclasses
import json
import pathlib
import re
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from sympow_jax import config, generation, hub, weights
from sympow_jax.config import serialize
from sympow_jax.weights import families
from tests import mistakes
from tests.ops import cases
from tests.weights import originals, power_models

BOUND = 1e-5
EACH = pytest.mark.parametrize("name", originals.MODELS)


@nnx.jit
def logits(model, tokens):
    return model(tokens)


def expected(name: str) -> tuple[np.ndarray, np.ndarray]:
    arrays = safetensors.numpy.load_file(originals.FIXTURES / name / "expected.safetensors")
    return arrays["tokens"], arrays["logits"]


def tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    files = folder.glob("model*.safetensors")
    return {name: x for file in files for name, x in safetensors.numpy.load_file(file).items()}


def copy(folder: pathlib.Path, name: str = "llama", **changes) -> pathlib.Path:
    folder.mkdir()
    shutil.copy(originals.FIXTURES / name / "model.safetensors", folder)
    values = json.loads((originals.FIXTURES / name / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@EACH
def test_logits_are_those_of_transformers(name):
    """In one pass, and token by token for norms of queries and keys; tests of models and windows stream the others."""
    _, model = weights.from_pretrained(originals.FIXTURES / name)
    program = generation.Program(model)
    tokens, original = expected(name)
    assert np.std(original) > 0.5
    assert cases.error(logits(model, tokens), original) <= BOUND
    if name != "qwen3":
        return
    start = 4
    actual, state = program.prefill(tokens[:, :start], np.array([start] * 2), max_length=originals.TIME)
    for time in range(start, originals.TIME):
        assert cases.error(actual, original[:, time - 1]) <= BOUND
        actual, state = program.decode(state, tokens[:, time])


@EACH
def test_a_round_trip_is_exact(tmp_path, name):
    settings, model = weights.from_pretrained(originals.FIXTURES / name)
    count = weights.save_pretrained(tmp_path / "one", settings, model)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["config.json", "model.safetensors"]
    actual, original = tensors(tmp_path / "one"), tensors(originals.FIXTURES / name)
    assert actual.keys() == original.keys()
    assert count == sum(x.size for x in original.values())
    for key, x in original.items():
        np.testing.assert_array_equal(actual[key], x)
    again = weights.read_settings(tmp_path / "one" / "config.json")
    assert serialize.flatten(again) == serialize.flatten(settings)


def test_shards_and_their_index(tmp_path):
    settings, model = weights.from_pretrained(originals.FIXTURES / "qwen3")
    weights.save_pretrained(tmp_path, settings, model, max_file_bytes=8_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = {path.name: safetensors.numpy.load_file(path) for path in tmp_path.glob("model-*.safetensors")}
    assert sorted(files) == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 1
    assert index["weight_map"] == {key: name for name, arrays in files.items() for key in arrays}
    sizes = {name: sum(x.nbytes for x in arrays.values()) for name, arrays in files.items()}
    assert max(sizes.values()) <= 8_000
    assert index["metadata"] == {"total_size": sum(sizes.values())}
    _, again = weights.from_pretrained(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))


@pytest.mark.parametrize("name", power_models.CONFIGS)
def test_manifest_models_are_their_published_formula(tmp_path, name):
    power_models.write(name, tmp_path / "published")
    settings, model = weights.from_pretrained(tmp_path / "published")
    tokens, tensors_ = np.random.default_rng(1).integers(0, 40, (1, 30)), power_models.weights(name)
    original = power_models.forward(name, tensors_, tokens[0])
    assert np.std(original) > 0.5
    assert cases.error(logits(model, tokens)[0], original) <= BOUND
    weights.save_pretrained(tmp_path / "saved", settings, model)
    actual = tensors(tmp_path / "saved")
    assert actual.keys() == tensors_.keys()
    for key, x in tensors_.items():
        np.testing.assert_array_equal(actual[key], x)
    values, published = (
        json.loads((tmp_path / "saved" / "config.json").read_text()),
        power_models.CONFIGS[name],
    )
    unread = (
        "chunk_size",
        "prefill_chunk_size",
        "switch_over_seq_len",
        "sliding_window",
        "use_sliding_window",
    )
    assert values.items() >= {key: value for key, value in published.items() if key not in unread}.items()


def test_parameters_of_bfloat16():
    """The model runs, and its logits are those of the rounded parameters in float32."""
    _, model = weights.from_pretrained(originals.FIXTURES / "qwen3", param_dtype="bfloat16")
    _, exact = weights.from_pretrained(originals.FIXTURES / "qwen3")
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("bfloat16")}
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(exact))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), rounded)
    nnx.update(exact, jax.tree.map(lambda x: x.astype(jnp.float32), rounded))
    tokens, _ = expected("qwen3")
    actual = logits(model, tokens)
    assert actual.dtype == jnp.float32
    assert cases.error(actual, logits(exact, tokens)) <= BOUND


NOT_SUPPORTED = """
llama: model_type="gemma"                        | model_type is 'gemma'; it must be one of gpt2, llama, mistral,
llama: attention_bias=True, mlp_bias=True        | attention_bias is True, not False; mlp_bias is True, not False
llama: hidden_act="gelu"                         | hidden_act is 'gelu', not one of silu
llama: hidden_size=1.5                           | model.width is 1.5
gpt2: n_layer="2", n_embd=None                   | model.layers is '2'
gpt2: n_head=5                                   | model.heads is 5 and does not divide model.width 12
gpt2: scale_attn_by_inverse_layer_idx=True       | scale_attn_by_inverse_layer_idx is True, not False
llama: partial_rotary_factor=0.5                 | partial_rotary_factor is 0.5, not 1.0
llama: quantization_config={"bits": 4}           | quantization_config is {'bits': 4}, not None
llama: num_key_value_heads=3                     | model.heads is 4 and model.kv_heads is 3
llama: tie_word_embeddings="no"                  | model.tied_head is 'no'
llama: eos_token_id=["x"]                        | a value of this llama is missing or of the wrong type: '<='
llama: model_type="x" * 10**5                    | it must be one of gpt2, llama
llama: rope_parameters=dict(rope_type="yarn")    | rope_type is 'yarn', not default or llama3
llama: rope_parameters=None, rope_scaling=dict(type="dynamic") | rope_type is 'dynamic'
llama: rope_parameters=dict(rope_type="llama3", factor=2.0) | rope.low_frequency_factor is None
llama: rope_parameters=dict(full_attention=dict(rope_theta=1e4)) | not the same rates for all layers
llama: rope_parameters=dict(partial_rotary_factor=0.25) | partial_rotary_factor is 0.25, not 1.0
llama: rope_scaling=dict(rope_type="yarn")       | rope_parameters and rope_scaling differ; leave one of them out
llama: rope_parameters=dict(rope_theta=None)     | rope_theta is None, not a number
qwen2: layer_types=5                             | of the wrong type: 'int' object is not iterable
qwen2_window: max_window_layers=1, layer_types=None | some layers have a sliding window and some have none
qwen2: use_sliding_window="false"                 | use_sliding_window is 'false', not true or false
qwen2: layer_types=["sliding_attention"] * 2     | sliding_window is None, not the number of tokens of layer_types
qwen3: layer_types=["full_attention", "chunked_attention"] | layer_types has chunked_attention, not full_attention or
qwen3: layer_types=[str(x) for x in range(10**5)] | more, not full_attention or sliding_attention
"""


@pytest.mark.parametrize("row", NOT_SUPPORTED.strip().splitlines())
def test_configs_that_are_not_supported(tmp_path, row):
    name, changes, message = re.fullmatch(r"(\w+): (.*?) +\| (.*)", row).groups()
    folder = copy(tmp_path / "model", name, **eval(f"dict({changes})"))
    with mistakes.refused(message) as raised:
        weights.read_settings(folder / "config.json")
    assert str(raised.value).startswith(f"{folder}/config.json: ")
    assert len(str(raised.value)) < 600


def test_keys_of_older_configs(tmp_path):
    """Version 4 of `transformers` has other keys of rotations; `head_dim` and the number of key heads may be absent."""
    values = json.loads((originals.FIXTURES / "llama32" / "config.json").read_text())
    expected_ = weights.read_settings(originals.FIXTURES / "llama32" / "config.json")
    rope = values.pop("rope_parameters")
    values |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert weights.read_settings(tmp_path / "config.json") == expected_
    assert expected_.model.attention.rope.scaling == "llama3"
    assert expected_.data.document_separator == 2
    for ends, separator in ((0, 0), (None, None), ([], None), ([3, 2], 3), ([None, 99, 2], 2)):
        (tmp_path / "config.json").write_text(json.dumps(values | {"eos_token_id": ends}))
        assert weights.read_settings(tmp_path / "config.json").data.document_separator == separator
    # Layers before `max_window_layers` have no window.
    qwen = json.loads((originals.FIXTURES / "qwen2_window" / "config.json").read_text()) | {
        "layer_types": None
    }
    for first, kernel in ((0, "sliding_window"), (2, "softmax"), (28, "softmax")):
        (tmp_path / "config.json").write_text(json.dumps(qwen | {"max_window_layers": first}))
        assert weights.read_settings(tmp_path / "config.json").model.attention.kernel == kernel
    values = {key: value for key, value in values.items() if key not in ("head_dim", "num_key_value_heads")}
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = weights.read_settings(tmp_path / "config.json").model
    assert (model.num_kv_heads, model.head_size) == (4, 4)


# Of PowerCoder-3B's `config.json`, which has the default of its class as the end.
POWERCODER = json.loads("""
{"model_type": "powercoder", "bos_token_id": 50256, "dtype": "float32", "eos_token_id": 50256,
 "hidden_size": 3072, "initializer_range": 0.018042, "intermediate_size": 12288,
 "max_position_embeddings": 4096, "num_attention_heads": 24, "num_hidden_layers": 30,
 "num_key_value_heads": 2, "rope_scaling": null, "rope_theta": 10000.0, "sliding_window": null,
 "use_bias": true, "vocab_size": 49152}
""")


def test_an_end_outside_the_vocabulary_is_none(capsys):
    for changes in ({}, {"model_type": "starcoder2"}, {"eos_token_id": -1}, {"eos_token_id": [50256, None]}):
        read = families.settings(POWERCODER | changes)
        assert (read.model.vocab_size, read.data.document_separator) == (49152, None)
        assert read.data.context_length == 4096
        assert read.model.attention.kernel == ("softmax" if changes.get("model_type") else "power")
        assert "is outside the vocabulary of 49152; read as none\n" in capsys.readouterr().err


def test_values_of_the_original_config_stay():
    original = POWERCODER | {
        "pad_token_id": -1,
        "eos_token_id": [7, 3],
        "rope_parameters": {"rope_theta": 2.0},
    }
    read = families.settings(POWERCODER | {"eos_token_id": [7, 3]})
    for length, written in ((128, 4096), (8192, 8192)):
        settings = dataclasses.replace(
            read, data=dataclasses.replace(read.data, context_length=length, batch_tokens=length)
        )
        values = families.values(settings, original)[1]
        assert values["max_position_embeddings"] == written
        same = ("bos_token_id", "pad_token_id", "eos_token_id", "initializer_range", "rope_theta")
        assert {key: values[key] for key in same} == {key: original[key] for key in same}
        assert not {"rope_parameters", "dtype"} & values.keys()
    other = dataclasses.replace(read, data=dataclasses.replace(read.data, document_separator=5))
    assert families.values(other, original)[1]["eos_token_id"] == 5


PUBLISHED = """
llama3_8b llama3 {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
 "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
 "max_position_embeddings": 8192, "rope_theta": 500000.0, "tie_word_embeddings": false}
qwen3_14b qwen3 {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 17408,
 "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
 "max_position_embeddings": 40960, "rope_theta": 1000000, "tie_word_embeddings": false}
llama32_1b llama32 {"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
 "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
 "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": true,
 "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
 "original_max_position_embeddings": 8192, "rope_type": "llama3"}}
qwen2_7b qwen2 {"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
 "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 131072,
 "max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": false, "rope_theta": 1000000.0,
 "tie_word_embeddings": false}
starcoder2_3b starcoder2 {"model_type": "starcoder2", "vocab_size": 49152, "hidden_size": 3072,
 "intermediate_size": 12288, "num_hidden_layers": 30, "num_attention_heads": 24, "num_key_value_heads": 2,
 "max_position_embeddings": 16384, "rope_theta": 999999.4420358813, "sliding_window": 4096, "use_bias": true}
qwen3_14b brumby {"model_type": "brumby", "vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 17408,
 "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8, "max_position_embeddings": 32768,
 "rope_theta": 1000000}
"""


def test_published_configs_are_the_sizes_and_presets_of_this_package(tmp_path):
    for text in PUBLISHED.strip().replace("\n ", " ").splitlines():
        size, preset, content = text.split(maxsplit=2)
        (tmp_path / "config.json").write_text(content)
        values, read = json.loads(content), weights.read_settings(tmp_path / "config.json")
        sizes = config.MODEL_SIZES[size] | {"dtype": "float32"}
        ours = config.ModelConfig(**sizes, attention=config.preset(preset))
        assert serialize.flatten(read.model) == serialize.flatten(ours)
        family, written = families.values(read, {})
        assert family.model_type == values["model_type"]
        assert written.items() >= {key: x for key, x in values.items() if key != "sliding_window"}.items()
        if preset == "llama3":
            # A retrofit to windows has settings of gates and of the delta rule that nothing in it reads.
            unread = {"decay_bias": 6.0, "negative_eigenvalues": True}
            attention = dataclasses.replace(read.model.attention, **unread, window=8)
            model = dataclasses.replace(
                read.model, attention=attention, attention_pattern=("sliding_window",)
            )
            assert families.find(dataclasses.replace(read, model=model)).model_type == "mistral"


def mistaken(folder: pathlib.Path) -> str:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        weights.from_pretrained(folder)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_all_mismatches_are_listed(tmp_path):
    folder = copy(tmp_path / "model")
    arrays = tensors(folder)
    arrays["model.layers.0.mlp.up_proj.weight"] = arrays["model.layers.0.mlp.up_proj.weight"].T.copy()
    arrays["model.layers.1.self_attn.q_proj.bias"] = np.zeros(16, np.float32)
    arrays["model.norm.weight"] = arrays["model.norm.weight"].astype(np.int8)
    del arrays["lm_head.weight"]
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    assert mistaken(folder) == (
        f"{folder} does not fit the model of these settings: it lacks lm_head.weight; the model has no "
        "model.layers.1.self_attn.q_proj.bias; model.layers.0.mlp.up_proj.weight is [16, 24] and not [24, 16]; "
        "model.norm.weight is of dtype I8 and not F32, F16, BF16"
    )


def test_a_head_must_be_the_embedding_if_they_are_tied(tmp_path):
    folder = copy(tmp_path / "model", "llama32")
    arrays = tensors(folder)
    embedding = arrays["model.embed_tokens.weight"]
    changed = embedding + np.eye(*embedding.shape, 3, dtype=np.float32)
    for head in (changed, embedding[:-1], embedding):
        safetensors.numpy.save_file(arrays | {"lm_head.weight": head}, folder / "model.safetensors")
        if head is not embedding:
            assert mistaken(folder).startswith(f"lm_head.weight of {folder} is not the embedding; ")
    weights.from_pretrained(folder)


@pytest.mark.robust
def test_missing_and_damaged_files(tmp_path):
    folder = copy(tmp_path / "model")
    settings, model = weights.from_pretrained(folder)
    whole = folder / "model.safetensors"
    whole.write_bytes(whole.read_bytes()[:-1])
    assert f"{whole} is not a safetensors file, or is damaged" in mistaken(folder)
    whole.unlink()
    assert (
        mistaken(folder) == f"there is no model.safetensors and no model.safetensors.index.json in {folder}"
    )
    (folder / "pytorch_model.bin").touch()
    assert "pickles (.bin), which are not read: load them with transformers" in mistaken(folder)
    (folder / "config.json").unlink()
    assert mistaken(folder).startswith(f"cannot read the settings {folder}/config.json")
    weights.save_pretrained(folder, settings, model, max_file_bytes=8_000)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = "model-00001-of-00003.safetensors"
    for places, message in (
        (None, f"{index} has no weight_map"),
        (content["weight_map"] | {"a": "../x.safetensors"}, "files of its folder: ../x"),
        (content["weight_map"] | {"a": "/x.safetensors"}, "files of its folder: /x"),
        (content["weight_map"] | {"a": "x.bin"}, "files that are no .safetensors files of its folder: x.bin"),
        (content["weight_map"] | {"a": name, "b": name}, "names tensors that its files do not have: a, b"),
    ):
        index.write_text(json.dumps({"weight_map": places}))
        assert message in mistaken(folder)
    index.write_text("{")
    assert f"{index}: " in mistaken(folder)
    for places in ({str(x): f"{x}.safetensors" for x in range(10**5)}, {str(x): name for x in range(10**5)}):
        index.write_text(json.dumps({"weight_map": places}))
        assert "; download it again" in mistaken(folder)
        assert " more" in mistaken(folder)
        assert len(mistaken(folder)) < 900
    index.write_text(json.dumps(content))
    (folder / name).unlink()
    assert f"{folder} lacks {name}, which model.safetensors.index.json names" in mistaken(folder)


def test_gpt2_in_its_first_files(tmp_path):
    """They have no prefix, no `model_type`, float16 numbers, and the masks of attention."""
    folder = copy(tmp_path / "model", "gpt2", n_inner=50, activation_function="relu", layer_norm_epsilon=1e-6)
    values = json.loads((folder / "config.json").read_text())
    del values["model_type"]
    (folder / "config.json").write_text(json.dumps(values))
    read = weights.read_settings(folder / "config.json")
    model = read.model
    sizes = (model.layers, model.width, model.heads, model.vocab_size, model.hidden_width)
    assert sizes == (2, 12, 3, 40, 50)
    assert (model.activation, model.norm_epsilon) == ("relu", 1e-6)
    assert (model.biases, model.embedding_norm) == (True, False)
    assert model.attention == config.preset("gpt2", max_document_length=32)
    assert (read.data.document_separator, read.data.context_length) == (2, 32)

    settings, expected_ = weights.from_pretrained(originals.FIXTURES / "gpt2")
    plain = {name.removeprefix("transformer."): x.astype("float16") for name, x in tensors(folder).items()}
    masks = {
        "h.0.attn.bias": np.tril(np.ones((1, 1, 32, 32), np.float32)),
        "h.1.attn.masked_bias": np.float32([1]),
    }
    safetensors.numpy.save_file(plain | masks, folder / "model.safetensors")
    for one, other in zip(
        *(jax.tree.leaves(nnx.state(x)) for x in (weights.load(folder, settings), expected_)), strict=True
    ):
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, np.asarray(other).astype("float16"))


def test_power_attention_takes_the_weights_of_softmax(tmp_path):
    """With the positions of GPT-2 and without gates it has the same parameters."""
    folder = copy(tmp_path / "model", "gpt2")
    settings, original = weights.from_pretrained(folder)

    def changed(**attention):
        attention = dataclasses.replace(settings.model.attention, kernel="power", **attention)
        return dataclasses.replace(settings, model=dataclasses.replace(settings.model, attention=attention))

    model = weights.load(folder, changed())
    assert model.config.attention.kernel == "power"
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(original))
    with pytest.raises(ValueError, match=r"it lacks blocks\.0\.attention\.decay\.kernel, blocks\.1"):
        weights.load(folder, changed(decay="learned"))


def test_models_that_no_family_describes(tmp_path):
    settings, model = weights.from_pretrained(originals.FIXTURES / "llama")
    nearest = "none of Hugging Face's layouts describes this model; the nearest is "
    for changes, message in (
        ({"embedding_norm": True}, "llama, but model.embedding_norm is True and not False; write it in the"),
        ({"activation": "geglu"}, "llama, but model.activation is 'geglu' and not 'swiglu'; "),
        ({"attention": config.preset("conformal_paper")}, ""),
    ):
        other = dataclasses.replace(settings, model=dataclasses.replace(settings.model, **changes))
        with pytest.raises(ValueError, match=f"^{re.escape(nearest + message)}") as raised:
            weights.save_pretrained(tmp_path / "model", other, model)
    assert "model.attention.position is 'learned_rope' and not 'rope', " in str(raised.value)
    assert not (tmp_path / "model").exists()


def test_nothing_is_overwritten(tmp_path):
    settings, model = weights.from_pretrained(originals.FIXTURES / "llama")
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        (folder / name).write_text("mine")
        (folder / "tokenizer.json").touch()
        with pytest.raises(ValueError, match=rf"{name} exists; remove it or choose another folder"):
            weights.save_pretrained(folder, settings, model)
        assert (folder / name).read_text() == "mine"
        (folder / name).unlink()
        weights.save_pretrained(folder, settings, model)


def test_names_of_the_hub(monkeypatch):
    asked = []

    def download(repo, *, revision, allow_patterns):
        asked.append((repo, revision))
        assert "*.safetensors" in allow_patterns
        if repo == "a/missing":
            raise OSError("404 Client Error.\nmore")
        return str(originals.FIXTURES / "qwen3")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=download))
    settings, _ = weights.from_pretrained("hf://a/b")
    assert settings.model.attention.qk_norm
    weights.from_pretrained("hf://a/b@v1.0")
    assert asked == [("a/b", None), ("a/b", "v1.0")]
    assert hub.local_path("hf", hub.WEIGHTS) == pathlib.Path("hf")
    for name in ("hf://a", "hf://a/b/c", "hf://a/b@", "hf:///b"):
        with mistakes.refused(f"{name} is no name of a repository; write hf://ORG/NAME"):
            hub.local_path(name, hub.WEIGHTS)
    with pytest.raises(ValueError, match=r"^cannot download hf://a/missing: 404 Client Error\.$"):
        hub.local_path("hf://a/missing", hub.WEIGHTS)
