"""Tests of ListOps against an evaluator of its text, and of its lengths, depths and classes."""

import dataclasses
import re

import numpy as np
import pytest

from sympow_jax import config as config_lib
from sympow_jax import data
from sympow_jax.data import sources
from sympow_jax.data.sources import listops
from tests.data import builders

TASK = config_lib.TaskConfig(name="classification", classes=10)


@pytest.fixture(autouse=True)
def few_short_examples(monkeypatch):
    monkeypatch.setattr(listops, "LENGTHS", (10, 60))
    monkeypatch.setattr(listops, "EXAMPLES", (20, 6))


def settings(**changes) -> config_lib.DataConfig:
    return builders.data_config(**{"source": "listops", "context_length": 64, **changes})


def text(tokens) -> str:
    return " ".join(listops.SYMBOLS[token] for token in tokens)


def evaluate(expression: str) -> int:
    """Replaces innermost operations by their values until none is left."""
    functions = {
        "MAX": np.max,
        "MIN": np.min,
        "MED": lambda values: np.floor(np.median(values)),
        "SM": lambda values: np.sum(values) % 10,
    }

    def value(match):
        return str(int(functions[match[1]]([int(digit) for digit in match[2].split()])))

    while "[" in expression:
        expression = re.sub(r"\[(\w+) ([\d ]+) \]", value, expression)
    return int(expression)


def depths(tokens) -> list[int]:
    """Returns the depth of every token; the outermost operation has depth 1."""
    depth, examples = 1, []
    for token in tokens:
        symbol = listops.SYMBOLS[token]
        depth -= symbol == "]"
        examples.append(depth)
        depth += symbol.startswith("[")
    assert depth == 1
    return examples


def test_examples_in_long_range_arenas_settings():
    examples = [listops.generate((0, i, 1), 500, 2000) for i in range(150)]
    arguments = []  # numbers of them, of innermost operations
    for tokens, value in examples:
        assert 500 <= len(tokens) <= 2000
        assert evaluate(text(tokens)) == value
        arguments += [found.count(" ") - 1 for found in re.findall(r"\[\w+ [\d ]+ \]", text(tokens))]
    assert (min(arguments), max(arguments)) == (2, 10)
    classes = np.bincount([value for _, value in examples], minlength=10)
    assert classes.min() >= 2
    assert classes.max() <= 50
    # The distribution of nodes.
    tokens = np.concatenate([tokens for tokens, _ in examples])
    depth = np.concatenate([depths(tokens) for tokens, _ in examples])
    counts = np.bincount(tokens, minlength=16)
    digits, operations, ends = counts[1:11], counts[11:15], counts[15]
    assert depth.max() == 10
    assert counts[0] == 0
    assert ends == operations.sum()
    np.testing.assert_allclose(digits / digits.sum(), 0.1, atol=0.005)
    np.testing.assert_allclose(operations / operations.sum(), 0.25, atol=0.02)
    # Nodes that are neither roots nor at the last depth.
    inner = (depth > 1) & (depth < 10) & (tokens != 15)
    # Trees of these lengths are picked, so that the share is not a quarter exactly.
    assert 0.22 < np.mean(tokens[inner] > 10) < 0.28


def test_rows():
    dataset = data.train_dataset(settings(), task=TASK, vocab_size=16)
    rows = [dataset[i] for i in range(40)]
    for row in rows[:20]:
        assert {name: (value.shape, value.dtype) for name, value in row.items()} == {
            "inputs": ((64,), np.int32),
            "segment_ids": ((64,), np.int32),
            "labels": ((), np.int32),
        }
        real = row["segment_ids"] == 0
        assert (row["segment_ids"][~real] == -1).all()
        assert (row["inputs"][~real] == 0).all()
        assert 10 <= real.sum() <= 60
        assert evaluate(text(row["inputs"][real])) == row["labels"]
    seen, again = ({tuple(row["inputs"]) for row in half} for half in (rows[:20], rows[20:]))
    assert len(seen) == 20
    assert seen == again
    batches = list(data.HeldoutData(settings(), TASK, vocab_size=16).batches(4))
    assert [batch["labels"].shape for batch in batches] == [(4,), (4,)]
    assert (batches[1]["labels"] == -1).tolist() == [False, False, True, True]
    assert not seen & {tuple(inputs) for batch in batches for inputs in batch["inputs"]}


def test_examples_are_a_function_of_the_index_and_the_seed():
    for i in range(10):
        one, again, other = (
            sources.open_source(settings(seed=seed)).example(i, heldout=False)[0].tolist()
            for seed in (0, 0, 1)
        )
        assert one == again != other
    description = data.describe(settings())
    assert (description["examples"], description["heldout_examples"]) == (20, 6)
    assert data.describe(settings()) == description
    assert data.describe(settings(seed=1))["digest"] != description["digest"]


def test_errors():
    two = dataclasses.replace(TASK, classes=2)
    with builders.refused("must be empty; source 'listops' reads no file"):
        settings(paths=("a",))
    for changes, task, vocab_size, message in (
        (
            {"context_length": 32},
            TASK,
            16,
            r"data\.context_length is 32, but data\.source 'listops' needs 60 or",
        ),
        ({}, two, 16, r"task\.classes is 2, but data\.source 'listops' needs 10;"),
        ({}, TASK, 15, r"model\.vocab_size is 15, but data\.source 'listops' needs 16 or"),
    ):
        with builders.refused(message):
            data.train_dataset(settings(**changes), task=task, vocab_size=vocab_size)
