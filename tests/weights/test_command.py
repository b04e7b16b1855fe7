"""Tests of `sympow weights`: runs from files and files from runs, which the other programs accept."""

import json
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from sympow_jax import training
from sympow_jax.commands import evaluate
from sympow_jax.commands import weights as command
from sympow_jax.process import workdir
from sympow_jax.training import checkpoint, restore, sharding
from tests import mistakes
from tests.weights import originals

DATA = "--config.data.paths={folder}/*.bin"


GPT2 = originals.FIXTURES / "gpt2"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> pathlib.Path:
    """Makes a folder with tokens in `a.bin` and the workdir `run`, imported from a GPT-2."""
    folder = tmp_path_factory.mktemp("weights")
    tokens = np.random.default_rng(2).integers(3, originals.VOCABULARY, 2000)
    for name, part in (("a", tokens[:1500]), ("b", tokens[1500:])):
        np.append(part, 2).astype(np.uint16).tofile(folder / f"{name}.bin")
    sizes = ["context_length=16", "batch_tokens=64", "heldout_fraction=0.5"]
    arguments = [f"--weights={GPT2}/model.safetensors", f"--workdir={folder}/run"]
    arguments += [DATA.format(folder=folder), *(f"--config.data.{size}" for size in sizes)]
    assert command.main(["import", *arguments]) == 0
    return folder


def test_what_a_published_model_lacks(tmp_path, capsys):
    shutil.copytree(GPT2, tmp_path / "gpt2")
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
    arrays, number = restore.restore_arrays(program(folder), folder)
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
    actual, expected = (safetensors.numpy.load_file(x / "model.safetensors") for x in (out, GPT2))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
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


def test_the_optimizer_and_the_data_start_fresh(gpt2):
    made = program(gpt2 / "run")
    with checkpoint.Checkpoints(gpt2 / "run", made.config) as checkpoints:
        state, position = restore.restore_or_begin(made, checkpoints)
    assert position is None
    assert jax.tree.structure(state) == jax.tree.structure(made.abstract)
    assert all(not leaf.any() for leaf in jax.tree.leaves(state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, state.params, restored(gpt2 / "run"))


@pytest.mark.slow
def test_evaluation(gpt2, tmp_path, capsys):
    run = [f"--workdir={gpt2}/run", "--documents=1", f"--out={tmp_path}"]
    assert evaluate.main([*run, "--context_lengths=4,16"]) == 0
    assert (tmp_path / "context_loss.csv").is_file()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        evaluate.main([*run, "--context_lengths=4,64"])
    message = "has learned positions for 32 tokens (model.attention.max_document_length) and cannot be evaluated at 64"
    assert message in capsys.readouterr().err


MISTAKES = """
export --workdir={folder}/nothing --out={out}/x.safetensors | is not the workdir of a run
export --workdir={folder}/run --out={out}/x.npz            | x.npz does not end in .safetensors
export --workdir={folder}/run --out={out}/x.safetensors --dtype=int8 | invalid choice: 'int8'
import --workdir={out}/run --weights={folder}              | cannot read the settings {folder}/config.json
import --workdir={out}/a[1] --weights=hf://a/b             | need a path without [: rename the folder
import --workdir={out}/run --weights=hf://gpt2             | hf://gpt2 is no name of a repository; write hf://ORG/
import --workdir={folder}/run --weights={gpt2}             | run holds a run; import into another workdir
import --workdir={out}/run --weights={folder}/x            | --weights={folder}/x: there is no such file or folder
import --workdir={out}/run --weights={folder}/a.bin --config={gpt2}/config.json | is not a safetensors file
import --workdir={out}/run --weights={gpt2} --config=text:x | it lacks blocks.0.
import --workdir={out}/run --weights={gpt2} --config.model.layers=3 | it lacks transformer.h.2.attn.c_attn.
import --workdir={out}/run --weights={gpt2} --layers=3     | unknown option '--layers'; did you mean --config.model
"""


def test_a_mistake_is_one_line_and_leaves_no_files(gpt2, tmp_path, capsys):
    for line in MISTAKES.format(folder=gpt2, out=tmp_path, gpt2=GPT2).strip().splitlines():
        arguments, message = line.split(" | ")
        assert message in mistakes.line(command.main, arguments.split(), capsys)
        assert os.listdir(tmp_path) == []
    assert "export|import" in mistakes.line(command.main, [], capsys)
