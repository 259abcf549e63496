"""The answers of runs against the truth: outcomes, groups of questions, calibration, sample questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lamella import runs
from lamella.data.examples import Example
from lamella.errors import LamellaError, UsageError
from lamella.inference.questions import read_questions
from lamella.scoring.metrics import QuestionScores, language_of, score_questions, summarise
from lamella.scoring.threshold import expected_calibration_error
from lamella.study.analysis.groups import Grouping, grouped_scores, groupings
from lamella.study.analysis.mistake_kinds import confusion
from lamella.study.records import RunRecord, is_number, read_object
from lamella.study.report.values import SHOWN_SCORES, Record, rounded, without_folders

PR_POINTS = 60
RELIABILITY_GROUPS = 10
SAMPLES = 24  # questions of a data set
CONTEXT_CHARACTERS = 1500  # of a sample; a longer context is cut around the answers
OUTCOMES = {  # as the page calls what `confusion` counts
    "right_has_answer": "answered, exactly right",
    "answered_wrongly": "answered, not exactly right",
    "abstained_wrongly": "abstained though there is an answer",
    "right_no_answer": "abstained rightly",
    "answered_the_unanswerable": "answered the unanswerable",
}

Bools = NDArray[np.bool_]


def add_answers(
    records: Sequence[Record], found: Sequence[RunRecord], data: str | None, notes: list[str]
) -> list[list[Record]]:
    """Compare the runs' predictions with the truth; gives the sample questions of each data set."""
    sets: dict[str, _Questions | None] = {}
    scored: dict[str, list[tuple[Record, _Scored]]] = {}
    for record, run in zip(records, found, strict=True):
        names = (data,) if data else run.data
        key = " + ".join(names)
        record["data"], record["data_set"] = " + ".join(map(without_folders, names)), key
        if not (run.folder / runs.PREDICTIONS).is_file():
            continue
        predictions = run.predictions()
        if key not in sets:
            sets[key] = _questions(names, data is not None, notes)
        known = sets[key]
        if known is None:
            continue
        # All of them, or the first few of `data.max_eval_samples`.
        examples = [example for example in known.examples if example.id in predictions]
        if not examples and data:
            raise UsageError(f"{run.folder}: answers no question of --data {data}; name the file it was scored on.")
        if not examples:
            notes.append(f"{record['name']} answers no question of {record['data']}: the file is not what it was.")
            continue
        answers = _Scored(examples, score_questions(examples, predictions, language=known.language), predictions)
        _add_analysis(record, run.folder, answers, known)
        scored.setdefault(key, []).append((record, answers))
    numbers = {key: number for number, key in enumerate(scored)}
    for record in records:
        record["data_set"] = numbers.get(record["data_set"])
    return [_samples(of_set) for of_set in scored.values()]


@dataclass(frozen=True)
class _Questions:
    """A data set, and what is the same for all the runs on it."""

    examples: Sequence[Example]
    language: str
    row_of: Mapping[str, int]
    groupings: Mapping[str, Grouping]

    @classmethod
    def of(cls, examples: Sequence[Example]) -> _Questions:
        answerable = Grouping(["has an answer", "has none"], np.array([int(not one.answerable) for one in examples]))
        return cls(
            examples,
            language_of(examples),
            {example.id: row for row, example in enumerate(examples)},
            {"answerable": answerable, **groupings(examples)},
        )


@dataclass(frozen=True)
class _Scored:
    """What a run said, and how good that is."""

    examples: Sequence[Example]
    scores: QuestionScores
    predictions: Mapping[str, str]


def _questions(names: Sequence[str], asked_for: bool, notes: list[str]) -> _Questions | None:
    if not names:
        notes.append("Runs that do not say what data they were scored on are not analysed: give it as --data.")
        return None
    try:
        return _Questions.of([example for name in names for example in read_questions(name, labelled=True)])
    except LamellaError:
        if asked_for:
            raise
        told = " + ".join(map(without_folders, names))
        notes.append(f"The questions of {told} cannot be read here, so no answers are analysed: give them as --data.")
        return None


def _add_analysis(record: Record, folder: Path, found: _Scored, known: _Questions) -> None:
    odds, probability = read_object(folder / runs.NULL_ODDS), read_object(folder / runs.NA_PROB)
    ids = found.scores.ids
    odds, probability = ({id: one[id] for id in ids if is_number(one.get(id))} for one in (odds, probability))
    na_scores = odds or probability
    if not record["scores"]:
        record["scores"] = {
            key: rounded(value) for key, value in summarise(found.scores).items() if key in SHOWN_SCORES
        }
    record["questions"] = len(ids)
    record["confusion"] = {OUTCOMES[name]: count for name, count in confusion(found.scores).items()}
    record["groups"] = _groups(known, found.scores)
    if len(na_scores) == len(ids):
        record["precision_recall"] = precision_recall(found.scores, np.array([na_scores[id] for id in ids]))
    if len(probability) == len(ids):
        record["reliability"] = reliability(np.array([probability[id] for id in ids]), ~found.scores.answerable)


