"""Questions that are asked of several contexts: one answer to each, and what it is to be compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lamella.data.examples import Example
from lamella.inference.prediction import Prediction, rank_together
from lamella.inference.protocols import AnswerSource


def has_several_contexts(examples: Sequence[Example]) -> bool:
    """Whether some question is an example for each of several contexts."""
    return any(example.group is not None for example in examples)


def predictions_by_question(
    examples: Sequence[Example], predictions: Mapping[str, Prediction], *, n_best: int, gives_text: bool = True
) -> dict[str, Prediction]:
    """One prediction a question, from those of its contexts.

    Their answers are ranked together, and "no answer" is the one of the context that is least sure of it: as with the
    windows of a text, every context that misses the answer is right to say "not here".
    """
    of_contexts: dict[str, list[Prediction]] = {}
    for example in examples:
        of_contexts.setdefault(example.question_id, []).append(predictions[example.id])
    if not gives_text:
        return {id: min(found, key=lambda one: one.null_odds) for id, found in of_contexts.items()}
    return {id: rank_together(found, n_best) for id, found in of_contexts.items()}


def one_example_per_question(examples: Sequence[Example]) -> list[Example]:
    """An example a question, with the true answers of all its contexts; the context is the first of them."""
    found: dict[str, Example] = {}
    for one in examples:
        first = found.setdefault(one.question_id, replace(one, id=one.question_id, answers=()))
        found[one.question_id] = replace(first, answers=(*first.answers, *one.answers))
    return list(found.values())


def answers_by_question(
    model: AnswerSource, examples: Sequence[Example], predictions: Mapping[str, Prediction]
) -> dict[str, Prediction]:
    """One prediction a question, where some are asked of several contexts."""
    return predictions_by_question(
        examples, predictions, n_best=model.decoding.n_best_size, gives_text=model.gives_text
    )
