"""Tests of whole tasks with models whose results are known: one reads the context, one guesses, one knows nothing."""

import itertools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, data, evaluation
from sympow_jax.evaluation import scores
from sympow_jax.evaluation.context_tasks import prompts

BYTES = data.Codec(data.tokenizer.load("byte"), vocab_size=256)
TEXT = np.frombuffer(
    b"It was a bright cold day in April, and the clocks were striking thirteen. " * 20, np.uint8
)
MATERIAL = evaluation.Material(TEXT, BYTES)
LENGTHS = (256, 700)


def read_recall(text, length):
    """Returns the start of the answer, the answer with its quarter of the context, and all values of the context."""
    *lines, last = text.split(b"\n")
    pairs = dict(line.split(b"=") for line in lines)
    key = last.split(b"=")[0]
    if key not in pairs:
        return None
    start = len(text) - len(last) + len(key) + 1
    return start, pairs[key], 4 * list(pairs).index(key) // len(pairs), sorted(set(pairs.values()))


def read_needle(text, length):
    numbers = dict(re.findall(rb"\nThe magic number of (\w{4}) is #(\d{5})\.\n", text))
    question = re.search(rb"\nThe magic number of (\w{4}) is #\d{0,5}$", text)
    if question is None or question[1] not in numbers:
        return None
    start = text.rindex(b"#") + 1
    return start, numbers[question[1]], list(numbers).index(question[1]), sorted(numbers.values())


def read_variables(text, length):
    question = re.search(rb"\nVariables assigned the value (\d{5}):", text)
    if question is None:
        return None
    values = {}
    for name, source in re.findall(rb"\nVAR (\w+) = (?:VAR )?(\w+)\n", text):
        values[name] = values.get(source, source)
    names = [b" " + name for name, value in values.items() if value == question[1]]
    return question.end(), b"".join(names), None, list(map(b"".join, itertools.permutations(names)))


def read_copy(text, length):
    context = text[: length // 2]
    return len(context) + 1, context[1:], None, None


READERS = {"recall": read_recall, "needle": read_needle, "variables": read_variables, "copy": read_copy}


class Reading(NamedTuple):
    """How `Reader` reads.

    Attributes:
        task: name of the task.
        length: context length.
        guesses: whether all answers that the context has to offer are equally probable.
        blind: quarter of the context in which answers are read as dashes.
    """

    task: str
    length: int
    guesses: bool = False
    blind: int | None = None


class Reader(nnx.Module):
    """Byte model that reads the question and the context as `Reader.reading` says; one program for all readings."""

    reading: Reading

    def __init__(self):
        self.config = config.ModelConfig(vocab_size=256, layers=1, width=8, heads=2)

    def init_state(self, batch, *, max_length):
        return {"tokens": jnp.zeros((batch, max_length), jnp.int32), "length": jnp.zeros((batch,), jnp.int32)}

    def hidden(self, tokens, *, segment_ids, initial_state=None, **_):
        batch, size = tokens.shape
        state = self.init_state(batch, max_length=size) if initial_state is None else initial_state
        return self.extend_hidden(tokens, state, segment_ids=segment_ids)[0]

    def extend_hidden(self, tokens, state, *, segment_ids, **_):
        batch, size = tokens.shape
        positions = state["length"][:, None] + jnp.arange(size)
        # Padding is at the end, where later tokens replace it.
        history = state["tokens"].at[jnp.arange(batch)[:, None], positions].set(tokens)
        length = state["length"] + (segment_ids >= 0).sum(1)
        shape = jax.ShapeDtypeStruct((batch, size, 256), jnp.float32)
        logits = jax.pure_callback(Reader.predict, shape, history, state["length"], length, np.arange(size))
        return logits, {"tokens": history, "length": length}

    def unembed(self, hidden):
        return hidden

    @staticmethod
    def predict(history, before, after, positions):
        logits = np.zeros((len(history), len(positions), 256), np.float32)
        task, length, guesses, blind = Reader.reading
        for row, tokens, first, end in zip(logits, *map(np.asarray, (history, before, after))):
            text = bytes(tokens[:end].tolist())
            found = READERS[task](text, length)
            if found is None:
                continue
            start, answer, quarter, candidates = found
            if blind is not None and quarter == blind:
                answer = b"-" * len(answer)
            for index in range(len(answer)):
                # Byte `start + index` is predicted from the one before it, after the bytes of the answer until there.
                position = start + index - 1 - first
                seen = text[start : start + index]
                if not guesses:
                    bytes_next = [answer[index]]
                elif candidates is None:  # a copy of any bytes of the text
                    bytes_next = list(set(TEXT.tolist()))
                else:
                    bytes_next = [x[index] for x in candidates if x.startswith(seen)]
                if 0 <= position < end - first:
                    row[position] = np.log(np.bincount(bytes_next, minlength=256) + 1e-9)
        return logits


def read(monkeypatch, *reading, **options):
    monkeypatch.setattr(Reader, "reading", Reading(*reading, **options), raising=False)
    task, length = reading
    (result,) = evaluation.context_task_results(Reader(), MATERIAL, [task], [length], trials=4)
    return result


EACH_TASK = pytest.mark.parametrize("task", prompts.TASKS)


@EACH_TASK
def test_a_model_that_reads_the_context_is_right_everywhere(monkeypatch, task):
    # Rows are one segment, or many.
    for call_tokens, length in ((16_384, LENGTHS[0]), (256, LENGTHS[1])):
        monkeypatch.setattr(scores, "CALL_TOKENS", call_tokens)
        result = read(monkeypatch, task, length)
        assert (result.exact_match, result.token_accuracy, result.exact_match_high) == (1, 1, 1)
        assert result.loss == pytest.approx(0, abs=1e-6)
        depths = (None,) * 4 if task in ("variables", "copy") else (1,) * 4
        assert result.exact_match_by_depth == depths


@pytest.mark.parametrize("task", ["recall", "needle"])
def test_a_model_that_is_blind_at_a_depth_is_wrong_at_that_depth_alone(monkeypatch, task):
    for quarter, length in zip(range(4), (LENGTHS[0], LENGTHS[1]) * 2):
        result = read(monkeypatch, task, length, blind=quarter)
        assert result.exact_match == 3 / 4
        assert result.exact_match_by_depth == tuple(float(other != quarter) for other in range(4))


@EACH_TASK
def test_a_model_that_guesses_among_the_answers_in_the_context_has_the_loss_of_chance(monkeypatch, task):
    for length in LENGTHS:
        result = read(monkeypatch, task, length, guesses=True)
        assert result.loss == pytest.approx(result.chance_loss, rel=1e-4)
        assert result.chance < 1
        assert result.chance > 0 or task == "copy"  # of hundreds of tokens
