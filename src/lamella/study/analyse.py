"""Analysis of runs: what they get right and wrong, and where; from their folders and the data they were scored on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamella import runs
from lamella.data.examples import Example
from lamella.errors import DataError, RunError, UsageError
from lamella.inference.evaluate import language_of, read_questions
from lamella.inference.members import Answered, read_answered, runs_in, short_names
from lamella.inference.metrics import QuestionScores, score_questions, summarise
from lamella.study.answered import confusion, described, near_misses, only_right, second_best
from lamella.study.groups import grouped_scores, groupings
from lamella.study.layers import learned_weights, mean_attention, spread
from lamella.study.mistakes import confident_mistakes, mistakes_page
from lamella.study.runs import recorded_data

SAMPLE = 200


@dataclass(frozen=True)
class AnalysedRun:
    """A run folder, opened: its answers to the questions analysed, and how each of them scores."""

    name: str
    folder: Path
    answered: Answered
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
    names, left_out = _finished(names)
    folders = [_checked(name) for name in names]
    files = [data] if data is not None else _recorded_data(folders)
    everything = [example for file in files for example in read_questions(file, labelled=True)]
    answers = [read_answered(folder) for folder in folders]
    examples = [one for one in everything if all(one.id in answered.texts for answered in answers)]
    if not examples:
        raise DataError(
            f"{', '.join(files)}: none of its {len(everything)} questions is answered by all the runs; "
            "pass the file that they were scored on with --data."
        )
    language = language_of(examples)
    opened = [
        AnalysedRun(name, folder, answered, score_questions(examples, answered.texts, language=language))
        for name, folder, answered in zip(short_names(names), folders, answers, strict=True)
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
                "layer_attention": mean_attention(run.folder, spread(examples, sample)),
            }
        )
    numbers = {
        "data": files,
        "questions": len(examples),
        "questions_left_out": len(everything) - len(examples),
        "language": language,
        "runs_left_out": left_out,
        "runs": of_runs,
    }
    return Analysis(numbers, examples, opened)


def write_analysis(folder: Path, analysis: Analysis) -> None:
    """Write what was found into an open run folder."""
    runs.write_json(folder / runs.ANALYSIS, analysis.numbers)
    mistakes = {
        run.name: confident_mistakes(analysis.examples, run.scores, run.answered.texts, run.answered.predictions)
        for run in analysis.runs
    }
    runs.write_text(folder / runs.MISTAKES, mistakes_page(mistakes))


def _finished(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The runs that were named, one by one, and the state of those inside a folder of several that are not finished."""
    found: dict[str, None] = {}
    left_out = {}
    for name in names:
        within = runs_in(name)
        for one in within:
            state = runs.run_state(Path(one)) if Path(one).is_dir() else "not there"
            if within == [name] or state == "finished":
                found[one] = None
            else:
                left_out[one] = str(state)
    if not found:
        raise RunError(f"{', '.join(names)}: no run is finished there.")
    return list(found), left_out


def _checked(name: str) -> Path:
    """The folder of a finished run that has answers."""
    folder = Path(os.path.expanduser(name))
    state = runs.run_state(folder) if folder.is_dir() else None
    if state is None and not (folder / runs.NBEST).is_file():
        found = "a folder without them" if folder.is_dir() else "nothing there"
        raise UsageError(f"{name}: expected a run folder with predictions. Found {found}.")
    if state not in ("finished", None):
        raise RunError(f"{name}: expected a run that is finished. Found one that is {state}.")
    if not (folder / runs.NBEST).is_file():
        raise UsageError(f"{name}: has no {runs.NBEST}; only runs that were scored and give texts can be analysed.")
    return folder


def _recorded_data(folders: Sequence[Path]) -> list[str]:
    """The files that the runs were scored on, as their folders tell it; they must agree."""
    found: dict[tuple[str, ...], Path] = {}
    for folder in folders:
        files = recorded_data(folder)
        if not files:
            raise UsageError(f"{folder}: does not say which data it was scored on; pass that file with --data.")
        found.setdefault(files, folder)
    if len(found) > 1:
        (one, first), (other, second), *_ = found.items()
        raise UsageError(
            f"expected runs that were scored on the same data. {first} was on {', '.join(one)}, {second} on "
            f"{', '.join(other)}; say with --data which questions to analyse."
        )
    return list(next(iter(found)))
