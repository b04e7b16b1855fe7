"""Prompts and answers of tasks that ask for something earlier in the context.

Texts are encoded piece by piece, so that a key or a value has the same tokens wherever it occurs.
"""

import dataclasses
import functools
import math
import string
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Int32

from sympow_jax import data
from sympow_jax.evaluation import scores

# Questions about a context. Both are multiples of 4, because results are reported by quarters of the context.
_PAIR_QUESTIONS = 8
_NEEDLES = 4
# Assignments of a variable to another, as in RULER.
_HOPS = 4


class TooShortError(ValueError):
    """A context length is too small for a task."""


@dataclasses.dataclass(frozen=True)
class Material:
    """Text and tokenizer from which prompts are made.

    Attributes:
        text: tokens of held-out text, in which needles and variables are hidden. Its distinct tokens are the alphabet
            of copies.
        encoder: tokenizer; None if it is not known, in which case only copies can be made.
        lead: id before every context; None for none. It replaces that of the encoder.
    """

    text: Int[np.ndarray, " tokens"]
    encoder: data.Codec | None = None
    lead: int | None = None

    @functools.cached_property
    def alphabet(self) -> Int[np.ndarray, " tokens"]:
        """Distinct tokens of the text."""
        return np.unique(self.text)

    @property
    def start(self) -> list[int]:
        """Tokens before every context."""
        return [] if self.lead is None else [self.lead]

    def encode(self, piece: str) -> list[int]:
        """Returns the tokens of a text, without the lead.

        Raises:
            ValueError: there is no tokenizer, or the text has tokens outside the vocabulary.
        """
        if self.encoder is None:
            raise ValueError(
                "this task needs the tokenizer of the data; give it as --tokenizer=FILE, or use --tasks=copy, which "
                "needs none"
            )
        tokens = self.encoder.encode(piece.encode(), f"the text {piece!r} of a task")
        return tokens if self.encoder.lead is None else tokens[1:]

    def excerpt(self, length: int, rng: np.random.Generator) -> list[int]:
        """Returns `length` consecutive tokens of the text from a random start; its beginning follows its end."""
        indices = rng.integers(len(self.text)) + np.arange(length)
        return self.text[indices % len(self.text)].tolist()


class Exam(NamedTuple):
    """A context and questions about it.

    Attributes:
        case: tokens of the context, the questions and the answers.
        log_candidates: logarithm of the number of answers that the context has to offer. A guess among them is right
            with the probability exp(-log_candidates).
        depths: for each question, the fraction of the pairs, or of the excerpt that sentences are hidden in, before
            what answers it, in [0, 1). Empty if the answers depend on the whole context.
    """

    case: scores.Case
    log_candidates: float
    depths: Sequence[float] = ()


@dataclasses.dataclass(frozen=True)
class Task:
    """Maker of contexts and questions of one kind.

    Attributes:
        title: its answers, in a few words.
        questions: number of questions about a context.
        make: function of material, number of tokens and source of random numbers. Returns a context that has, with its
            longest question and answer, at most that number of tokens. Raises TooShortError if the number is too small.
        needs_tokenizer: whether it needs the tokenizer.
    """

    title: str
    questions: int
    make: Callable[[Material, int, np.random.Generator], Exam]
    needs_tokenizer: bool = True


def make_exam(task: str, material: Material, length: int, *, index: int) -> Exam:
    """Returns exam `index` of a task; it depends on the arguments only.

    Raises:
        TooShortError: the length is too small for the task.
        ValueError: the tokenizer is not known, or cannot encode the text of the task.
        KeyError: there is no such task.
    """
    # The 0 keeps exams as they were when there was a seed.
    rng = np.random.default_rng([0, index, length, *task.encode()])
    try:
        exam = TASKS[task].make(material, length, rng)
    except TooShortError as error:
        raise TooShortError(f"context length {length} is too short for the task {task!r}: {error}") from None
    # All exams of a length are in memory, where lists of integers take ten times as much as arrays.
    questions = [scores.Question(_as_array(x.prompt), _as_array(x.answer)) for x in exam.case.questions]
    return exam._replace(case=scores.Case(_as_array(exam.case.context), questions))


def _as_array(tokens: scores.Tokens) -> Int32[np.ndarray, " tokens"]:
    return np.asarray(tokens, np.int32)


