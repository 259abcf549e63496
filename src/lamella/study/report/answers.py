"""The answers of runs compared with the true ones: outcomes, groups of questions, calibration, sample questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lamella import runs
from lamella.data.examples import Example
from lamella.errors import LamellaError, UsageError
from lamella.inference.prediction_files import HAS_ANSWER
from lamella.inference.questions import read_questions
from lamella.scoring.metrics import QuestionScores, language_of, score_questions, summarise
from lamella.scoring.threshold import expected_calibration_error, groups_by_probability, mean_outcomes
from lamella.study.analysis.confident_mistakes import read_probabilities
from lamella.study.analysis.groups import Grouping, count_tokens, grouped_scores, groupings
from lamella.study.analysis.mistake_kinds import confusion
from lamella.study.records import ANSWERABILITY, RunRecord, is_number, read_json_object
from lamella.study.report.sample_layers import layers_of_samples
from lamella.study.report.values import SHOWN_SCORES, ReportValues, rounded, without_folders

PR_POINTS = 60
RELIABILITY_GROUPS = 10
SAMPLES = 24  # questions per data set
CONTEXT_CHARACTERS = 1500  # of a sample; a longer context is cut around the answers
OUTCOMES = {  # the labels in the report for the counts of `confusion`
    "right_has_answer": "answered, exactly right",
    "answered_wrongly": "answered, not exactly right",
    "abstained_wrongly": "abstained although there is an answer",
    "right_no_answer": "abstained correctly",
    "answered_the_unanswerable": "answered an unanswerable question",
}
DECISION_OUTCOMES = {  # of a classifier, which answers nothing
    "right_has_answer": "has an answer, decided correctly",
    "abstained_wrongly": "has an answer, decided wrongly",
    "right_no_answer": "has no answer, decided correctly",
    "answered_the_unanswerable": "has no answer, decided wrongly",
}

Bools = NDArray[np.bool_]


def add_answers(
    shown: Sequence[ReportValues],
    records: Sequence[RunRecord],
    data: str | None,
    notes: list[str],
    *,
    layers: bool = False,
) -> list[list[ReportValues]]:
    """Add the analysis of its answers to every run; return the sample questions of each data set.

    With `layers`, models that weigh layers are run on their sample answers.
    """
    folders = [run.folder for run in records if run.folder.is_dir()]
    data_sets: dict[str, _DataSet | None] = {}
    scored: dict[str, list[tuple[ReportValues, _ScoredAnswers]]] = {}
    for values, run in zip(shown, records, strict=True):
        names = (data,) if data else run.data_files
        key = " + ".join(names)
        values["data"], values["data_set"] = " + ".join(map(without_folders, names)), key
        decides = run.task == ANSWERABILITY and run.folder.is_dir() and bool(run.scores)
        if not decides and not (run.folder / runs.PREDICTIONS).is_file():
            continue
        predictions = run.answers()
        if key not in data_sets:
            data_sets[key] = _read_data_set(names, data is not None, folders, notes)
        data_set = data_sets[key]
        if data_set is None:
            continue
        # All questions, or the first ones with `data.max_eval_samples`.
        examples = [example for example in data_set.examples if example.id in predictions]
        if not examples and data:
            raise UsageError(
                f"{run.folder}: expected answers to questions of --data {data}, got none; "
                "pass the file that the run was scored on."
            )
        if not examples:
            notes.append(f"{values['name']} answers no question of {values['data']}: the file has changed.")
            continue
        if decides:
            scores = run.decisions(examples)
            texts = (HAS_ANSWER if answered else "" for answered in scores.answered)
            predictions = dict(zip(scores.ids, texts, strict=True))
        else:
            scores = score_questions(examples, predictions, language=data_set.language)
        answers = _ScoredAnswers(run.folder, examples, scores, predictions)
        _add_analysis(values, run.folder, answers, data_set)
        scored.setdefault(key, []).append((values, answers))
    numbers = {key: number for number, key in enumerate(scored)}
    for values in shown:
        values["data_set"] = numbers.get(values["data_set"])
    return [_sample_questions(runs_of_set, layers) for runs_of_set in scored.values()]


@dataclass(frozen=True)
class _DataSet:
    """A data set, and what all the runs on it share."""

    examples: Sequence[Example]
    language: str
    row_of: Mapping[str, int]
    groupings: Mapping[str, Grouping]

    @classmethod
    def of(cls, examples: Sequence[Example], folders: Sequence[Path]) -> _DataSet:
        """Group the questions of a data set, which runs in `folders` answered."""
        answerable = Grouping(
            ["has an answer", "has no answer"], np.array([int(not example.answerable) for example in examples])
        )
        return cls(
            examples,
            language_of(examples),
            {example.id: row for row, example in enumerate(examples)},
            {"answerable": answerable, **groupings(examples, count_tokens(examples, folders))},
        )


@dataclass(frozen=True)
class _ScoredAnswers:
    """The answers of a run, and the score of each."""

    folder: Path
    examples: Sequence[Example]
    scores: QuestionScores
    predictions: Mapping[str, str]


def _read_data_set(
    names: Sequence[str], is_required: bool, folders: Sequence[Path], notes: list[str]
) -> _DataSet | None:
    if not names:
        notes.append("The answers of runs that do not record their data are not analysed; pass the file with --data.")
        return None
    try:
        return _DataSet.of([example for name in names for example in read_questions(name, labelled=True)], folders)
    except LamellaError:
        if is_required:
            raise
        files = " + ".join(map(without_folders, names))
        notes.append(f"{files} cannot be read, so the answers are not analysed; pass the file with --data.")
        return None


def _add_analysis(values: ReportValues, folder: Path, answers: _ScoredAnswers, data_set: _DataSet) -> None:
    ids, decides = answers.scores.ids, values["task"] == ANSWERABILITY
    odds, probabilities = (
        {id: content[id] for id in ids if is_number(content.get(id))}
        for content in (read_json_object(folder / runs.NULL_ODDS), read_probabilities(folder / runs.NA_PROB))
    )
    no_answer_scores = odds or probabilities
    if not values["scores"]:
        values["scores"] = {
            key: rounded(value) for key, value in summarise(answers.scores).items() if key in SHOWN_SCORES
        }
    values["questions"] = len(ids)
    outcomes, counts = DECISION_OUTCOMES if decides else OUTCOMES, confusion(answers.scores)
    values["confusion"] = {title: counts[name] for name, title in outcomes.items()}
    values["groups"] = _groups(data_set, answers.scores)
    if len(no_answer_scores) == len(ids) and not decides:
        values["precision_recall"] = precision_recall(answers.scores, np.array([no_answer_scores[id] for id in ids]))
    if len(probabilities) == len(ids):
        values["reliability"] = reliability(np.array([probabilities[id] for id in ids]), ~answers.scores.answerable)


def precision_recall(scores: QuestionScores, no_answer_scores: NDArray[np.float64]) -> dict[str, list[float]] | None:
    """Return precision and recall as more questions are answered, most confident first; an answer counts by its F1."""
    total = int(scores.answerable.sum())
    if not total:
        return None
    order = np.argsort(no_answer_scores, kind="stable")
    key, credit = no_answer_scores[order], np.cumsum((scores.f1 * scores.answerable)[order])
    ends = np.append(np.flatnonzero(key[1:] != key[:-1]), len(key) - 1)  # no threshold lies between equal scores
    shown = ends[np.unique(np.linspace(0, len(ends) - 1, PR_POINTS).round().astype(int))]
    return {
        "recall": [rounded(100 * credit[end] / total) for end in shown],
        "precision": [rounded(100 * credit[end] / (end + 1)) for end in shown],
    }


def reliability(probability: NDArray[np.float64], unanswerable: Bools) -> ReportValues:
    """Return predicted against observed shares of "no answer", in groups of equal size by rising probability.

    As in the calibration error, questions with the same probability share their mean outcome.
    """
    parts, outcomes = groups_by_probability(probability, RELIABILITY_GROUPS), mean_outcomes(probability, unanswerable)
    return {
        "predicted": [rounded(100 * float(probability[part].mean())) for part in parts],
        "observed": [rounded(100 * float(outcomes[part].mean())) for part in parts],
        "questions": [len(part) for part in parts],
        "ece": rounded(100 * expected_calibration_error(probability, unanswerable)),
    }


def _groups(data_set: _DataSet, scores: QuestionScores) -> dict[str, list[ReportValues]]:
    """Return the scores in every group of questions; the groups are made on the whole data set."""
    rows = np.array([data_set.row_of[id] for id in scores.ids])
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
        for name, grouping in data_set.groupings.items()
    }


def _sample_questions(runs_of_set: Sequence[tuple[ReportValues, _ScoredAnswers]], layers: bool) -> list[ReportValues]:
    """Return questions from easy to hard, and add the answer of every run to its values."""
    f1_of_runs: dict[str, list[float]] = {}
    examples: dict[str, Example] = {}
    for _, answers in runs_of_set:
        for example, f1 in zip(answers.examples, answers.scores.f1, strict=True):
            f1_of_runs.setdefault(example.id, []).append(float(f1))
            examples[example.id] = example
    ranked = sorted(f1_of_runs, key=lambda id: -float(np.mean(f1_of_runs[id])))
    chosen = [ranked[round(index)] for index in np.linspace(0, len(ranked) - 1, min(SAMPLES, len(ranked)))]
    contexts = {
        id: _cut_context(examples[id], [answers.predictions.get(id, "") for _, answers in runs_of_set]) for id in chosen
    }
    for values, answers in runs_of_set:
        row_of = {id: row for row, id in enumerate(answers.scores.ids)}
        values["answers"] = [
            {"text": answers.predictions[id], "f1": rounded(100 * float(answers.scores.f1[row_of[id]]))}
            if id in row_of
            else None
            for id in chosen
        ]
        if layers and values["task"] != ANSWERABILITY:
            samples = [(examples[id], answers.predictions.get(id, "")) for id in chosen]
            for answer, read in zip(values["answers"], layers_of_samples(answers.folder, samples), strict=True):
                if answer is not None and read is not None:
                    answer["layers"] = read
    return [{"question": examples[id].question, "title": examples[id].context.title, **contexts[id]} for id in chosen]


def _cut_context(example: Example, predicted: Sequence[str]) -> ReportValues:
    """Return the context, cut around the first true answer or else a predicted one, with its true answers."""
    text = example.context.text
    begin = example.answers[0].begin_char if example.answers else max(0, *(text.find(span) for span in predicted), 0)
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
