"""Fine-tuning on GLUE (Qin et al. 2023, Table 1): `--config=configs/glue.py:TASK[,METHOD]`.

An example is `--config=configs/glue.py:sst2,type2`.

TASK is one of the keys of `TASKS`; its files `train.tsv` and `dev.tsv` must be in `data/glue/TASK` as the benchmark
distributes them. MNLI has `dev_matched.tsv` and `dev_mismatched.tsv` instead, and is measured on each. METHOD, one of
`sympow_jax.config.LRPE_METHODS`, and the model must match the run of `configs/roberta_wikibook.py` that fine-tuning
starts from, which is named by `--config.task.initial_run=DIR`. The paper does not describe fine-tuning; this is
RoBERTa's recipe (Liu et al. 2019).
"""

from typing import Any

from sympow_jax import config

SENTENCES = ("sentence1", "sentence2")
ENTAILED = ("entailment", "not_entailment")
# Number of examples, columns of the texts, column of the label, and classes in order (none if the label is a number).
TASKS: dict[str, tuple[int, tuple[str, ...], str, tuple[str, ...]]] = {
    "cola": (8551, ("4",), "2", ("0", "1")),
    "sst2": (67_349, ("sentence",), "label", ("0", "1")),
    "mrpc": (3668, ("#1 String", "#2 String"), "Quality", ("0", "1")),
    "stsb": (5749, SENTENCES, "score", ()),
    "qqp": (363_846, ("question1", "question2"), "is_duplicate", ("0", "1")),
    "mnli": (392_702, SENTENCES, "gold_label", ("entailment", "neutral", "contradiction")),
    "qnli": (104_743, ("question", "sentence"), "label", ENTAILED),
    "rte": (2490, SENTENCES, "label", ENTAILED),
}
EPOCHS, ROWS, LENGTH = 10, 32, 128


def get_config(task: str = "sst2", method: str = "type2") -> config.Config:
    """Returns the encoder of `configs/roberta_wikibook.py` with a head for the task named by `task`."""
    config.require_choice("task", task, TASKS)
    count, texts, label, classes = TASKS[task]
    answer: dict[str, Any] = {"name": "regression"}
    if classes:
        answer = {"name": "classification", "classes": len(classes)}
    names = ("matched", "mismatched") if task == "mnli" else ()
    held_out = [f"dev_{name}" for name in names] or ["dev"]
    steps = EPOCHS * count // ROWS
    return config.Config(
        model=config.ModelConfig(
            vocab_size=50_304,
            layers=12,
            width=768,
            heads=12,
            attention=config.lrpe_method(method, causal=False),
        ),
        task=config.TaskConfig(**answer),
        data=config.DataConfig(
            source="tsv",
            paths=(f"data/glue/{task}/train.tsv",),
            heldout_paths=tuple(f"data/glue/{task}/{file}.tsv" for file in held_out),
            heldout_names=names,
            text_columns=texts,
            label_column=label,
            labels=classes,
            tokenizer="data/roberta/tokenizer.json",
            document_separator=2,  # </s>
            context_length=LENGTH,
            batch_tokens=ROWS * LENGTH,
        ),
        optimizer=config.OptimizerConfig(
            name="adamw",
            learning_rate=2e-5,
            b2=0.98,
            epsilon=1e-6,
            schedule="linear",
            warmup_steps=steps * 6 // 100,
            final_fraction=0.0,
            weight_decay=0.1,
        ),
        training=config.TrainingConfig(steps=steps),
    )
