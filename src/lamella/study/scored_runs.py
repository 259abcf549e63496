"""Score the answers of a run again: per context and, where questions have several contexts, per question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lamella import runs
from lamella.data.examples import Example
from lamella.decoding_options import DecodingOptions
from lamella.errors import RunError
from lamella.inference.prediction_files import read_answers
from lamella.inference.several_contexts import has_several_contexts, one_example_per_question, predictions_by_question
from lamella.scoring.best_answers import score_best_answers
from lamella.scoring.metrics import QuestionScores, language_of, score_all_answered, score_questions
from lamella.study.records import ANSWERABILITY, SPAN, RunRecord, answered_examples, read_json_object

ExampleCache = dict[tuple[str, ...], list[Example]]  # questions by files and hash of the ids


@dataclass(frozen=True, eq=False)
class ScoredRun:
    """The questions of a run, and its scores on them: of every best answer, and at the run's own threshold."""

    examples: Sequence[Example]
    best: QuestionScores
    own: QuestionScores
    null_odds: Mapping[str, float]
    task: str = SPAN
    by_question: ScoredRun | None = None  # the same with one answer per question, where questions have several contexts


def score_run(run: RunRecord, task: str, data: str | None, cache: ExampleCache) -> ScoredRun:
    """Score the answers of a run folder; with the task `answerability`, its decisions whether to answer."""
    return (_score_decisions if task == ANSWERABILITY else _score_answers)(run, data, cache)


def score_by_question(records: Sequence[RunRecord], examples: Sequence[Example], task: str) -> list[QuestionScores]:
    """Return the scores of the single answer that each question gets from all its contexts, at the runs' thresholds.

    The list is empty if no question has several contexts, or if a run has no answers by question.
    """
    file = runs.QUESTION_NULL_ODDS if task == ANSWERABILITY else runs.QUESTION_PREDICTIONS
    if not has_several_contexts(examples) or not all((record.folder / file).is_file() for record in records):
        return []
    questions, language = one_example_per_question(examples), language_of(examples)
    scores = []
    for record in records:
        if task == ANSWERABILITY:
            odds = read_json_object(record.folder / runs.QUESTION_NULL_ODDS)
            scores.append(_decisions(record, questions, odds))
        else:
            texts = read_json_object(record.folder / runs.QUESTION_PREDICTIONS)
            scores.append(score_questions(questions, texts, language=language))
    return scores


def _score_answers(run: RunRecord, data: str | None, cache: ExampleCache) -> ScoredRun:
    if not (run.folder / runs.NBEST).is_file():
        raise RunError(f"{run.folder}: expected {runs.NBEST} to score other thresholds, got no such file.")
    answered = read_answers(run.folder)
    examples = _examples(run, answered.texts, data, cache)
    language = language_of(examples)
    best = score_best_answers(examples, answered.predictions, language=language)
    null_odds = read_json_object(run.folder / runs.NULL_ODDS) or {
        id: prediction.null_odds for id, prediction in answered.predictions.items()
    }
    _check_null_odds(run, runs.NULL_ODDS, best.ids, null_odds)
    by_question = None
    texts = read_json_object(run.folder / runs.QUESTION_PREDICTIONS)
    if has_several_contexts(examples) and texts:
        questions = one_example_per_question(examples)
        merged = predictions_by_question(examples, answered.predictions, n_best=DecodingOptions().n_best_size)
        odds = read_json_object(run.folder / runs.QUESTION_NULL_ODDS)
        _check_null_odds(run, runs.QUESTION_NULL_ODDS, [question.id for question in questions], odds)
        by_question = ScoredRun(
            questions,
            score_best_answers(questions, merged, language=language),
            score_questions(questions, texts, language=language),
            odds,
        )
    own = score_questions(examples, answered.texts, language=language)
    return ScoredRun(examples, best, own, null_odds, by_question=by_question)


def _score_decisions(run: RunRecord, data: str | None, cache: ExampleCache) -> ScoredRun:
    """Score the decisions of a run whether to answer: answering is right wherever there is an answer."""
    null_odds = read_json_object(run.folder / runs.NULL_ODDS)
    examples = _examples(run, null_odds, data, cache)
    by_question = None
    odds = read_json_object(run.folder / runs.QUESTION_NULL_ODDS)
    if has_several_contexts(examples) and odds:
        questions = one_example_per_question(examples)
        own = _decisions(run, questions, odds)
        by_question = ScoredRun(questions, score_all_answered(questions), own, odds, ANSWERABILITY)
    own = run.decisions(examples)
    return ScoredRun(examples, score_all_answered(examples), own, null_odds, ANSWERABILITY, by_question)


def _decisions(run: RunRecord, questions: Sequence[Example], odds: Mapping[str, Any]) -> QuestionScores:
    _check_null_odds(run, runs.QUESTION_NULL_ODDS, [question.id for question in questions], odds)
    threshold = float(run.scores.get("threshold") or 0.0)
    withheld = np.array([odds[question.id] > threshold for question in questions], np.bool_)
    return score_all_answered(questions).withheld(withheld)


def _examples(run: RunRecord, answered: Mapping[str, Any], data: str | None, cache: ExampleCache) -> list[Example]:
    files = (data,) if data else run.data_files
    key = (*files, runs.data_record(files, answered)["ids_sha256"])
    if key not in cache:
        cache[key] = answered_examples(run, answered, data)
    return cache[key]


def _check_null_odds(run: RunRecord, file: str, ids: Sequence[str], null_odds: Mapping[str, Any]) -> None:
    if missing := [id for id in ids if not isinstance(null_odds.get(id), int | float)]:
        raise RunError(f"{run.folder / file}: expected a number for every question, got none for {missing[0]}.")
