"""Tests of tasks on a run that was trained on a parquet file with a tokenizer: those in the context, and lm-eval's."""

import csv
import json

import jax
import numpy as np
import pytest

from sympow_jax import data, evaluation, training
from sympow_jax.commands import evaluate as eval_program
from sympow_jax.commands import launch
from tests.data import builders

SENTENCES = [f"{index}: the quick brown fox jumps over {index % 7} lazy dogs." for index in range(60)]


@pytest.fixture(scope="module")
def corpus_run(tmp_path_factory):
    """Trains two steps on a parquet file, tokenized by byte-level BPE with 320 ids; returns the workdir."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("corpus")
    path = builders.write_parquet(folder / "documents.parquet", [3 * sentence for sentence in SENTENCES])
    pair_encoding = tokenizers.Tokenizer(tokenizers.models.BPE())
    pair_encoding.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pair_encoding.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    pair_encoding.train_from_iterator(SENTENCES, trainer)
    pair_encoding.save(str(folder / "tokenizer.json"))
    settings = {
        "data.source": "parquet",
        "data.paths": path,
        "data.tokenizer": folder / "tokenizer.json",
        "data.tokenizer_workers": 0,
        "data.document_separator": pair_encoding.token_to_id("<|endoftext|>"),
        "data.context_length": 16,
        "data.batch_tokens": 32,
        "data.heldout_fraction": 0.5,
        "model.vocab_size": 320,
        "model.layers": 1,
        "model.width": 16,
        "model.heads": 2,
        "training.steps": 2,
        "evaluation.context_lengths": "()",
    }
    arguments = [f"--config.{name}={value}" for name, value in settings.items()]
    run = ["--config=configs/quickstart.py:conformal", f"--workdir={folder / 'run'}", *arguments]
    assert launch.main(run) == 0
    return folder / "run"


@pytest.mark.parametrize(
    "tasks",
    [
        ("recall", "copy"),
        pytest.param(("recall", "needle", "variables", "copy"), marks=pytest.mark.slow),
    ],
)
def test_context_tasks_have_the_tokens_of_the_run(corpus_run, tmp_path, tasks):
    arguments = [f"--workdir={corpus_run}", f"--out={tmp_path}", "--context_lengths=256,512", "--trials=8"]
    assert eval_program.main([*arguments, f"--tasks={','.join(tasks)}"]) == 0
    with (tmp_path / "tasks.csv").open() as file:
        records = list(csv.DictReader(file))
    assert [record["task"] for record in records] == [task for task in tasks for _ in range(2)]
    # Only the contexts of `recall` do not depend on the held-out text.
    settings, model, _ = training.restore_model(corpus_run)
    material = evaluation.Material(np.zeros(1, np.int32), data.codec_of_run(settings))
    recall = evaluation.context_task_results(model, material, ["recall"], [256, 512], trials=8)
    assert [float(record["loss"]) for record in records[:2]] == [result.loss for result in recall]
    assert [int(record["answer_tokens"]) for record in records[:2]] == [x.answer_tokens for x in recall]
    # The chance loss of a copy is the logarithm of its alphabet's size. The alphabet is that of the held-out text.
    alphabets = [np.exp(float(record["chance_loss"])) for record in records[-2:]]
    assert alphabets == pytest.approx([round(alphabets[0])] * 2)
    assert 20 < alphabets[0] <= 320


def test_lm_eval_runs_local_tasks_on_the_run(corpus_run, tmp_path, monkeypatch, capsys):
    pytest.importorskip("lm_eval", reason="needs the extra lm_eval")
    from sympow_jax.commands import lm_eval as program
    from sympow_jax.evaluation.lm_eval import requests

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    documents = [
        {"question": "the quick", "choices": ["brown fox", "lazy dog"], "answer": i % 2} for i in range(3)
    ]
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(x) + "\n" for x in documents))
    (tmp_path / "local_choice.yaml").write_text(
        """\
task: local_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: FOLDER/documents.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
""".replace("FOLDER", str(tmp_path))
    )
    arguments = [f"--workdir={corpus_run}", "--tasks=local_choice", f"--include_path={tmp_path}"]
    assert program.main([*arguments, f"--out={tmp_path}/results.json"]) == 0
    printed = capsys.readouterr().out
    assert "local_choice" in printed
    assert f"the results are in {tmp_path}/results.json" in printed
    result = json.loads((tmp_path / "results.json").read_text())["results"]["local_choice"]

    settings, model, _ = training.restore_exact(corpus_run)
    text_model = requests.TextModel(model, data.codec_of_run(settings))
    with jax.default_matmul_precision("highest"):
        scores = text_model.continuation_log_likelihoods(
            [("the quick", f" {choice}") for choice in documents[0]["choices"]]
        )
    choice = int(np.argmax([score for score, _ in scores]))
    assert result["acc,none"] == pytest.approx(np.mean([choice == x["answer"] for x in documents]))
