"""Questions with several contexts: merge their predictions, and their true answers, into one per question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lamella.data.examples import Example
from lamella.inference.abstention import calibrated
from lamella.inference.prediction import Prediction, rank_together
from lamella.inference.protocols import AnswerSource


def has_several_contexts(examples: Sequence[Example]) -> bool:
    """Return whether any question has several contexts, each of them an example."""
    return any(example.group is not None for example in examples)


def answers_by_question(
    model: AnswerSource, examples: Sequence[Example], predictions: Mapping[str, Prediction]
) -> dict[str, Prediction]:
    """Return one prediction per question, merged as `model` decodes."""
    merged = predictions_by_question(
        examples, predictions, n_best=model.decoding.n_best_size, gives_text=model.gives_text
    )
    if not model.gives_text:
        return merged
    return {id: calibrated(prediction, model.decoding) for id, prediction in merged.items()}


def predictions_by_question(
    examples: Sequence[Example], predictions: Mapping[str, Prediction], *, n_best: int, gives_text: bool = True
) -> dict[str, Prediction]:
    """Return one prediction per question, from the predictions of its contexts.

    Their answers are ranked together. "No answer" takes its smallest score over the contexts: as with the windows of a
    text, every context that misses the answer is right to report "not here".
    """
    by_question: dict[str, list[Prediction]] = {}
    for example in examples:
        by_question.setdefault(example.question_id, []).append(predictions[example.id])
    if not gives_text:
        return {id: min(group, key=lambda prediction: prediction.null_odds) for id, group in by_question.items()}
    return {id: rank_together(group, n_best) for id, group in by_question.items()}


def paragraphs_of(examples: Sequence[Example]) -> dict[str, str]:
    """Return the paragraph that each example and each question is about, by their ids.

    Errors on one paragraph resemble each other, so statistics resample paragraphs. All contexts of a question count as
    one: the first that contains an answer, otherwise the first.
    """
    paragraphs: dict[str, str] = {}
    with_answer: set[str] = set()
    for example in examples:
        id = example.question_id
        if id not in paragraphs or (example.answerable and id not in with_answer):
            paragraphs[id] = example.context.text
        if example.answerable:
            with_answer.add(id)
    return paragraphs | {example.id: paragraphs[example.question_id] for example in examples}


def one_example_per_question(examples: Sequence[Example]) -> list[Example]:
    """Return one example per question: its first context, with the true answers of all its contexts."""
    questions: dict[str, Example] = {}
    for example in examples:
        id = example.question_id
        first = questions.setdefault(id, replace(example, id=id, answers=()))
        questions[id] = replace(first, answers=(*first.answers, *example.answers))
    return list(questions.values())
