"""Tests of a model in lm-eval, on tasks of local files: multiple choice, continuations and perplexity."""

import json

import jax
import numpy as np
import pytest

from sympow_jax import data, generation, training
from sympow_jax.commands import lm_eval as lm_eval_command
from tests.evaluation import fakes

pytest.importorskip("lm_eval", reason="needs the extra lm_eval")
pytest.importorskip("datasets")

from sympow_jax.evaluation.lm_eval import harness, requests

BYTES = data.Codec(data.tokenizer.load("byte"), vocab_size=128)
DOCUMENTS = [
    {"question": "The sky is", "choices": ["blue", "green"], "answer": 0},
    {"question": "Grass is", "choices": ["blue", "green", "red"], "answer": 1},
    {"question": "Snow is", "choices": ["black", "white"], "answer": 1},
]
COMMON = """\
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/documents.jsonl
test_split: test
"""
TASKS = {
    "local_choice": """\
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
""",
    "local_generate": """\
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 4
  do_sample: false
metric_list:
  - metric: exact_match
""",
    "local_perplexity": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - metric: bits_per_byte
""",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(x) + "\n" for x in DOCUMENTS))
    for name, text in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n{COMMON.format(folder=tmp_path)}{text}")
    return tmp_path


def test_local_tasks(folder):
    model = fakes.decoder(128)
    found = harness.evaluate(harness.HarnessModel(model, BYTES), list(TASKS), include_path=folder)["results"]

    text_model = requests.TextModel(model, BYTES)
    with jax.default_matmul_precision("highest"):
        right = 0
        for document in DOCUMENTS:
            pairs = [(document["question"], f" {choice}") for choice in document["choices"]]
            scores = [score for score, _ in text_model.continuation_log_likelihoods(pairs)]
            right += int(np.argmax(scores)) == document["answer"]
        texts = [document["question"] for document in DOCUMENTS]
        nats = -sum(text_model.text_log_likelihoods(texts))
    assert found["local_choice"]["acc,none"] == pytest.approx(right / len(DOCUMENTS))
    bits = nats / sum(map(len, texts)) / np.log(2)
    assert found["local_perplexity"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    assert found["local_generate"]["exact_match,none"] == 0.0


def test_a_limit_may_be_a_fraction(folder):
    model = harness.HarnessModel(fakes.decoder(128), BYTES)
    for limit, count in ((0.5, 2), (2, 2), (0.1, 1)):
        found = harness.evaluate(model, ["local_choice"], include_path=folder, limit=limit)
        assert found["n-samples"]["local_choice"]["effective"] == count
    with pytest.raises(ValueError, match="limit is 0; it must be"):
        harness.evaluate(model, ["local_choice"], include_path=folder, limit=0)
    with pytest.raises(ValueError, match="there is no task local_choise in lm-eval"):
        harness.evaluate(model, ["local_choise"], include_path=folder)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("do_sample: false", "num_beams: 4", "task local_generate: generation options num_beams=4 are not"),
        ("max_gen_toks: 4", "max_new_tokens: 40", "task local_generate: max_gen_toks is 40, but .* end at"),
        ("max_gen_toks: 4", "max_new_tokens: 0", "maximum number of tokens is below 1; correct"),
        ("do_sample: false", "do_sample: true\n  top_p: 2", "top_p is 2; it must be above 0 and at most 1"),
        ('["."]', "[1, 2]", "until is not a list of texts"),
    ],
)
def test_options_are_checked_before_anything_is_scored(folder, monkeypatch, old, new, message):
    limited = fakes.decoder(128, position="learned_absolute", max_document_length=32)
    model = harness.HarnessModel(limited, BYTES)
    monkeypatch.setattr(model, "loglikelihood", None)
    file = folder / "local_generate.yaml"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        harness.evaluate(model, list(TASKS), include_path=folder)


@pytest.mark.parametrize(
    ("options", "max_tokens", "stops", "sampling"),
    [
        ({}, 256, (), {"temperature": 0}),
        ({"until": "\n", "max_new_tokens": 8, "num_beams": 1}, 8, ("\n",), {"temperature": 0}),
        ({"until": [""], "do_sample": False, "temperature": 1}, 256, (), {"temperature": 0}),
        ({"until": ["</s>", ""], "max_gen_toks": 3, "max_tokens": 9}, 3, ("</s>",), {"temperature": 0}),
        ({"do_sample": True, "top_p": 0.95, "top_k": 0}, 256, (), {"temperature": 1, "top_p": 0.95}),
        ({"temperature": 0.2, "top_k": 5, "until": None}, 256, (), {"temperature": 0.2, "top_k": 5}),
        ({"do_sample": True, "temperature": 0.0}, 256, (), {"temperature": 0}),
    ],
)
def test_options_of_generation(options, max_tokens, stops, sampling):
    wanted = requests.GenerateRequest("a", max_tokens, stops, generation.Sampling(**sampling))
    assert harness._generate_request("a", options) == wanted


def test_the_harness_knows_the_model_by_name():
    from lm_eval.api import registry

    assert registry.get_model("sympow") is harness.WorkdirModel


def test_the_command_evaluates_a_run(trained, folder, capsys):
    arguments = [f"--workdir={trained}", "--tasks=local_choice", f"--include_path={folder}"]
    assert lm_eval_command.main([*arguments, f"--out={folder}/results.json"]) == 0
    printed = capsys.readouterr().out
    assert "local_choice" in printed
    assert f"the results are in {folder}/results.json" in printed
    found = json.loads((folder / "results.json").read_text())["results"]["local_choice"]
    model = harness.HarnessModel(training.restore_exact(trained)[1], BYTES)
    expected = harness.evaluate(model, ["local_choice"], include_path=folder)["results"]["local_choice"]
    assert found["acc,none"] == expected["acc,none"]
