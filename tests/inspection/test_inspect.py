"""Tests of pictures of a text from the command line, and of their numbers."""

import dataclasses
import json
import math

import numpy as np
import PIL.Image
import pytest

from sympow_jax import config, training
from sympow_jax.commands import inspect as command
from sympow_jax.inspection import attention_maps, figures, inspect
from tests import marked, mistakes
from tests.training import small

TEXT = "the quick brown fox"
WIDTH, HEADS, LAYERS = 16, 2, 2


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Makes a run `a` over bytes below 128, with a checkpoint, and `untrained`, `images` and `tokens` without one."""
    folder = tmp_path_factory.mktemp("runs")
    settings = config.Config(
        model=config.ModelConfig(vocab_size=128, layers=LAYERS, width=WIDTH, heads=HEADS, dtype="bfloat16"),
        data=config.DataConfig(context_length=16, batch_tokens=64),
        training=config.TrainingConfig(steps=2),
    )
    small.save(folder / "a", settings, small.program(settings).init_state(), step=2)
    changes = {
        "untrained": {},
        "images": {
            "task": {"name": "classification", "classes": 2},
            "model": {"patch_size": 4},
            "data": {"source": "images", "paths": ["x"], "image_size": 16},
        },
        "tokens": {"data": {"source": "tokens", "paths": ["x.bin"]}},
    }
    for name, change in changes.items():
        changed = json.loads((folder / "a" / "config.json").read_text())
        for key, values in change.items():
            changed[key] |= values
        if name == "images":
            changed["model"]["attention"] |= dataclasses.asdict(config.preset("softmax", causal=False))
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(changed))
    (folder / "tokens" / "checkpoints" / "2").mkdir(parents=True)
    (folder / "text").write_text(TEXT)
    (folder / "long").write_text("a" * 1025)
    return folder


@pytest.fixture(scope="module")
def written(runs):
    out = runs / "out"
    assert command.main([f"--workdir={runs}/a", f"--text_file={runs}/text", f"--out={out}"]) == 0
    return json.loads((out / "inspect.json").read_text())


def exactly(parameter):
    return np.asarray(parameter[...], np.float64)


def input_of_first_layer(model, tokens):
    """Computes the embedding after two LayerNorms, in float64."""
    x = exactly(model.embedding)[tokens]
    for norm in (model.embedding_norm, model.blocks[0].attention_norm):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        x = x * exactly(norm.scale) + exactly(norm.bias)
    return x


def test_json_has_the_numbers_of_the_run(runs, written):
    assert written["run"] == "a"
    assert written["step"] == 2
    assert "".join(written["text"]) == TEXT
    assert written["tokens"] == list(TEXT.encode())
    _, model, _ = training.restore_exact(runs / "a")
    assert model.config.dtype == "float32"
    maps = attention_maps.attention_maps(model, written["tokens"], range(LAYERS))
    for layer, expected in zip(written["layers"], maps, strict=True):
        assert len(layer["weights"]) == HEADS
        for rows, weights in zip(layer["weights"], expected.weights):
            assert [len(row) for row in rows] == list(range(1, len(TEXT) + 1))
            np.testing.assert_allclose([sum(row) for row in rows], 1, atol=1e-5)
            np.testing.assert_allclose(rows[-1], weights[-1], atol=1e-6)
        np.testing.assert_allclose(layer["half_life"], expected.half_life, rtol=1e-6)
        np.testing.assert_allclose(layer["rate"], expected.rate, rtol=1e-6)
        np.testing.assert_allclose(layer["theta"], expected.theta, rtol=1e-6)
    # Half-lives and rates are those of the layer's projections.
    attention, x = model.blocks[0].attention, input_of_first_layer(model, written["tokens"])
    decay = np.log1p(np.exp(-(x @ exactly(attention.decay.kernel) + exactly(attention.decay_bias))))
    np.testing.assert_allclose(written["layers"][0]["half_life"], math.log(2) / decay.T, rtol=1e-5)
    rate = 1 + np.tanh(x @ exactly(attention.rate.kernel))
    np.testing.assert_allclose(written["layers"][0]["rate"], rate.T, rtol=1e-5)
    assert written["layers"][0]["theta"][0] == pytest.approx(1.0)


def test_one_layer(runs, capsys):
    assert command.main([f"--workdir={runs}/a", f"--text={TEXT}", "--layer=1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    names = [line.split()[1].rpartition("/")[2].rstrip(":") for line in printed]
    assert names == ["inspect.json", "attention.png", "half_life.png", "rotation.png"]
    for name in ("attention", "half_life", "rotation"):
        with PIL.Image.open(runs / "a" / "inspect" / f"{name}.png") as picture:
            width, height = picture.size
            assert width > 500
            assert height > 200
            assert len(picture.convert("RGB").getcolors(2**24)) > 20
    layer_maps = json.loads((runs / "a" / "inspect" / "inspect.json").read_text())
    assert [layer["layer"] for layer in layer_maps["layers"]] == [1]


def test_omitted_figures_are_reported(tmp_path):
    settings = config.Config(
        model=config.ModelConfig(
            vocab_size=128, layers=1, width=WIDTH, heads=HEADS, attention=config.preset("sympow")
        ),
        data=config.DataConfig(context_length=16, batch_tokens=64),
    )
    small.save(tmp_path / "plain", settings, small.program(settings).init_state())
    written = inspect.inspect(tmp_path / "plain", b"fox")
    assert [line.split()[:2] for line in written[2:]] == [["no", "half_life.png:"], ["no", "rotation.png:"]]
    assert {path.name for path in (tmp_path / "plain" / "inspect").iterdir()} == {
        "attention.pdf",
        "attention.png",
        "inspect.json",
    }


def draw(maps, tokens, folder):
    labels = [figures.visible(bytes([token])) for token in tokens]
    figures.draw_weights(folder / "attention.png", maps, labels, subtitle="x", causal=True)
    if maps[0].half_life is not None:
        figures.draw_half_lives(folder / "half_life.png", maps, labels, subtitle="x")
    if maps[0].rate is not None:
        figures.draw_rotations(folder / "rotation.png", maps, labels, subtitle="x")
    return {path.stem for path in folder.glob("*.png")}


@marked.cases(
    ("heads", "time", "numbers"), [(1, 1, "one a head"), (5, 12, "vectors")], slow=[(3, 130, "one a head")]
)
def test_figures_of_all_sizes(heads, time, numbers, tmp_path, monkeypatch):
    titles, title = [], figures._title
    monkeypatch.setattr(figures, "_title", lambda *lines: titles.append(lines[-1]) or title(*lines))
    random = np.random.default_rng(0)
    shape = (heads, time, 4) if numbers == "vectors" else (heads, time)
    half_life = random.uniform(0.01, 10, shape)
    half_life[0, 0] = math.inf
    layer_maps = attention_maps.LayerMaps(
        layer=1,
        weights=random.uniform(-0.1, 1, (heads, time, time)),  # of both signs
        half_life=half_life,
        rate=random.uniform(0, 2, shape),
        theta=np.array([6.28, 1.0, 0.1, 0.01]),
    )
    tokens = [*b"a $b$ and\nc"] * time
    assert draw([layer_maps], tokens[:time], tmp_path) == {"attention", "half_life", "rotation"}
    # The rates of the papers, which are not those of rope.
    assert "the fastest pair, which rotates by 6.28 at rate 1" in titles[-1]


def test_labels_of_tokens():
    visible = figures.visible
    shown = {b"a": "a", b" the": "␣the", b"\n": "⏎", b"\xff": "ff", b"\x00": "0", "é".encode(): "é"}
    assert {x: visible(x) for x in shown} == shown
    assert visible("漢".encode()) == "6f22"  # not in the font
    assert visible(b"a" * 40) == "a" * 11 + "…"


MISTAKES = """
--workdir={runs}/nothing --text=a                   | is not the workdir of a run
--workdir={runs}/untrained --text=a                 | has no checkpoint
--workdir={runs}/images --text=a                    | a run on images
--workdir={runs}/tokens --text=a                    | --tokenizer=FILE
--workdir={runs}/a --text=                          | --text is empty
--workdir={runs}/a --text=café                      | vocabulary of 128 lacks: 169, 195
--workdir={runs}/a --text=a --layer=2               | --layer is 2; the model has layers 0 to 1
--workdir={runs}/a --text=a --layer=-1              | --layer is -1
--workdir={runs}/a --text=a --layer=first           | invalid int value: 'first'
--workdir={runs}/a --text_file={runs}/long          | has 1025 tokens; maps are made of at most 1024
--workdir={runs}/a --text_file={runs}/nothing       | error: {runs}/nothing: No such file or
--workdir={runs}/a --text=a --out={runs}/text       | cannot write the results to {runs}/text
--workdir={runs}/a                                  | one of the arguments --text --text_file is required
--workdir={runs}/a --text=a --text_file={runs}/text | not allowed with
"""


def test_a_mistake_is_one_line_and_exit_code_1(runs, capsys):
    for line in MISTAKES.format(runs=runs).strip().splitlines():
        arguments, message = line.split(" | ")
        assert message in mistakes.line(command.main, arguments.split(), capsys)


def test_all_maps_together_have_a_limit(runs, monkeypatch):
    monkeypatch.setattr(inspect, "MAX_WEIGHTS", 400)
    with pytest.raises(ValueError, match=r"2 layers of 2 heads and 11 tokens are 484 weights.*to 10 tokens"):
        inspect.inspect(runs / "a", b"a" * 11)