def _recall(material: Material, length: int, rng: np.random.Generator) -> Exam:
    """Lists pairs of a key and a value until the context is full, and asks for a value in each eighth of the list.

    This is the associative recall of "Zoology: Measuring and Improving Recall in Efficient Language Models" (Arora et
    al. 2023), in text and with all questions at the end.
    """
    end = material.encode("\n")
    # At least four letters, and enough for four words per token.
    letters = max(4, math.ceil(math.log(4 * length, len(string.ascii_lowercase))))
    keys = _distinct_words(rng, string.ascii_lowercase, letters)
    pairs: list[scores.Question] = []
    context, question_size = material.start, 0
    while True:
        key, value = material.encode(f"{next(keys)}="), material.encode(_digits(rng, 4))
        question_size = max(question_size, len(key) + len(value))
        size = len(context) + len(key) + len(value) + len(end)
        if len(pairs) >= _PAIR_QUESTIONS and size + question_size > length:
            break
        context += [*key, *value, *end]
        pairs.append(scores.Question(key, value))
    _require_length(length, len(context) + question_size)
    # Bounds are rounded up, so that a pair of the eighth k has a depth of k / 8 at least.
    bounds = -(-np.arange(_PAIR_QUESTIONS + 1) * len(pairs) // _PAIR_QUESTIONS)
    indices = rng.integers(bounds[:-1], bounds[1:])
    candidates = len({tuple(pair.answer) for pair in pairs})
    case = scores.Case(context, [pairs[index] for index in indices])
    return Exam(case, math.log(candidates), (indices / len(pairs)).tolist())


def _needle(material: Material, length: int, rng: np.random.Generator) -> Exam:
    """Hides four sentences in a text, one in each quarter, and asks for the number in each.

    This is the multi-key needle in a haystack of "RULER: What's the Real Context Size of Your Long-Context Language
    Models?" (Hsieh et al. 2024, section 3), without instructions, which models of next tokens do not follow.
    """
    keys, numbers = _distinct_words(rng, string.ascii_lowercase, 4), _distinct_words(rng, string.digits, 5)
    before, after = material.encode("\nThe magic number of "), material.encode(" is #")
    end = material.encode(".\n")
    questions = [
        scores.Question([*before, *material.encode(next(keys)), *after], material.encode(next(numbers)))
        for _ in range(_NEEDLES)
    ]
    needles = [[*x.prompt, *x.answer, *end] for x in questions]
    question_size = max(len(x.prompt) + len(x.answer) for x in questions)
    depths = (np.arange(_NEEDLES) + rng.random(_NEEDLES)) / _NEEDLES
    context = _hide(material, needles, depths, length, question_size, rng)
    return Exam(scores.Case(context, questions), math.log(_NEEDLES), depths.tolist())


def _variables(material: Material, length: int, rng: np.random.Generator) -> Exam:
    """Hides a chain of assignments of variables in a text, and asks which variables have the chain's value.

    This is the variable tracking of RULER (Hsieh et al. 2024, section 3) with its one chain of four hops. The answer
    has the five names in the order of the assignments.
    """
    words = _distinct_words(rng, string.ascii_uppercase, 5)
    names = [material.encode(f" {next(words)}") for _ in range(_HOPS + 1)]
    value = material.encode(f" {_digits(rng, 5)}")
    sources = [value, *([*material.encode(" VAR"), *name] for name in names[:-1])]
    begin, equals, end = material.encode("\nVAR"), material.encode(" ="), material.encode("\n")
    statements = [
        [*begin, *name, *equals, *source, *end] for name, source in zip(names, sources, strict=True)
    ]
    prompt = [*material.encode("\nVariables assigned the value"), *value, *material.encode(":")]
    answer = [token for name in names for token in name]
    depths = np.sort(rng.random(len(statements)))
    context = _hide(material, statements, depths, length, len(prompt) + len(answer), rng)
    case = scores.Case(context, [scores.Question(prompt, answer)])
    return Exam(case, math.log(math.factorial(len(names))))


def _copy(material: Material, length: int, rng: np.random.Generator) -> Exam:
    """Writes random tokens twice, and asks for all of the second copy after its first token.

    As in "Repeat After Me: Transformers are Better than State Space Models at Copying" (Jelassi et al. 2024), tokens
    are drawn uniformly from an alphabet.
    """
    _require_length(length, len(material.start) + 4)
    size = (length - len(material.start)) // 2
    tokens = rng.choice(material.alphabet, size).tolist()
    case = scores.Case([*material.start, *tokens], [scores.Question(tokens[:1], tokens[1:])])
    return Exam(case, (size - 1) * math.log(len(material.alphabet)))


TASKS = {
    "recall": Task("value of a key among pairs", _PAIR_QUESTIONS, _recall),
    "needle": Task("number in a sentence hidden in text", _NEEDLES, _needle),
    "variables": Task("variables of one value, four hops", 1, _variables),
    "copy": Task("random tokens, repeated", 1, _copy, needs_tokenizer=False),
}


def _hide(
    material: Material,
    pieces: Sequence[Sequence[int]],
    depths: Float[np.ndarray, " pieces"],
    length: int,
    question_size: int,
    rng: np.random.Generator,
) -> list[int]:
    """Returns an excerpt of the text with pieces inserted at increasing depths; context and question have `length`."""
    fixed = len(material.start) + sum(map(len, pieces)) + question_size
    # At least one token of text for each piece.
    _require_length(length, fixed + len(pieces))
    size = length - fixed
    excerpt = material.excerpt(size, rng)
    context, previous = material.start, 0
    for position, piece in zip((depths * size).astype(int).tolist(), pieces):
        context += [*excerpt[previous:position], *piece]
        previous = position
    return [*context, *excerpt[previous:]]


def _require_length(length: int, needed: int) -> None:
    if length < needed:
        raise TooShortError(f"it must be at least {needed} tokens")


def _digits(rng: np.random.Generator, count: int) -> str:
    return f"{rng.integers(10**count):0{count}}"


def _distinct_words(rng: np.random.Generator, letters: str, length: int) -> Iterator[str]:
    """Yields different words of random letters."""
    seen = set()
    while True:
        word = "".join(letters[index] for index in rng.integers(len(letters), size=length))
        if word not in seen:
            seen.add(word)
            yield word
