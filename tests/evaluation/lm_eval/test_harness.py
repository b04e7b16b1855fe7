"""Tests of a model in lm-eval, on tasks of local files: multiple choice, continuations and perplexity."""

import json

import jax
import numpy as np
import pytest

from sympow_jax import config, data, models

pytest.importorskip("lm_eval", reason="needs the extra lm_eval")
pytest.importorskip("datasets")

from sympow_jax.evaluation.lm_eval import harness, requests

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
    """Writes the documents and the tasks."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(x) + "\n" for x in DOCUMENTS))
    for name, text in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n{COMMON.format(folder=tmp_path)}{text}")
    return tmp_path


def test_local_tasks(folder):
    settings = config.ModelConfig(vocab_size=128, layers=1, width=16, heads=2, dtype="float32")
    model = models.DecoderLM(settings, rngs=0)
    codec = data.Codec(data.tokenizer.load("byte"), vocab_size=128)
    found = harness.evaluate(harness.HarnessModel(model, codec), list(TASKS), include_path=folder)["results"]

    text_model = requests.TextModel(model, codec)
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


def test_a_mistake_is_one_line(folder):
    with pytest.raises(ValueError, match="there is no task local_choise in lm-eval"):
        harness.evaluate(None, ["local_choise"], include_path=folder)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="generation options num_beams are not supported"):
        harness._generate_request("a", {"num_beams": 4})


def test_the_harness_knows_the_model_by_name():
    from lm_eval.api import registry

    assert registry.get_model("sympow") is harness.WorkdirModel