def precision_recall(scores: QuestionScores, na: NDArray[np.float64]) -> dict[str, list[float]] | None:
    """Precision and recall when questions are answered from the lowest na score up, an answer counting by its F1."""
    total = int(scores.answerable.sum())
    if not total:
        return None
    order = np.argsort(na, kind="stable")
    key, found = na[order], np.cumsum((scores.f1 * scores.answerable)[order])
    ends = np.append(np.flatnonzero(key[1:] != key[:-1]), len(key) - 1)  # no threshold lies between equal scores
    shown = ends[np.unique(np.linspace(0, len(ends) - 1, PR_POINTS).round().astype(int))]
    return {
        "recall": [rounded(100 * found[end] / total) for end in shown],
        "precision": [rounded(100 * found[end] / (end + 1)) for end in shown],
    }


def reliability(probability: NDArray[np.float64], outcome: Bools) -> Record:
    """What was said against what was so, in groups of equal size by rising probability of no answer."""
    order = np.argsort(probability, kind="stable")
    parts = np.array_split(order, min(RELIABILITY_GROUPS, len(order)))
    return {
        "said": [rounded(100 * float(probability[part].mean())) for part in parts],
        "so": [rounded(100 * float(outcome[part].mean())) for part in parts],
        "questions": [len(part) for part in parts],
        "ece": rounded(100 * expected_calibration_error(probability, outcome)),
    }


def _groups(known: _Questions, scores: QuestionScores) -> dict[str, list[Record]]:
    """The scores of the questions of a kind, in every grouping; the kinds are those of the whole data set."""
    rows = np.array([known.row_of[id] for id in scores.ids])
    return {
        name.replace("_", " "): [
            {
                "group": row["group"],
                "questions": row["count"],
                "exact": rounded(row["exact"]),
                "f1": rounded(row["f1"]),
                "answered": rounded(100 * row["answered_share"]),
            }
            for row in grouped_scores(scores, Grouping(grouping.names, grouping.group[rows]))
        ]
        for name, grouping in known.groupings.items()
    }


def _samples(of_set: Sequence[tuple[Record, _Scored]]) -> list[Record]:
    """Questions evenly from those that every run gets right to those that none does, with every run's answer."""
    marks: dict[str, list[float]] = {}
    examples: dict[str, Example] = {}
    for _, found in of_set:
        for example, f1 in zip(found.examples, found.scores.f1, strict=True):
            marks.setdefault(example.id, []).append(float(f1))
            examples[example.id] = example
    ranked = sorted(marks, key=lambda id: -float(np.mean(marks[id])))
    chosen = [ranked[round(place)] for place in np.linspace(0, len(ranked) - 1, min(SAMPLES, len(ranked)))]
    cut = {id: _cut_context(examples[id], [found.predictions.get(id, "") for _, found in of_set]) for id in chosen}
    for record, found in of_set:
        row_of = {id: row for row, id in enumerate(found.scores.ids)}
        record["answers"] = [
            {"text": found.predictions[id], "f1": rounded(100 * float(found.scores.f1[row_of[id]]))}
            if id in row_of
            else None
            for id in chosen
        ]
    return [{"question": examples[id].question, "title": examples[id].context.title, **cut[id]} for id in chosen]


def _cut_context(example: Example, answers: Sequence[str]) -> Record:
    """A context, or the part of it around the first true answer (else a predicted one), and its true answers there."""
    text = example.context.text
    begin = example.answers[0].begin_char if example.answers else max(0, *(text.find(one) for one in answers), 0)
    low = max(0, min(begin - CONTEXT_CHARACTERS // 2, len(text) - CONTEXT_CHARACTERS))
    high = min(len(text), low + CONTEXT_CHARACTERS)
    golds = {answer.text for answer in example.answers}
    spans = {
        (answer.begin_char - low, answer.end_char - low)
        for answer in example.answers
        if low <= answer.begin_char and answer.end_char <= high and text[answer.begin_char : answer.end_char] in golds
    }
    return {
        "context": text[low:high],
        "cut": [low > 0, high < len(text)],
        "golds": sorted(golds),
        "spans": sorted(spans),
    }
