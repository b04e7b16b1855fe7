"""The long-range tasks (Qin et al. 2023, Table 9): `--config=configs/lra.py:TASK[,METHOD]`.

An example is `--config=configs/lra.py:image,type1`. TASK is text, listops, retrieval, pathfinder or image; METHOD is
one of `sympow_jax.config.LRPE_METHODS`. ListOps is generated. Text is read as bytes from a TSV file with the columns
`text` and `label`. Retrieval reads the benchmark's files of pairs; as in the benchmark, a dual encoder reads 4,000
bytes of each document. Pathfinder and image are 32 x 32 grayscale images with one folder per class (`docs/data.md`).
The table does not specify heads, the feed-forward layer, the schedule and weight decay: these are our choices.
"""

from typing import Any

from sympow_jax import config

# Table 9: width, layers, rows per batch, epochs, learning rate; then heads, tokens per row, examples and classes.
TASKS = {
    "text": (128, 4, 256, 32, 1e-3, 4, 4000, 25_000, 2),
    "listops": (128, 4, 256, 40, 1e-4, 4, 2000, 96_000, 10),
    "retrieval": (64, 4, 64, 20, 1e-3, 2, 8000, 147_086, 2),
    "pathfinder": (32, 4, 128, 200, 5e-4, 2, 1024, 160_000, 2),
    "image": (100, 12, 100, 200, 1e-3, 2, 1024, 50_000, 10),
}


def get_config(task: str = "listops", method: str = "type2") -> config.Config:
    """Returns the model and the data of the task named by `task`."""
    config.require_choice("task", task, TASKS)
    width, layers, rows, epochs, rate, heads, length, count, classes = TASKS[task]
    steps = epochs * count // rows
    return config.Config(
        model=config.ModelConfig(
            vocab_size=16 if task == "listops" else 256,
            layers=layers,
            width=width,
            heads=heads,
            norm="batch",
            dtype="float32",
            attention=config.lrpe_method(method, length=length, causal=False),
        ),
        task=config.TaskConfig(name="classification", classes=classes, dual_encoder=task == "retrieval"),
        data=config.DataConfig(context_length=length, batch_tokens=rows * length, **_source(task)),
        optimizer=config.OptimizerConfig(
            learning_rate=rate, schedule="cosine", warmup_steps=steps // 20, final_fraction=0.0
        ),
        training=config.TrainingConfig(steps=steps),
    )


def _source(task: str) -> dict[str, Any]:
    if task == "listops":
        return {"source": "listops"}
    ending = "" if task in ("pathfinder", "image") else ".tsv"
    sources: dict[str, Any] = {
        "paths": (f"data/lra/{task}/train{ending}",),
        "heldout_paths": (f"data/lra/{task}/test{ending}",),
    }
    if not ending:
        pixels = {"image_tokens": True, "image_size": 32}
        return {"source": "images", **pixels, **sources}
    if task == "text":
        return {"source": "tsv", "text_columns": ("text",), **sources}
    columns = {"text_columns": ("4", "5"), "label_column": "1", "labels": ("0.0", "1.0")}
    return {"source": "tsv", **columns, **sources}
