"""Tests of the files in configs/: the papers' sizes, and small copies that learn from generated data."""

import dataclasses
import fnmatch
import json
import pathlib
import re
import shutil

import numpy as np
import PIL.Image
import pytest

from sympow_jax import config, tasks
from sympow_jax.commands import launch
from sympow_jax.data.sources import listops
from sympow_jax.training import restore

ROOT = pathlib.Path(__file__).parents[1]
SMALL = ["layers=2", "width=32", "heads=2", "dtype=float32"]


def load(spec: str) -> config.Config:
    return config.load(f"{ROOT}/configs/{spec}")


def shape(settings: config.Config) -> tuple:
    model, optimizer = settings.model, settings.optimizer
    return (
        *(model.layers, model.width, model.heads, model.hidden_width, model.activation),
        *(settings.data.context_length, settings.data.batch_size, settings.training.steps),
        *(optimizer.warmup_steps, optimizer.learning_rate, optimizer.schedule, optimizer.name),
        *(optimizer.added_epsilon, optimizer.mean_decay, optimizer.square_decay, optimizer.weight_decay),
    )


def test_table_8():
    adam = (0.9, 0.98, 0.01)
    language = load("wikitext103.py")
    expected = (6, 512, 8, 2048, "relu", 512, 128, 50_000, 4000, 5e-4, "inverse_sqrt", "adamw", 1e-8, *adam)
    assert shape(language) == expected
    masked = load("roberta_wikibook.py")
    expected = (12, 768, 12, 3072, "gelu", 512, 512, 23_000, 3000, 5e-4, "linear", "adamw", 1e-6, *adam)
    assert shape(masked) == expected
    images = load("deit_small.py")
    epoch = 1_281_167 / 1600
    expected = (12, 384, 6, 1536, "gelu", 196, 1600, int(300 * epoch), int(20 * epoch), 5e-4, "cosine")
    assert shape(images) == (*expected, "adamw", 1e-8, 0.9, 0.98, 0.05)


def _saved(folder: pathlib.Path, settings: config.Config) -> pathlib.Path:
    (folder / "checkpoints" / "1").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(settings)))
    return folder


def test_a_retrofit_replaces_attention_and_keeps_the_body_and_the_data(tmp_path, monkeypatch):
    model = config.ModelConfig(
        **config.MODEL_SIZES["qwen3_600m"], attention=config.preset("qwen3", implementation="cudnn")
    )
    evaluated = config.EvaluationConfig(prompts=("def ",))
    data = config.DataConfig(context_length=64)
    run = _saved(tmp_path / "run", config.Config(model=model, data=data, evaluation=evaluated))
    first = load(f'retrofit.py:"{run}",preset=sympow_gated,every=4,match=true')
    assert first.task == config.TaskConfig(name="match_attention", initial_run=str(run))
    assert first.evaluation.prompts == ()
    kinds = [attention.kernel for attention in first.model.attentions]
    assert kinds == ["power", "power", "power", "softmax"] * 7
    new = first.model.attentions[0]
    assert (new.decay, new.decay_bias, new.qk_norm, new.rope) == (
        "learned_alibi",
        6.0,
        True,
        model.attention.rope,
    )
    assert dataclasses.replace(first.model, attention=model.attention, attention_pattern=()) == model
    assert first.data.context_length == 64
    _saved(tmp_path / "first", first)
    monkeypatch.setenv("HOME", str(tmp_path))
    second = load("retrofit.py:~/first")
    assert second.task.initial_run == str(tmp_path / "first")
    assert second.model == first.model
    assert second.task == config.TaskConfig(initial_run=str(tmp_path / "first"))
    whole = load(f'retrofit.py:"{run}"').model
    assert {attention.position for attention in whole.attentions} == {"learned_rope"}
    mixed = load(f'retrofit.py:"{run}",preset=sliding_window,every=3,other=sympow_gated').model
    assert [attention.kernel for attention in mixed.attentions[:4]] == [
        "sliding_window",
        "sliding_window",
        "power",
        "sliding_window",
    ]
    kept = load(f'retrofit.py:"{run}",preset=sliding_window,keep="27,2,3"').model
    kinds = [attention.kernel for attention in kept.attentions]
    assert [layer for layer, kind in enumerate(kinds) if kind != "sliding_window"] == [2, 3, 27]
    assert [x.decay_bias for x in (kept.attention, mixed.attention)] == [None, 6.0]
    assert kept.attentions[27] == kept.original.attention


def test_a_retrofit_of_a_retrofit(tmp_path):
    """Its layers are equal, and gates that they have begin as they are, without a bias of their own."""
    model = config.ModelConfig(vocab_size=8, layers=2, width=32, heads=2)
    model = dataclasses.replace(
        model, attention=config.preset("softmax", window=16), attention_pattern=("sympow_gated_paper",)
    )
    run = _saved(tmp_path / "run", config.Config(model=model))
    first = load(f'retrofit.py:"{run}",match=true')
    assert first.model.original.attention == dataclasses.replace(model.attentions[0], decay_bias=0.0)
    assert [(x.position, x.decay_bias) for x in first.model.attentions] == [("learned_rope", 0.0)] * 2
    assert restore.read_initial_config(run, tasks.make(first)).model == model
    other = dataclasses.replace(first, model=dataclasses.replace(first.model, attention=model.attention))
    with pytest.raises(ValueError, match="kernel was 'power' and is 'softmax'"):
        restore.read_initial_config(run, tasks.make(other))


