"""Choose contexts of questions that have several: how many of each question, and which first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from lamella.data.examples import Example
from lamella.data.negatives import Question, group_questions

ContextOrder = Literal["answerable_first", "given"]


def choose_contexts(
    examples: Sequence[Example],
    count: int | None,
    *,
    order: ContextOrder = "answerable_first",
    negatives: float | None = None,
) -> list[Example]:
    """Return the examples of at most `count` contexts per question.

    With `answerable_first`, contexts that contain an answer are preferred, and the others follow in their given order.
    `negatives` limits the contexts without an answer: over the data, at most this many for each context with one. A
    question may lose all its contexts to this limit.

    >>> from lamella.data.examples import Answer, Context
    >>> texts = ["Rhea", "Titan", "Dione", "Titan too"]
    >>> examples = [
    ...     Example(f"q#{at}", "?", Context(text), (Answer("Titan", 0),) if "Titan" in text else (), group="q")
    ...     for at, text in enumerate(texts)
    ... ]
    >>> [example.id for example in choose_contexts(examples, 3)]
    ['q#0', 'q#1', 'q#3']
    >>> [example.id for example in choose_contexts(examples, 3, order="given")]
    ['q#0', 'q#1', 'q#2']
    """
    chosen: set[str] = set()
    positives = kept_negatives = 0
    for question in group_questions(examples):
        contexts = in_given_order(question)
        if order == "answerable_first":
            contexts.sort(key=lambda example: not example.answerable)  # stable
        for example in contexts[:count]:
            if example.answerable:
                positives += 1
                chosen.add(example.id)
        room = None if negatives is None else int(negatives * positives) - kept_negatives
        without = [example.id for example in contexts[:count] if not example.answerable][:room]
        kept_negatives += len(without)
        chosen.update(without)
    return [example for example in examples if example.id in chosen]


def in_given_order(question: Question) -> list[Example]:
    """Return the contexts of a question as they were given: by the numbers in `ID#0`, `ID#1`, otherwise as in the file.

    A SQuAD file lists paragraphs by article, so a question's contexts may appear in another order.
    """
    numbers = [re.fullmatch(rf"{re.escape(question.id)}#(\d+)", example.id) for example in question.examples]
    if not all(numbers):
        return list(question.examples)
    places = [int(number[1]) for number in numbers if number]
    return [question.examples[at] for at in sorted(range(len(places)), key=places.__getitem__)]
