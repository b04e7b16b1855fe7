"""Tests of `sympow weights`: runs from files and files from runs, which the other programs accept."""

import dataclasses
import json
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from sympow_jax import loop, training
from sympow_jax.commands import evaluate, generate
from sympow_jax.commands import weights as command
from sympow_jax.process import workdir
from sympow_jax.training import checkpoint, sharding
from tests import mistakes
from tests.weights import originals, published

DATA = "--config.data.paths={folder}/*.bin"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> pathlib.Path:
    """Makes a folder with GPT-2's files in `gpt2`, tokens in `a.bin` and the imported workdir `run`."""
    folder = tmp_path_factory.mktemp("weights")
    published.write(folder / "gpt2")
    tokens = np.random.default_rng(2).integers(0, published.VOCABULARY - 1, 2000)
    for name, part in (("a", tokens[:1500]), ("b", tokens[1500:])):
        np.append(part, published.VOCABULARY - 1).astype(np.uint16).tofile(folder / f"{name}.bin")
    sizes = ["context_length=16", "batch_tokens=64", "heldout_fraction=0.5"]
    arguments = [f"--weights={folder}/gpt2/model.safetensors", f"--workdir={folder}/run"]
    arguments += [DATA.format(folder=folder), *(f"--config.data.{size}" for size in sizes)]
    assert command.main(["import", *arguments]) == 0
    return folder


def test_what_a_published_model_lacks(tmp_path, capsys):
    published.write(tmp_path / "gpt2")
    (tmp_path / "gpt2" / "tokenizer.json").touch()
    assert command.main(["import", f"--weights={tmp_path}/gpt2", f"--workdir={tmp_path}/run"]) == 0
    assert workdir.read_config(tmp_path / "run").data.tokenizer == f"{tmp_path}/gpt2"
    out = capsys.readouterr().out
    assert f'next: sympow generate --workdir={tmp_path}/run --prompt="The "\n' in out
    assert f"next: sympow eval --workdir={tmp_path}/run --config.data.source=tokens" in out
    assert "data/train.bin, is a placeholder" in out


def program(folder: pathlib.Path) -> training.Program:
    return training.Program(workdir.read_config(folder), sharding.whole_mesh())


def restored(folder: pathlib.Path) -> dict[str, np.ndarray]:
    arrays, number = program(folder).restore_arrays(folder)
    assert number == 0
    return arrays["params"]