def test_mistakes_in_retrofits(tmp_path):
    def saved(name, **changes):
        model = {"vocab_size": 8, "layers": 2, "width": 32, "heads": 2, **changes.pop("model", {})}
        return _saved(tmp_path / name, config.Config(model=config.ModelConfig(**model), **changes))

    run = saved("run")
    matched = saved(
        "matched",
        model={"attention_pattern": ("softmax",)},
        task=config.TaskConfig(name="match_attention", initial_run="runs/original"),
    )
    encoder = saved(
        "encoder",
        model={"attention": config.preset("softmax", causal=False)},
        task=config.TaskConfig(name="masked_token"),
    )
    (tmp_path / "weights").mkdir()
    for spec, message in {
        f'"{tmp_path}/weights"': r"not the workdir of a run; make one of published weights with `sympow weights",
        f'"{run}",preset=conformol': "preset is 'conformol'.*did you mean conformal",
        f'"{run}",every=1': "every is 1; it must be at least 2 and at most the model's 2 layers",
        f'"{run}",every=3': "every is 3",
        f'"{run}",other=sympow': "other is 'sympow', the preset of kept layers; name them with every=K or keep",
        f'"{run}",every=2,keep=1': "every is 2 and keep .1,.; leave one of them out",
        f'"{run}",keep="0,2"': "keep is .0, 2.; name some of the layers 0 to 1, but not all",
        f'"{run}",keep=0,1': "too many positional arguments.*match; put quotes around a value that has commas",
        f'"{run}",keep="0,1"': "keep is .0, 1.; name some of the layers 0 to 1, but not all",
        f'"{run}",keep=': r"keep is \(\); name some of the layers",
        f'"{run}",every=2,preset=sympow,other=sympow': "other is 'sympow', as preset is; name another",
        f'"{run}",preset=shared': "preset is 'shared'",
        f'"{run}",preset=conformal': "preset is 'conformal', which is the attention that the model has",
        f'"{matched}",preset=sympow': "first stage of a retrofit, whose attention is already chosen; leave out preset",
        f'"{encoder}"': "a run of the task 'masked_token'; only decoders can be retrofitted",
        f'"{saved("hybrid", model={"attention_pattern": ("softmax", "linear")})}"': "retrofit a model whose layers",
    }.items():
        with pytest.raises(ValueError, match=message):
            load(f"retrofit.py:{spec}")


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("text", (128, 4, 256, 1e-3)),
        ("listops", (128, 4, 256, 1e-4)),
        ("retrieval", (64, 4, 64, 1e-3)),
        ("pathfinder", (32, 4, 128, 5e-4)),
        ("image", (100, 12, 100, 1e-3)),
    ],
)
def test_table_9(task, expected):
    settings = load(f"lra.py:{task}")
    model = settings.model
    assert (model.width, model.layers, settings.data.batch_size, settings.optimizer.learning_rate) == expected
    assert model.norm == "batch"
    assert settings.task.dual_encoder == (task == "retrieval")


def test_the_encoders_of_glue_are_that_of_pretraining():
    for task in ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"):
        settings = load(f"glue.py:{task},type1")
        assert settings.model == load("roberta_wikibook.py:type1").model
        assert settings.task.outputs == {"mnli": 3, "stsb": 1}.get(task, 2)
        assert settings.data.heldout_names == (("matched", "mismatched") if task == "mnli" else ())
        files = ["dev_matched", "dev_mismatched"] if task == "mnli" else ["dev"]
        assert settings.data.heldout_paths == tuple(f"data/glue/{task}/{file}.tsv" for file in files)


def test_the_124m_model_on_other_data(tmp_path):
    assert load("gpt2_124m.py").evaluation.context_lengths[-1] == 65_536
    run = load("gpt2_124m.py:conformal,context=1024,data=fineweb-edu")
    assert run.evaluation.context_lengths == (256, 512, 1024)
    settings = run.data
    assert (settings.source, settings.tokenizer, settings.packing) == ("parquet", "gpt2", "documents")
    files = [f"sample/10BT/{number:03}_00000.parquet" for number in range(14)]
    for paths, expected in ((settings.paths, files[:13]), (settings.heldout_paths, files[13:])):
        patterns = [path.split("fineweb-edu/")[1] for path in paths]
        assert [f for f in files if any(fnmatch.fnmatch(f, pattern) for pattern in patterns)] == expected
    for name, source in {
        "a.parq": "parquet",
        "*.jsonl.zst": "jsonl",
        "a.json": "jsonl",
        "a.bin": "tokens",
    }.items():
        read = load(f'gpt2_124m.py:sympow,data="{name}"').data
        assert (read.source, read.paths, read.heldout_paths) == (source, (name,), ())
        assert read.document_separator == (50_256 if source == "tokens" else None)
    (tmp_path / "prepared.json").touch()
    (tmp_path / "README").touch()
    assert load(f'gpt2_124m.py:data="{tmp_path}"').data.source == "jsonl"
    (tmp_path / "a.bin").touch()
    assert load(f'gpt2_124m.py:data="{tmp_path}"').data.source == "tokens"
    (tmp_path / "b.parquet").touch()
    with pytest.raises(ValueError, match="names files of several kinds; give longcrawl64, fineweb-edu, or"):
        load(f'gpt2_124m.py:data="{tmp_path}"')
    with pytest.raises(ValueError, match="data is 'fineweb', which names no file of a known kind"):
        load("gpt2_124m.py:data=fineweb")


