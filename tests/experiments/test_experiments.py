"""Tests of each experiment from the command line at test scale."""

import csv
import dataclasses
import importlib
import json
import math
import pathlib

import pytest

from experiments import _shared, context_scaling, evaluation_context, gating, lrpe, published
from sympow_jax import config, models, weights
from tests.experiments.conftest import OPTIONS

pytestmark = pytest.mark.robust


@pytest.fixture(scope="module")
def experiment(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("a,b")  # lists of paths are split at commas

    def call(name: str, *flags: str):
        module = importlib.import_module(f"experiments.{name}")
        trains = [] if name == "overhead" else [f"--data={corpus}"]
        assert module.main(["--scale=tiny", f"--out={out}", *trains, *flags]) == 0
        path: pathlib.Path = out / name / name
        with path.with_suffix(".csv").open() as file:
            rows = list(csv.DictReader(file))
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        return rows, json.loads(path.with_suffix(".json").read_text())

    return call


def test_experiments_share_runs(experiment, capsys):
    rows, content = experiment("evaluation_context", "--variants=softmax,sympow", "--seeds=3", "--steps=3")
    assert [(row["variant"], row["context_length"]) for row in rows] == [
        (variant, length) for variant in ("softmax", "sympow") for length in ("8", "16", "32")
    ]
    assert all(abs(float(row["loss"]) - math.log(256)) < 0.3 for row in rows)
    assert content["settings"]["model.attention.kernel"] == "softmax"
    assert content["settings"]["data.seed"] == content["settings"]["training.seed"] == 3
    assert content["runs"] == {
        "softmax_context16_steps3_seed3": {},
        "sympow_p2_context16_steps3_seed3": {"model.attention.kernel": "power"},
    }
    assert {"jax", "python", "sympow-jax"} <= set(content["versions"])
    assert [float(row["loss"]) for row in rows] == [row["loss"] for row in content["rows"]]
    assert content["command"].startswith("python -m experiments.evaluation_context --scale=tiny")

    capsys.readouterr()
    rows, content = experiment("context_scaling", "--variants=softmax", "--seeds=3", "--steps=3")
    printed = capsys.readouterr().out
    assert "softmax_context8_steps3_seed3\n" in printed
    assert "softmax_context16_steps3_seed3, done before" in printed
    assert [row["context"] for row in rows] == ["8", "16"]
    # The final loss is averaged over the last tenth of the updates, at least one: here, the last of three.
    curves = [point["loss"] for point in content["curves"]]
    assert curves[2::3] == pytest.approx([float(row["loss"]) for row in rows], abs=1e-6)


def test_a_published_model(experiment, tmp_path):
    """A folder of a tiny Llama, with a tokenizer of bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    body = {"norm": "rms", "activation": "swiglu", "embedding_norm": False}
    sizes = {"vocab_size": 259, "layers": 2, "width": 16, "heads": 2}
    model = config.ModelConfig(**sizes, **body, attention=config.preset("llama3"))
    settings = config.Config(model=model)
    folder = tmp_path / "llama"
    weights.save_pretrained(folder, settings, models.make(model, settings.task, rngs=0))
    names = ["<unk>", "<s>", "</s>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    codec = tokenizers.Tokenizer(tokenizers.models.BPE({name: i for i, name in enumerate(names)}, []))
    codec.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    codec.decoder = tokenizers.decoders.ByteLevel()
    codec.add_special_tokens(["</s>"])
    codec.save(str(folder / "tokenizer.json"))
    text = pathlib.Path(__file__)
    flags = f"--weights={folder}", f"--heldout={text},{text.with_name('conftest.py')}"
    rows, content = experiment(
        "published", *flags, "--variants=softmax,gated with window,window and chosen softmax"
    )
    variants = ("original", "softmax", "gated with window", "window and chosen softmax")
    assert [row["variant"] for row in rows] == [name for name in variants for _ in range(3)]
    assert all(abs(float(row["loss"]) - math.log(259)) < 0.5 for row in rows)
    stages = {f"{name}, {stage}" for name in variants[2:] for stage in ("first", "second")}
    assert set(content["tokens_per_second"]) == stages | {"softmax, second"}
    assert {point["stage"] for point in content["curves"]} == {"first", "second"}
    tokens = {
        name: [x["tokens"] for x in content["heldout_curves"] if x["variant"] == name] for name in variants
    }
    first = 2 * 32  # updates and tokens of each
    assert tokens["softmax"] == [32, 64, 96]
    assert tokens["gated with window"] == [first + x for x in tokens["softmax"]]
    places = [(row["variant"], row["task"], row["context_length"]) for row in content["tasks"]]
    assert places == [(name, task, 256) for name in variants for task in ("needle", "recall", "copy")]
    first, second = (row["loss"] for row in content["copying"])
    found = content["runs"]["window_and_chosen_softmax_first2_seed0"]["model.attention_pattern"]
    assert found == (["1*shared", "1*sliding_window"] if first > second else ["1*sliding_window", "1*shared"])
    assert [x["variant"] for x in content["samples"]] == [name for name in variants for _ in range(3)]
    assert all(x["text"] for x in content["samples"])


def test_runs_of_a_published_model_depend_on_contents_and_not_on_places(tmp_path):
    def place(name, text="text"):
        folder = tmp_path / name / "llama"
        folder.mkdir(parents=True)
        for file in ("weights", "data", "heldout"):
            (folder / file).write_text(text)
        more, read = (
            {"weights": str(folder)},
            {"data": (f"{folder}/data",), "heldout": (f"{folder}/heldout",)},
        )
        return published._inputs(dataclasses.replace(OPTIONS, more=more, **read))[2].runs

    assert place("a") == place("b") != place("c", "next")


@pytest.mark.slow
def test_powers(experiment):
    rows, content = experiment("powers", "--variants=softmax,p=4", "--seeds=3", "--steps=3")
    losses = {row["variant"]: float(row["loss"]) for row in rows}
    assert float(rows[1]["relative_loss"]) == pytest.approx(losses["p=4"] / losses["softmax"], abs=2e-6)
    assert content["runs"]["even_power_p4_context16_steps3_seed3"]["model.attention.form"] == "attention"


@pytest.mark.slow
def test_rotation_rates(experiment):
    rows, content = experiment("rotation_rates", "--variants=gated,conformal 0.1")
    assert [(row["variant"], row["seed"]) for row in rows] == [
        (variant, seed) for seed in "01" for variant in ("gated", "conformal 0.1")
    ]
    assert content["runs"]["conformal_0.1_p2_context16_tokens32_steps2_seed0"] == {
        "model.attention.position": "learned_rope",
        "model.attention.learned_rope_start": "paper",
        "optimizer.learning_rate_factors": ["*.attention.rate.kernel=0.1"],
    }
    assert list(rows[0]) == ["variant", "seed", "training", "heldout_16", "heldout_32"]


@pytest.mark.slow
def test_rotation_rates_that_begin_as_in_the_presets(experiment):
    _, content = experiment("rotation_rates", "--variants=gated,conformal", "--start=preset", "--seeds=0")
    assert content["settings"]["model.attention.decay"] == "learned_alibi"
    assert content["runs"]["conformal_p2_preset_context16_tokens32_steps2_seed0"] == {
        "model.attention.position": "learned_rope"
    }


@pytest.mark.slow
def test_presets(experiment):
    rows, content = experiment("presets", "--variants=softmax,gated delta p=1", "--seeds=0")
    assert [row["variant"] for row in rows] == ["softmax", "gated delta p=1"]
    # Keys and values of 16 tokens of width 16, and two heads of 8 features by 8 values.
    assert content["state_bytes"] == {"softmax": 2 * 16 * 16 * 4, "gated delta p=1": 2 * 8 * 8 * 4}


@pytest.mark.slow
def test_initial_gates(experiment):
    names = ("gated", "gated alibi", "conformal 4", "conformal alibi 10k zero")
    rows, content = experiment("initial_gates", f"--variants={','.join(names)}")
    for task, points in {"needle": ("2", "16"), "language": ("0", "16", "32")}.items():
        found = {(row["variant"], row["seed"], row["point"]) for row in rows if row["task"] == task}
        assert found == {(name, seed, point) for name in names for seed in "01" for point in points}
    changes = content["runs"]
    assert (
        changes["bias_gated_alibi_p2_context16_tokens32_steps2_seed0"]["model.attention.decay"]
        == "learned_alibi"
    )
    assert changes["bias_conformal_4_p2_context16_tokens32_steps2_seed0"]["model.attention.decay_bias"] == 4.0
    ours = changes["bias_conformal_alibi_10k_zero_p2_context16_tokens32_steps2_seed0"]
    assert "model.attention.learned_rope_start" not in ours  # that of the first variant, `rope`
    assert ours["model.attention.rope.base"] == 10_000.0


def test_lrpe_has_the_cells_of_the_papers_tables():
    found = lrpe.attentions()
    assert found["type1"] == config.lrpe_method("type1")
    assert found["orthogonal identity"].lrpe == config.LrpeConfig(learned_rates=True)
    assert found["permutation identity"].lrpe == config.LrpeConfig(core="permutation")
    cells = [found[lrpe._cell(core, basis)] for core in lrpe._CORES for basis in lrpe._BASES]
    assert {cell.normalizer for cell in cells} == {"unrotated"}
    # Eight methods, four of them with the other denominator too, and the six cells that are no method.
    assert len(found) == len(set(found.values())) == 18


def test_speeds_of_lrpe_are_those_of_an_encoder():
    options = dataclasses.replace(OPTIONS, plan=lrpe.PLANS["tiny"])
    found = lrpe.encoder_settings(options, "type2")
    paper = config.load("roberta_wikibook:type2")
    assert found.model.attention == paper.model.attention
    assert found.task.name == "masked_token"
    assert lrpe.encoder_settings(dataclasses.replace(options, scale="paper"), "type2") == paper
    batch = _shared.runs.random_batch(found)
    predicted = batch["targets"] >= 0
    assert batch["inputs"].shape == batch["targets"].shape == (2, 16)
    assert 1 <= predicted.sum(1).min() <= predicted.sum(1).max() < 16
    assert (batch["inputs"][predicted] == 255).any()


def test_gating_keeps_the_other_half_of_its_base():
    found = gating.attentions(4)
    assert {name: attention.decay for name, attention in found.items() if attention.position == "rope"} == {
        "softmax": "none",
        "sympow": "none",
        "gated": "learned",
        "constant": "constant",
        "channel fixed": "channel_fixed",
        "channel constant": "channel_constant",
        "channel learned": "channel_learned",
    }
    assert found["conformal pairs"] == config.preset(
        "conformal_paper", power=4, position="learned_rope_pairs"
    )
    assert set(gating.VARIANTS) <= set(found)


@pytest.mark.slow
def test_overhead(experiment):
    rows, content = experiment("overhead")
    assert [row["relative"] for row in rows if row["variant"] == "sympow"] == ["1.0"] * 4
    assert all(float(row["low"]) <= float(row["relative"]) <= float(row["high"]) for row in rows)
    assert content["parameters"]["gated"] - content["parameters"]["sympow"] == 12 * 768 * 12


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lrpe", "gating", "hybrids", "long_text", "retrofit"])
def test_every_variant(experiment, name):
    rows, content = experiment(name)
    assert all(math.isfinite(float(row["loss"])) for row in rows)
    if name == "lrpe":
        assert float(rows[1]["perplexity"]) == pytest.approx(math.exp(float(rows[1]["loss"])), rel=2e-6)
        assert content["relative_speed"]["base"] == 1
        assert len(content["relative_speed"]) == 8


@pytest.mark.parametrize(
    ("module", "contexts"), [(context_scaling, (1024, 4096, 16_384, 65_536)), (evaluation_context, (16_384,))]
)
def test_the_papers_scale_is_its_configuration(monkeypatch, tmp_path, module, contexts):
    wanted = {}
    monkeypatch.setattr(
        "experiments._shared.runs.train_all", lambda _, runs: wanted.update(runs.values()) or exit(0)
    )
    with pytest.raises(SystemExit):
        module.main(
            ["--scale=paper", "--power=4", "--data=train.zarr", "--heldout=heldout.zarr", "--seeds=1"]
        )
    assert {run.data.context_length for run in wanted.values()} == set(contexts)
    assert len(wanted) == 4 * len(contexts)
    run = wanted[f"conformal_p4_context{contexts[-1]}_steps100000_seed1"]
    assert run.model.attention == config.preset("conformal_paper", power=4)
    assert (run.model.layers, run.model.width, run.model.vocab_size) == (12, 768, 50_304)
    assert (run.data.source, run.data.paths, run.data.batch_tokens) == (
        "longcrawl64",
        ("train.zarr",),
        524_288,
    )
    assert run.optimizer == config.OptimizerConfig(learning_rate=6e-4)


@pytest.mark.slow
def test_context_scaling_of_equal_documents(experiment):
    _, content = experiment("context_scaling", "--variants=softmax", "--steps=4", "--equal=documents")
    assert content["settings"]["training.steps"] == 2  # at context 8; those at 16 are given
    assert content["runs"]["softmax_documents_context16_steps4_seed0"]["training.steps"] == 4