def test_there_and_back(gpt2, tmp_path, capsys):
    out = tmp_path / "copy.safetensors"
    assert command.main(["export", f"--workdir={gpt2}/run", f"--out={out}"]) == 0
    count = sum(x.size for x in jax.tree.leaves(restored(gpt2 / "run")))
    assert capsys.readouterr().out == f"{out} has the {count:,} numbers of step 0 of {gpt2}/run\n"
    assert command.main(["import", f"--weights={out}", f"--workdir={tmp_path}/run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path}/run is a run at step 0 with the {count:,} numbers of {out}"
    assert lines[1] == f'next: sympow generate --workdir={tmp_path}/run --prompt="The " --tokenizer=FILE'
    assert len(lines) == 2
    jax.tree.map(np.testing.assert_array_equal, restored(tmp_path / "run"), restored(gpt2 / "run"))
    assert workdir.read_config(tmp_path / "run") == workdir.read_config(gpt2 / "run")


def test_folders_of_transformers_there_and_back(gpt2, tmp_path, capsys):
    out = tmp_path / "exported"
    assert command.main(["export", f"--workdir={gpt2}/run", "--format=huggingface", f"--out={out}"]) == 0
    assert capsys.readouterr().out.startswith(f"{out} has the ")
    actual = safetensors.numpy.load_file(out / "model.safetensors")
    expected = {
        f"transformer.{name}": x
        for name, x in published.weights().items()
        if not name.endswith((".attn.bias", "masked_bias"))
    }
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(actual[name], x)
    data = f"--config.data.paths={gpt2}/*.bin"
    assert command.main(["import", f"--weights={out}", f"--workdir={tmp_path}/run", data]) == 0
    jax.tree.map(np.testing.assert_array_equal, restored(tmp_path / "run"), restored(gpt2 / "run"))
    again = ["export", f"--workdir={gpt2}/run", "--format=huggingface", f"--out={out}"]
    assert f"{out}/config.json exists; remove it" in mistakes.line(command.main, again, capsys, at_once=False)


def test_an_export_has_the_files_and_values_of_the_import(tmp_path, capsys):
    folder, run, out = tmp_path / "llama", tmp_path / "run", tmp_path / "out"
    shutil.copytree(originals.FIXTURES / "llama", folder)
    ids = {"bos_token_id": 1, "pad_token_id": None, "eos_token_id": [2, 3]}
    values = json.loads((folder / "config.json").read_text()) | ids | {"max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(values))
    names = ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "merges.txt"]
    for name in names:
        (folder / name).write_text(name)
    imported = [f"--weights={folder}", f"--workdir={run}", "--config.data.context_length=128"]
    assert command.main(["import", *imported, "--config.data.batch_tokens=128"]) == 0
    shutil.rmtree(folder)
    exported = ["export", f"--workdir={run}", "--format=huggingface"]
    assert command.main([*exported, f"--out={out}"]) == 0
    assert all((out / name).read_text() == name for name in names)
    written = json.loads((out / "config.json").read_text())
    assert written.items() >= (ids | {"max_position_embeddings": 8192, "vocab_size": 40}).items()
    assert "has no tokenizer" not in capsys.readouterr().out
    # A run that was not imported from there.
    shutil.rmtree(run / "original")
    assert command.main([*exported, f"--out={tmp_path}/bare"]) == 0
    assert f"{tmp_path}/bare has no tokenizer, because {run} has none to copy" in capsys.readouterr().out


def test_generated_tokens_are_those_of_the_formula(gpt2, capsys):
    """Tokens are bytes here; the vocabulary has those below 40."""
    prompt, weights = "&&!#", published.weights()
    arguments = [f"--workdir={gpt2}/run", f"--prompt={prompt}", "--tokenizer=byte"]
    assert generate.main([*arguments, "--max_tokens=8", "--temperature=0"]) == 0
    tokens = list(prompt.encode())
    while len(tokens) < len(prompt) + 8:
        tokens.append(int(published.forward(weights, np.array([tokens]))[0, -1].argmax()))
    assert capsys.readouterr().out == bytes(tokens).decode() + "\n"
    assert len(set(tokens[len(prompt) :])) > 3
    with pytest.raises(SystemExit):
        generate.main([*arguments, "--max_tokens=17"])
    message = (
        "the longest prompt has 4 tokens and max_tokens is 17, but the model's learned positions end at 20"
    )
    assert message in capsys.readouterr().err


def test_the_optimizer_and_the_data_start_fresh(gpt2):
    made = program(gpt2 / "run")
    with checkpoint.Checkpoints(gpt2 / "run", made.config) as checkpoints:
        state, position = made.restore_or_begin(checkpoints)
    assert position is None
    assert jax.tree.structure(state) == jax.tree.structure(made.abstract)
    assert all(not leaf.any() for leaf in jax.tree.leaves(state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, state.params, restored(gpt2 / "run"))


def losses(folder: pathlib.Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_training_continues(gpt2, tmp_path):
    settings = workdir.read_config(gpt2 / "run")
    settings = dataclasses.replace(settings, training=dataclasses.replace(settings.training, steps=3))
    weights = f"--weights={gpt2}/gpt2/model.safetensors"
    (tmp_path / "settings.json").write_text(json.dumps(dataclasses.asdict(settings)))
    chosen = f"--config={tmp_path}/settings.json"
    assert command.main(["import", weights, chosen, f"--workdir={tmp_path}/run"]) == 0
    assert loop.train(settings, tmp_path / "run") == 0
    assert len(losses(tmp_path / "run")) == 3
    # The weights are random but confident, unlike those of a new model, which guesses.
    assert losses(tmp_path / "run")[0] > 2 * np.log(published.VOCABULARY)


@pytest.mark.slow
def test_a_power_kernel_starts_from_gpt2(gpt2, tmp_path, capsys):
    """The recipe of the documentation."""
    settings = workdir.read_config(gpt2 / "run")
    attention = dataclasses.replace(settings.model.attention, kernel="power", decay="learned", exact_window=4)
    settings = dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, attention=attention),
        task=dataclasses.replace(settings.task, initial_run=str(gpt2 / "run")),
        training=dataclasses.replace(settings.training, steps=2),
    )
    assert loop.train(settings, tmp_path / "run") == 0
    assert "new: blocks.*.attention.decay.kernel\n" in capsys.readouterr().out
    assert len(losses(tmp_path / "run")) == 2


@pytest.mark.slow
def test_evaluation(gpt2, tmp_path, capsys):
    run = [f"--workdir={gpt2}/run", "--documents=1", f"--out={tmp_path}"]
    assert evaluate.main([*run, "--context_lengths=4,16"]) == 0
    assert (tmp_path / "context_loss.csv").is_file()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        evaluate.main([*run, "--context_lengths=4,32"])
    message = "has learned positions for 20 tokens (model.attention.max_document_length) and cannot be evaluated at 32"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["export", "--workdir={folder}/nothing", "--out={out}/x.safetensors"],
            "is not the workdir of a run",
        ),
        (["export", "--workdir={folder}/run", "--out={out}/x.npz"], "x.npz does not end in .safetensors"),
        (
            ["export", "--workdir={folder}/run", "--out={out}/x.safetensors", "--dtype=int8"],
            "invalid choice: 'int8'",
        ),
        (
            ["export", "--workdir={folder}/run", "--out={out}/x.safetensors", "--layer=1"],
            "unknown option '--layer'",
        ),
        (["export", "--workdir={folder}/run"], "--out"),
        (["export", "--workdir={folder}/run", "--out={out}/x", "--format=pt"], "invalid choice: 'pt'"),
        (
            ["import", "--weights={folder}", "--workdir={out}/run"],
            "cannot read the settings {folder}/config.json",
        ),
        (
            ["import", "--weights=hf://a/b", "--workdir={out}/a[1]"],
            "need a path without [: rename the folder",
        ),
        (
            ["import", "--weights=hf://gpt2", "--workdir={out}/run"],
            "hf://gpt2 is no name of a repository; write hf://ORG/",
        ),
        (
            ["import", "--weights={gpt2}", "--workdir={folder}/run"],
            "run holds a run; import into another workdir",
        ),
        (
            ["import", "--weights={folder}/x", "--workdir={out}/run"],
            "--weights={folder}/x: there is no such file or folder",
        ),
        (
            ["import", "--weights={folder}/a.bin", "--config={json}", "--workdir={out}/run"],
            "is not a safetensors file",
        ),
        (
            ["import", "--weights={gpt2}", "--config=configs/text.py:x", "--workdir={out}/run"],
            "it lacks blocks.0.",
        ),
        (["import", "--weights={gpt2}", "--config=text:x", "--workdir={out}/run"], "it lacks blocks.0."),
        (
            ["import", "--weights={gpt2}", "--config=txet", "--workdir={out}/run"],
            "the nearest names are text,",
        ),
        (
            ["import", "--weights={gpt2}", "--workdir={out}/run", "--config.model.layer=1"],
            "--config.model.layer",
        ),
        (
            ["import", "--weights={gpt2}", "--workdir={out}/run", "--config.model.layers=3"],
            "it lacks h.2.attn.c_attn.",
        ),
        (
            ["import", "--weights={gpt2}", "--workdir={out}/run", "--layers=3"],
            "unknown option '--layers'; did you mean --config.model.layers?",
        ),
        ([], "export|import"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_files(gpt2, tmp_path, capsys, arguments, message):
    places = {
        "folder": gpt2,
        "out": tmp_path,
        "gpt2": gpt2 / "gpt2" / "model.safetensors",
        "json": gpt2 / "gpt2" / "config.json",
    }
    error = mistakes.line(command.main, [argument.format(**places) for argument in arguments], capsys)
    assert message.format(**places) in error
    assert os.listdir(tmp_path) == []