@pytest.mark.parametrize("method", config.LRPE_METHODS)
def test_every_method_of_the_paper_fits(method):
    # Tokens of a document, on which cosFormer depends. Fine-tuning has those of the pretrained model.
    lengths = {
        "wikitext103.py:": 512,
        "roberta_wikibook.py:": 512,
        "deit_small.py:": 196,
        "lra.py:image,": 1024,
    }
    for spec, length in (lengths | {"glue.py:rte,": 512}).items():
        attention = load(spec + method).model.attention
        assert attention == config.lrpe_method(method, length=length, causal="wikitext" in spec)
    assert (attention.lrpe.reference_length == 512) == (method == "cosformer")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lra.py:images", "task is 'images'; it must be one of text, listops"),
        ("glue.py:wnli,type1", "task is 'wnli'; it must be one of cola, sst2"),
        ("gpt2.py:small", "size is 'small'; it must be one of gpt2, gpt2-medium"),
        ("deit_small.py:type4", "method is 'type4'; it must be one of softmax, base"),
    ],
)
def test_mistakes_in_choices(spec, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load(spec)


@pytest.fixture
def files(tmp_path: pathlib.Path) -> pathlib.Path:
    """Writes token files of runs of equal tokens, tables of sentences and of pairs, and dark and light images."""
    tokens = np.repeat(np.arange(3, 13), 16)
    for name, end, dtype in (("short.bin", 2, np.uint16), ("long.bin", 0, np.uint32)):
        np.tile(np.append(tokens, end), 12).astype(dtype).tofile(tmp_path / name)
    lines = [f"{['yes', 'no'][i % 2]} indeed\t{i % 2}" for i in range(64)]
    (tmp_path / "lines.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    words = [("yes", "no")[i % 2] for i in range(64)], [("yes", "no")[i // 2 % 2] for i in range(64)]
    pairs = [f"{float(one == two)}\ta\tb\t{one}\t{two}" for one, two in zip(*words)]
    (tmp_path / "pairs.tsv").write_text("\n".join(pairs) + "\n")
    generator = np.random.default_rng(0)
    for name, light in (("dark", 60), ("light", 190)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for index in range(12):
            pixels = np.clip(generator.normal(light, 20, (8, 8, 3)), 0, 255).astype(np.uint8)
            PIL.Image.fromarray(pixels).save(tmp_path / "images" / name / f"{index}.png")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "source", "changes"),
    [
        ("roberta_wikibook.py:type2", "short.bin", ["model.vocab_size=16", "task.mask_token=none"]),
        (
            "deit_small.py:type2",
            "images",
            ["task.classes=2", "data.image_size=8", "model.patch_size=4", "data.context_length=4"],
        ),
        ("wikitext103.py:type1", "long.bin", ["model.vocab_size=16"]),
        ("glue.py:sst2,type1", "lines.tsv", ["model.vocab_size=256", "data.tokenizer=byte"]),
        ("lra.py:listops,type1", None, []),
        ("lra.py:retrieval,type1", "pairs.tsv", []),
    ],
)
def test_small_copies_learn(spec, source, changes, files, monkeypatch):
    settings = [f"model.{change}" for change in SMALL]
    settings += ["data.context_length=16", "data.batch_tokens=512", "training.steps=100"]
    settings += ["optimizer.learning_rate=0.005", "optimizer.warmup_steps=0", *changes]
    if source is None:
        monkeypatch.setattr(listops, "LENGTHS", (4, 6))
        monkeypatch.setattr(listops, "EXAMPLES", (800, 50))
    else:
        heldout = files / f"heldout_{source}"
        (shutil.copytree if (files / source).is_dir() else shutil.copy)(files / source, heldout)
        settings += [f"data.paths={files / source}", f"data.heldout_paths={heldout}"]
    if "wikitext" in spec:
        settings.append("evaluation.context_lengths=()")
    arguments = [f"--config={ROOT}/configs/{spec}", f"--workdir={files / 'run'}"]
    assert launch.main([*arguments, *(f"--config.{setting}" for setting in settings)]) == 0
    losses = [json.loads(line)["loss"] for line in (files / "run" / "metrics.jsonl").read_text().splitlines()]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:3])
    if "wikitext" not in spec:
        (run,) = json.loads((files / "run" / "heldout.json").read_text())["runs"]
        assert run["metrics"]["loss"] < losses[0]
