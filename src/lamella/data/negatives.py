"""Negatives: questions with a context that resembles theirs but does not contain the answer.

Where every question has an answer, nothing shows whether a reader abstains when it should, and a reader learns that
there is always an answer. A negative takes the context of the same data that shares most words with the question; being
similar, it is not recognised by its topic alone.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lamella.data.examples import Context, Example
from lamella.data.word_ranking import WordRanking
from lamella.progress import progress

NEGATIVE = "-negative"  # ends the id of a negative; a number follows if there are several of one question
DISTINCT = "+"  # before that, if a question of the data already has this id
FEW = 64  # the contexts that are sorted first: one of them almost always fits


@dataclass(frozen=True)
class Question:
    """A question with all of its examples: one, or one for each of its contexts."""

    examples: tuple[Example, ...]

    @property
    def id(self) -> str:
        return self.examples[0].question_id

    @property
    def positives(self) -> tuple[Example, ...]:
        """Its examples whose context contains an answer."""
        return tuple(example for example in self.examples if example.answerable)


@dataclass(frozen=True)
class MixedExamples:
    """One example per question, a share of them negatives."""

    examples: tuple[Example, ...]
    made: int  # negatives
    impossible: int  # questions that were to become negatives, but no other context lacks the answer
    lost_answers: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of each negative: those of its question


def group_questions(examples: Sequence[Example]) -> list[Question]:
    """Collect the examples of each question, in order of first appearance."""
    questions: dict[str, list[Example]] = {}
    for example in examples:
        questions.setdefault(example.question_id, []).append(example)
    return [Question(tuple(members)) for members in questions.values()]


class NegativeContexts:
    """Finds contexts for negatives among the contexts of a data set."""

    def __init__(self, examples: Sequence[Example]) -> None:
        contexts = {example.context.text: example.context for example in examples}
        self._contexts = list(contexts.values())
        self._folded = [fold_text(text) for text in contexts]
        self._numbers = {text: number for number, text in enumerate(contexts)}
        self._ranking = WordRanking(contexts)

    def best(self, question: Question, count: int) -> list[Context]:
        """Return up to `count` contexts without any answer to a question, the most similar first.

        A question about several contexts has its negatives among these; another question finds them everywhere.
        """
        return self._best(question, count, self._ranking.scores(question.examples[0].question))

    def best_with_own(self, question: Question, count: int) -> list[Context]:
        """Return the context of a question and up to `count` - 1 without any answer to it, the most similar first."""
        scores = self._ranking.scores(question.examples[0].question)
        own = question.examples[0].context
        ranked = [own, *self._best(question, count - 1, scores)]
        return sorted(ranked, key=lambda context: -scores[self._numbers[context.text]])

    def _best(self, question: Question, count: int, scores: NDArray[np.float32]) -> list[Context]:
        answers = {fold_text(answer.text) for example in question.examples for answer in example.answers}
        own = {self._numbers[example.context.text] for example in question.examples}
        ranked: Iterable[int] = _descending(scores)
        if len(question.examples) > 1:
            ranked = sorted(own, key=lambda number: (-scores[number], number))
            own = set()
        fitting = (
            self._contexts[number]
            for number in ranked
            if number not in own and not any(answer in self._folded[number] for answer in answers)
        )
        return list(itertools.islice(fitting, count))


def with_negatives(examples: Sequence[Example], share: float, *, seed: int = 0) -> MixedExamples:
    """Turn a share of the answerable questions into negatives, and return one example per question.

    A question about several contexts keeps the first that contains an answer, or becomes a negative with the most
    similar of its others. Unanswerable questions stay as they are.

    >>> from lamella import load_examples
    >>> rows = [
    ...     {"id": "t", "question": "Who discovered Titan?", "context": "Huygens found Titan.", "answers": ["Huygens"]},
    ...     {"id": "r", "question": "Who discovered Rhea?", "context": "Cassini found Rhea.", "answers": ["Cassini"]},
    ... ]
    >>> [(example.id, example.context.text) for example in with_negatives(load_examples(rows).examples, 0.5).examples]
    [('t', 'Huygens found Titan.'), ('r-negative', 'Huygens found Titan.')]
    """
    questions = group_questions(examples)
    chosen = draw_answerable(questions, share, seed)
    contexts = NegativeContexts(examples)
    taken = ids_of(examples)
    mixed: list[Example] = []
    lost: dict[str, tuple[str, ...]] = {}
    with progress("finding contexts for negatives", len(questions)) as advance:
        for number, question in enumerate(questions):
            # A question that none of its contexts answers keeps the most similar of them.
            unanswered = not question.positives and len(question.examples) > 1
            found = contexts.best(question, 1) if number in chosen or unanswered else []
            example = make_negative(question, found[0], taken) if found else single_context(question)
            mixed.append(replace(example, id=question.id) if unanswered else example)
            if number in chosen and found:
                lost[example.id] = tuple(answer.text for part in question.examples for answer in part.answers)
            advance()
    return MixedExamples(tuple(mixed), len(lost), len(chosen) - len(lost), lost)


def draw_answerable(questions: Sequence[Question], share: float, seed: int) -> set[int]:
    """Return the numbers of a random share of the answerable questions."""
    answerable = [number for number, question in enumerate(questions) if question.positives]
    order = np.random.default_rng([seed, len(answerable)]).permutation(answerable)
    return set(order[: round(share * len(answerable))].tolist())


def ids_of(examples: Iterable[Example]) -> set[str]:
    """Return the ids of examples and of their questions."""
    return {name for example in examples for name in (example.id, example.question_id)}


def make_negative(question: Question, context: Context, taken: Container[str], number: int = 0) -> Example:
    """Return the question with a context that does not answer it, and an id that is not one of those `taken`.

    `number` distinguishes several negatives of one question.
    """
    stem, end = question.id, NEGATIVE + (f"-{number + 1}" if number else "")
    while f"{stem}{end}" in taken or (stem != question.id and stem in taken):
        stem += DISTINCT
    return Example(f"{stem}{end}", question.examples[0].question, context)


def is_negative(id: str) -> bool:
    """Whether an id is that of a negative."""
    return re.search(rf"{NEGATIVE}(-\d+)?$", id) is not None


def single_context(question: Question) -> Example:
    """Return the question with a single context: the first that contains an answer, if any does."""
    example = (question.positives or question.examples)[0]
    return example if example.group is None else replace(example, id=question.id, group=None)


def _descending(scores: NDArray[np.float32]) -> Iterator[int]:
    """Yield the places of scores from the highest down, the first of equals first, without sorting all at once."""
    first = np.arange(len(scores))
    if len(scores) > FEW:
        lowest = np.partition(scores, -FEW)[-FEW]
        above = np.flatnonzero(scores > lowest)
        first = np.append(above, np.flatnonzero(scores == lowest)[: FEW - len(above)])
    yield from first[np.lexsort((first, -scores[first]))].tolist()
    if len(first) < len(scores):
        rest = np.setdiff1d(np.arange(len(scores)), first)
        yield from rest[np.lexsort((rest, -scores[rest]))].tolist()


def fold_text(text: str) -> str:
    """Return a text without differences of case, white space and normal form, to look for answers in it."""
    return " ".join(unicodedata.normalize("NFC", text.casefold()).split())
