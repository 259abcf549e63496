"""Analyse runs: what they get right and wrong, and where, from their folders and the data they were scored on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamella import runs
from lamella.data.examples import Example
from lamella.errors import DataError, MissingLibraryError, UsageError, counted, warn
from lamella.files import write_json, write_text
from lamella.inference.prediction_files import AnswerSet, read_answers
from lamella.scoring.metrics import (
    QuestionScores,
    answer_groups,
    language_of,
    score_questions,
    score_readers,
    summarise,
)
from lamella.study.analysis.confident_mistakes import (
    confident_decisions,
    confident_mistakes,
    mistakes_markdown,
    read_probabilities,
)
from lamella.study.analysis.groups import Grouping, count_tokens, grouped_scores, groupings
from lamella.study.analysis.layer_weights import learned_weights, mean_attention
from lamella.study.analysis.mistake_kinds import (
    TokenCounts,
    confusion,
    describe_questions,
    near_misses,
    only_right,
    second_best,
)
from lamella.study.compared_readers import f1_of_no_answer
from lamella.study.records import ANSWERABILITY, SPAN, RunRecord, read_examples, read_records

SAMPLE = 200


@dataclass(frozen=True)
class AnalysedRun:
    """A run with its answers to the analysed questions, and the score of each answer."""

    name: str
    folder: Path
    answered: AnswerSet | None  # None if the decisions to answer are analysed, and not texts
    scores: QuestionScores


@dataclass(frozen=True)
class Analysis:
    """The numbers (the content of `analysis.json`), and the questions and runs that they were computed from."""

    numbers: dict[str, Any]
    examples: Sequence[Example]
    runs: Sequence[AnalysedRun]


def analyse(names: Sequence[str], *, data: str | None = None, sample: int = SAMPLE) -> Analysis:
    """Analyse finished runs on the questions that all of them answered; a folder of several runs means all of them.

    Without `data`, the questions are read from the files that the runs record. Models with attention over the layers
    are run on a `sample` of the questions, 0 for none; no other model is run. If any run is a classifier of
    answerability, all are analysed by what all do: decide whether there is an answer.
    """
    selection = read_records(names, requires=runs.NBEST)
    files = [data] if data is not None else _common_data_files(selection.records)
    everything = read_examples(selection.records[0], data)
    decides = any(record.task == ANSWERABILITY for record in selection.records)
    answers = [None if decides else read_answers(record.folder) for record in selection.records]
    texts = [
        record.answers() if answered is None else answered.texts
        for record, answered in zip(selection.records, answers, strict=True)
    ]
    examples = [example for example in everything if all(example.id in of_run for of_run in texts)]
    if not examples:
        raise DataError(
            f"{', '.join(files)}: expected questions that all the runs answered, got none among "
            f"{counted(len(everything), 'question')}; pass the file that the runs were scored on with --data."
        )
    language = language_of(examples)
    if decides:
        scores = [
            record.decisions(examples)
            if record.task == ANSWERABILITY
            else score_questions(examples, of_run, language=language).on_answerability()
            for record, of_run in zip(selection.records, texts, strict=True)
        ]
    else:
        scores = score_readers(examples, texts, language=language)
    analysed = [
        AnalysedRun(record.name, record.folder, answered, run_scores)
        for record, answered, run_scores in zip(selection.records, answers, scores, strict=True)
    ]
    several = len(analysed) > 1
    tokens = count_tokens(examples, (run.folder for run in analysed))
    alone = only_right({run.name: run.scores.exact == 1 for run in analysed}, examples, tokens) if several else {}
    groups = groupings(examples, tokens)
    numbers = {
        "data": files,
        "questions": len(examples),
        "questions_left_out": len(everything) - len(examples),
        "language": language,
        "task": ANSWERABILITY if decides else SPAN,
        "runs_left_out": dict(selection.left_out),
        "runs": [
            {
                **_analyse_answers(run, examples, groups, tokens, language),
                "only_right": alone.get(run.name),
                **_analyse_layers(run, evenly_spaced(examples, sample)),
            }
            for run in analysed
        ],
    }
    return Analysis(numbers, examples, analysed)


def _analyse_layers(run: AnalysedRun, examples: Sequence[Example]) -> dict[str, Any]:
    """Return the weights of the layers that a head reads; none, with a warning, if there is no torch to read them."""
    try:
        return {
            "layer_weights": learned_weights(run.folder),
            "layer_attention": mean_attention(run.folder, examples),
        }
    except ModuleNotFoundError as error:  # the mixers are defined with torch
        if error.name != "torch":
            raise
        warn(f"{run.name}: its layer weights are left out: {MissingLibraryError('reading them', ['torch'])}.")
        return {"layer_weights": None, "layer_attention": None}


def write_analysis(folder: Path, analysis: Analysis) -> None:
    """Write `analysis.json` and the most confident mistakes into an open run folder."""
    write_json(folder / runs.ANALYSIS, analysis.numbers)
    mistakes = {
        run.name: confident_decisions(analysis.examples, run.scores, read_probabilities(run.folder / runs.NA_PROB))
        if run.answered is None
        else confident_mistakes(analysis.examples, run.scores, run.answered.texts, run.answered.predictions)
        for run in analysis.runs
    }
    write_text(folder / runs.MISTAKES, mistakes_markdown(mistakes))


def evenly_spaced(examples: Sequence[Example], count: int) -> list[Example]:
    """Return `count` examples at even distances from first to last; all of them if there are fewer."""
    if count >= len(examples):
        return list(examples)
    return [examples[index * len(examples) // count] for index in range(count)]


def _analyse_answers(
    run: AnalysedRun,
    examples: Sequence[Example],
    groups: Mapping[str, Grouping],
    tokens: TokenCounts | None,
    language: str,
) -> dict[str, Any]:
    """Return the numbers of a run that follow from its answers alone."""
    right = [example for example, exact in zip(examples, run.scores.exact, strict=True) if exact == 1]
    numbers: dict[str, Any] = {
        "run": run.name,
        "folder": str(run.folder),
        **(summarise(run.scores) if run.answered else _decision_scores(run.scores)),
        "confusion": confusion(run.scores),
        "groups": {name: grouped_scores(run.scores, grouping) for name, grouping in groups.items()},
        "right": {key: value for key, value in describe_questions(right, tokens).items() if key != "ids"},
    }
    if run.answered is None:  # a decision has no runner-up and no boundaries
        return numbers
    texts, predictions = run.answered.texts, run.answered.predictions
    return {
        **numbers,
        "second_best": second_best(examples, run.scores, texts, predictions, language=language),
        "near_misses": near_misses(examples, run.scores, texts, predictions),
    }


def _decision_scores(decisions: QuestionScores) -> dict[str, Any]:
    """Return the accuracy of decisions to answer, of all questions and by kind, and the F1 of "no answer"."""
    accuracy = {
        f"{prefix}answerability_accuracy": 100 * float(decisions.exact[chosen].mean())
        for prefix, chosen in answer_groups(decisions.answerable).items()
    }
    return {**accuracy, "answerability_f1": f1_of_no_answer(decisions), "total": len(decisions.ids)}


def _common_data_files(records: Sequence[RunRecord]) -> list[str]:
    """Return the files that all the runs were scored on; raise an error if they differ."""
    first, files = records[0], records[0].require_data_files()
    for record in records:
        if record.require_data_files() != files:
            raise UsageError(
                f"expected runs that were scored on the same data, got {', '.join(files)} for {first.folder} and "
                f"{', '.join(record.data_files)} for {record.folder}; choose the questions with --data."
            )
    return list(files)
