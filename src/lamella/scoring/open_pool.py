"""Open evaluation: find the answer in a pool of contexts, instead of being given the right one."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lamella.data.examples import Example
from lamella.documents.collection import Documents
from lamella.errors import UsageError, collect_warnings, counted
from lamella.inference.abstention import expecting
from lamella.inference.predict import predict
from lamella.inference.reader import Reader
from lamella.inference.several_contexts import answers_by_question, has_several_contexts, one_example_per_question
from lamella.progress import progress
from lamella.scoring.metrics import language_of, score

RANKS = (1, 5, 10, 20, 50)  # k of the recall among the best k passages
QUESTIONS_AT_ONCE = 16  # that are read together
SEED = 1  # of the sample


@dataclass(frozen=True)
class _Open:
    """A question with the places of its answers: number of the context, begin and end."""

    example: Example
    places: frozenset[tuple[int, int, int]]


def evaluate_open(
    reader: Reader,
    examples: Sequence[Example],
    *,
    pool: Iterable[str] = (),
    passages: int | None = None,
    sample: int | None = None,
    answerable: float | None = None,
    language: str | None = None,
) -> dict[str, Any]:
    """Ask all questions about all contexts, and return how often the answer is found, in percent.

    `recall_at_K` is the share of the answerable questions of which an answer lies in one of the best K passages, in the
    context that the data names: the same text elsewhere does not count. `exact`, `f1` and their groups are those of the
    answers found in the pool; `given_exact` and `given_f1` those of the same questions with the contexts of the data.
    `pool` adds further texts. `passages` is how many of them are read, `sample` how many questions are answered; the
    recall is always that of all questions.
    """
    questions = _open_questions(examples)
    texts = dict.fromkeys([*(example.context.text for example in examples), *pool])
    documents = Documents.from_texts({str(number): text for number, text in enumerate(texts)})
    begin = time.perf_counter()
    results = _recall(questions, documents)
    rank_seconds = time.perf_counter() - begin
    if sample is not None and sample < len(questions):
        questions = random.Random(SEED).sample(questions, sample)
    results = {
        "contexts": len(documents),
        "passages": len(documents.passages),
        **results,
        "rank_seconds_per_question": rank_seconds / max(1, results["questions"]),
    }
    if not questions:
        return results
    asked = [question.example for question in questions]
    language = language or language_of(asked)
    answers: dict[str, str] = {}
    begin = time.perf_counter()
    # A question that shares no word with the pool is answered like the others, without a warning for each.
    with progress("asking", len(asked), lines=True) as advance, collect_warnings():
        for first in range(0, len(asked), QUESTIONS_AT_ONCE):
            batch = asked[first : first + QUESTIONS_AT_ONCE]
            found = reader.ask(
                [example.question for example in batch],
                documents,
                passages="auto" if passages is None else passages,
                answerable=answerable,
            )
            answers |= {example.id: answer[0]["answer"] for example, answer in zip(batch, found, strict=True)}
            advance(len(batch))
    results["seconds_per_question"] = (time.perf_counter() - begin) / len(asked)
    results |= score(asked, answers, language=language)
    ids = {example.id for example in asked}
    given = score(asked, _answer_given(reader, examples, ids, answerable), language=language)
    return results | {f"given_{key}": value for key, value in given.items() if key.endswith(("exact", "f1"))}


def _open_questions(examples: Sequence[Example]) -> list[_Open]:
    numbers: dict[str, int] = {}
    places: dict[str, set[tuple[int, int, int]]] = {}
    for example in examples:
        number = numbers.setdefault(example.context.text, len(numbers))
        places.setdefault(example.question_id, set()).update(
            (number, answer.begin_char, answer.end_char) for answer in example.answers
        )
    questions = [_Open(example, frozenset(places[example.id])) for example in one_example_per_question(examples)]
    blank = sum(not question.example.question.strip() for question in questions)
    if blank:
        raise UsageError(f"evaluate --open: expected questions with a text, got {counted(blank, 'question')} without.")
    return questions


def _recall(questions: Sequence[_Open], documents: Documents) -> dict[str, Any]:
    """Return the recall among the best passages, of the questions that have an answer."""
    found = dict.fromkeys(RANKS, 0)
    answerable = [question for question in questions if question.places]
    with progress("ranking", len(answerable), lines=True) as advance:
        for question in answerable:
            ranked = documents.rank(question.example.question, max(RANKS))
            rank = next(
                (
                    rank
                    for rank, passage in enumerate(ranked)
                    if any(
                        passage.text == number and passage.begin <= begin and end <= passage.end
                        for number, begin, end in question.places
                    )
                ),
                max(RANKS),
            )
            for k in RANKS:
                found[k] += rank < k
            advance()
    shares = {f"recall_at_{k}": 100 * count / len(answerable) for k, count in found.items() if answerable}
    return {"questions": len(questions), **shares}


def _answer_given(
    reader: Reader, examples: Sequence[Example], ids: set[str], answerable: float | None
) -> dict[str, str]:
    """Return the answers of some questions with the contexts that the data has for them."""
    model = expecting(reader.model, answerable)
    chosen = [example for example in examples if example.question_id in ids]
    predictions = predict(model, chosen, batch_size=reader.batch_size)
    if has_several_contexts(chosen):
        predictions = answers_by_question(model, chosen, predictions)
    threshold = model.decoding.null_score_diff_threshold
    return {id: prediction.text(threshold) for id, prediction in predictions.items()}
