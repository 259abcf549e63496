"""Analysis of runs: what they get right and wrong, and where; from their folders and the data they were scored on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamella import runs
from lamella.data.examples import Example
from lamella.errors import DataError, UsageError
from lamella.files import write_json, write_text
from lamella.inference.prediction_files import AnswerSet, read_answers
from lamella.scoring.metrics import QuestionScores, language_of, score_readers, summarise
from lamella.study.analysis.confident_mistakes import confident_mistakes, mistakes_page
from lamella.study.analysis.groups import grouped_scores, groupings
from lamella.study.analysis.layer_weights import learned_weights, mean_attention
from lamella.study.analysis.mistake_kinds import confusion, described, near_misses, only_right, second_best
from lamella.study.records import RunRecord, read_data, read_runs

SAMPLE = 200


@dataclass(frozen=True)
class AnalysedRun:
    """A run folder, opened: its answers to the questions analysed, and how each of them scores."""

    name: str
    folder: Path
    answered: AnswerSet
    scores: QuestionScores


@dataclass(frozen=True)
class Analysis:
    """The numbers (what `analysis.json` holds), and what they were made of."""

    numbers: dict[str, Any]
    examples: Sequence[Example]
    runs: Sequence[AnalysedRun]


def analyse(names: Sequence[str], *, data: str | None = None, sample: int = SAMPLE) -> Analysis:
    """Analyse finished runs on the questions that all of them answered; a folder of several runs means all of them.

    Without `data` the questions are those of the files that the runs say they were scored on. Models whose attention
    over the layers is to be seen are run on a `sample` of them, 0 for none; nothing else is run.
    """
    found = read_runs(names, needs=runs.NBEST)
    files = [data] if data is not None else _same_data(found.runs)
    everything = read_data(found.runs[0], data)
    answers = [read_answers(record.folder) for record in found.runs]
    examples = [one for one in everything if all(one.id in answered.texts for answered in answers)]
    if not examples:
        raise DataError(
            f"{', '.join(files)}: none of its {len(everything)} questions is answered by all the runs; "
            "pass the file that they were scored on with --data."
        )
    language = language_of(examples)
    scores = score_readers(examples, [answered.texts for answered in answers], language=language)
    opened = [
        AnalysedRun(record.name, record.folder, answered, scored)
        for record, answered, scored in zip(found.runs, answers, scores, strict=True)
    ]
    alone = only_right({run.name: run.scores.exact == 1 for run in opened}, examples) if len(opened) > 1 else {}
    groups = groupings(examples)
    of_runs = []
    for run in opened:
        texts, predictions = run.answered.texts, run.answered.predictions
        right = [one for one, exact in zip(examples, run.scores.exact, strict=True) if exact == 1]
        of_runs.append(
            {
                "run": run.name,
                "folder": str(run.folder),
                **summarise(run.scores),
                "confusion": confusion(run.scores),
                "second_best": second_best(examples, run.scores, texts, predictions, language=language),
                "groups": {name: grouped_scores(run.scores, grouping) for name, grouping in groups.items()},
                "right": {key: value for key, value in described(right).items() if key != "ids"},
                "only_right": alone.get(run.name),
                "near_misses": near_misses(examples, run.scores, texts, predictions),
                "layer_weights": learned_weights(run.folder),
                "layer_attention": mean_attention(run.folder, evenly_spaced(examples, sample)),
            }
        )
    numbers = {
        "data": files,
        "questions": len(examples),
        "questions_left_out": len(everything) - len(examples),
        "language": language,
        "runs_left_out": dict(found.left_out),
        "runs": of_runs,
    }
    return Analysis(numbers, examples, opened)


def write_analysis(folder: Path, analysis: Analysis) -> None:
    """Write what was found into an open run folder."""
    write_json(folder / runs.ANALYSIS, analysis.numbers)
    mistakes = {
        run.name: confident_mistakes(analysis.examples, run.scores, run.answered.texts, run.answered.predictions)
        for run in analysis.runs
    }
    write_text(folder / runs.MISTAKES, mistakes_page(mistakes))


def evenly_spaced(examples: Sequence[Example], count: int) -> list[Example]:
    """Return `count` examples at even distances from first to last; all of them if there are fewer."""
    if count >= len(examples):
        return list(examples)
    return [examples[index * len(examples) // count] for index in range(count)]


def _same_data(records: Sequence[RunRecord]) -> list[str]:
    """The files that the runs were scored on, as their folders tell it; they must agree."""
    first, files = records[0], records[0].scored_on()
    for other in records:
        if other.scored_on() != files:
            raise UsageError(
                f"expected runs that were scored on the same data. {first.folder} was on {', '.join(files)}, "
                f"{other.folder} on {', '.join(other.data)}; say with --data which questions to analyse."
            )
    return list(files)
