"""Run folders as records: what a run was scored on, its quality, its cost, and its score at every question."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamella import runs
from lamella.data.examples import Example
from lamella.errors import LamellaError, RunError, UnreadableError, UsageError
from lamella.files import read_json
from lamella.garbage import paused_garbage_collection
from lamella.inference.questions import read_questions
from lamella.scoring.metrics import QuestionScores, language_of, score_readers
from lamella.study.result_files import Result, read_result, result_files

SEEDS = (("learner", "seed"), ("training", "order_seed"))  # runs that differ in nothing else are one reader's


@dataclass(frozen=True)
class RunRecord:
    """A run, as its folder tells it; what the folder does not tell is empty."""

    name: str
    folder: Path
    state: str
    config: Mapping[str, Any]
    results: Mapping[str, Any]
    cost: Mapping[str, Any]
    data: tuple[str, ...]  # the files whose questions it was scored on, where that is recorded
    kept: Result | None = None  # of a result file, which then is what `folder` names

    @property
    def seeds(self) -> tuple[Any, ...]:
        return tuple(self.config.get(section, {}).get(option) for section, option in SEEDS)

    @property
    def options(self) -> dict[str, Any]:
        """All but the seeds."""
        return {
            section: {key: value for key, value in options.items() if (section, key) not in SEEDS}
            for section, options in self.config.items()
        }

    def scored_on(self) -> tuple[str, ...]:
        """The files, where they must be known."""
        if not self.data:
            raise UsageError(f"{self.folder}: does not tell which data it was scored on; give the file with --data.")
        return self.data

    def predictions(self) -> dict[str, str]:
        """The text that it gives to every question, "" for no answer; read anew at every call."""
        path = self.folder / runs.PREDICTIONS
        if not path.is_file():
            raise RunError(f"{path}: expected the answers of a run, to compare. They are not there.")
        found = read_object(path)
        if set(map(type, found.values())) - {str}:
            id, text = next((id, text) for id, text in found.items() if not isinstance(text, str))
            raise UnreadableError(f"{path}: expected a text for question {id}. Got {text!r}; it is damaged.")
        return found


@dataclass(frozen=True)
class Found:
    """The runs of some folders, and what was passed over there with the reason."""

    runs: tuple[RunRecord, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)


def read_runs(folders: Sequence[str | Path], *, unfinished: bool = False, needs: str | None = None) -> Found:
    """Read run folders; one that holds several runs stands for all that are finished in it and have the file `needs`.

    Result files are runs, too, and a folder with such files stands for them. With `unfinished`, those that have only
    begun are read as well.
    """
    found: dict[Path, Path] = {}
    left_out: dict[str, str] = {}
    for given in folders:
        folder = Path(os.path.expanduser(given))
        if files := result_files(folder):
            found |= {one.resolve(): one for one in files}
            continue
        for one in _runs_within(folder):
            state = runs.run_state(one)
            told = state == "finished" or (unfinished and state)
            if told and (needs is None or (one / needs).is_file()):
                found.setdefault(one.resolve(), one)
            elif one != folder:
                left_out[str(one)] = f"has no {needs}" if told else state or "not begun"
            elif not told:
                raise RunError(f"{folder}: expected a finished run. It is {state}.")
            else:
                silent = (folder / runs.NULL_ODDS).is_file() and not (folder / runs.PREDICTIONS).is_file()
                why = "it tells whether there is an answer, and no texts" if silent else "it was not scored"
                raise RunError(f"{folder}: has no {needs}; {why}.")
    if not found:
        wanted = "has begun" if unfinished else f"is finished{f' and has {needs}' if needs else ''}"
        raise RunError(f"{', '.join(map(str, folders))}: no run {wanted} there.")
    chosen = list(found.values())
    return Found(tuple(_read_run(one, name) for one, name in zip(chosen, _names(chosen), strict=True)), left_out)


def read_scored(records: Sequence[RunRecord], data: str | None = None) -> tuple[list[Example], list[QuestionScores]]:
    """The questions that all of the runs answered, and every run's score at each.

    Runs that answered other questions than the first one are refused: their scores cannot be laid side by side.
    """
    first, answers = records[0], records[0].predictions()
    examples = questions_of(first, answers, data)
    if data is None:
        _refuse_other_data(first, examples, records)

    def each() -> Iterator[Mapping[str, str]]:
        for record in records:
            given = record.predictions()
            _refuse_other_questions(first, answers, record, given)
            yield given

    with paused_garbage_collection():
        return examples, score_readers(examples, each(), language=language_of(examples))


def read_data(record: RunRecord, data: str | None = None) -> list[Example]:
    """The questions of `data`, or else of the files that a run says it was scored on."""
    if data is not None:
        return list(read_questions(data, labelled=True))
    try:
        return [example for file in record.scored_on() for example in read_questions(file, labelled=True)]
    except UnreadableError as error:
        raise UnreadableError(
            f"{error} It is what {record.folder} was scored on; where it has moved, give it with --data."
        ) from None


def recorded_data(folder: Path) -> tuple[str, ...]:
    """The files whose questions a run was scored on: as it says itself, else the dev data that it trained with."""
    for file, key in ((runs.RUN, "files"), (runs.CONFIG, "dev")):
        try:
            if files := (read_object(folder / file).get("data") or {}).get(key):
                return tuple(str(one) for one in files)
        except (AttributeError, TypeError):
            raise UnreadableError(f"{folder / file}: expected the record of a run; it is damaged.") from None
    return ()


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where a run lacks the file."""
    if not path.is_file():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise UnreadableError(f"{path}: expected one JSON object. Found {type(content).__name__}; it is damaged.")
    return content


def is_number(value: object) -> bool:
    """Whether something that was read is a number to reckon with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _runs_within(folder: Path) -> list[Path]:
    """The single runs that a folder stands for: itself, those its record names, or those that simply lie in it."""
    kind = runs.kind_of_run(folder)
    if kind is not None and kind[0] == "analyse":
        raise RunError(f"{folder}: expected a run. It holds an analysis of some.")
    if kind is not None and not kind[1]:
        return [folder]
    if kind is not None:
        inside = [folder / name for name in kind[1]]
    else:
        there = list(folder.iterdir()) if folder.is_dir() else []
        kinds = {one: runs.kind_of_run(one) for one in there}
        inside = sorted(
            (one for one, kind in kinds.items() if kind and kind[0] != "analyse"), key=lambda one: _natural(one.name)
        )
    if not inside:
        raise RunError(f"{folder}: expected a run folder, with {runs.RUN}, or a folder of them. It is not there.")
    return [run for one in inside for run in (_runs_within(one) if _is_run(one) else [one])]


def _is_run(folder: Path) -> bool:
    return (folder / runs.RUN).is_file()


def _natural(name: str) -> list[tuple[int, str]]:
    """`run-10` comes after `run-9`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def _read_run(folder: Path, name: str) -> RunRecord:
    if folder.is_file():
        kept = read_result(folder)
        data = tuple(str(one["name"]) for one in kept.content["dev"]["files"])
        return RunRecord(name, folder, "finished", kept.config(), kept.results(), kept.content["cost"], data, kept)
    config, results, cost = (read_object(folder / file) for file in (runs.CONFIG, runs.RESULTS, runs.COST))
    if not all(isinstance(section, dict) for section in config.values()):
        raise UnreadableError(f"{folder / runs.CONFIG}: expected the options of a run, by section; it is damaged.")
    return RunRecord(name, folder, str(runs.run_state(folder)), config, results, cost, recorded_data(folder))


def _names(folders: Sequence[Path]) -> list[str]:
    """The last names of the folders, of files without suffix; with their parents' where two would be the same."""
    parts = [Path(os.path.abspath(one.with_suffix("") if one.is_file() else one)).parts for one in folders]
    length = 1
    while len({one[-length:] for one in parts}) < len(parts):
        length += 1
    return ["/".join(one[-length:]) for one in parts]


def questions_of(record: RunRecord, answers: Mapping[str, str], data: str | None) -> list[Example]:
    """Those of the data that the run answered: it may have been limited to the first of them."""
    files, examples = (data,) if data else record.data, read_data(record, data)
    there = [example for example in examples if example.id in answers]
    if len(there) < len(answers):
        missing = answers.keys() - {example.id for example in there}
        raise RunError(
            f"{record.folder}: answers {len(missing)} questions that are not in {', '.join(files)}, such as "
            f"{min(missing)}; give the file that it was scored on with --data."
        )
    if not there:
        raise RunError(f"{record.folder}: answers no question.")
    return there


def _refuse_other_data(first: RunRecord, examples: Sequence[Example], records: Sequence[RunRecord]) -> None:
    """Questions of one id may stand in two files with different contexts or answers. A file that is not there now says
    nothing against its run.
    """
    ours = {example.id: _content(example) for example in examples}
    for files, record in {record.data: record for record in reversed(records)}.items():
        if not files or files == first.data:
            continue
        try:
            theirs = read_data(record)
        except LamellaError:
            continue
        for example in theirs:
            if ours.get(example.id, _content(example)) != _content(example):
                raise RunError(
                    f"{record.folder}: was scored on {', '.join(files)}. There {example.id} is another question than "
                    f"in {', '.join(first.data)}, as {first.folder} has it; say with --data which to take."
                )


def _content(example: Example) -> tuple[str, str, list[str]]:
    return example.question, example.context.text, [answer.text for answer in example.answers]


def _refuse_other_questions(
    first: RunRecord, answers: Mapping[str, str], other: RunRecord, given: Mapping[str, str]
) -> None:
    if answers.keys() == given.keys():
        return
    parts = []
    for one, ids in ((first, answers.keys() - given.keys()), (other, given.keys() - answers.keys())):
        if ids:
            some = ", ".join(sorted(ids)[:3]) + (", …" if len(ids) > 3 else "")
            parts.append(f"only {one.name} answers {len(ids)} of them ({some})")
    raise RunError(
        f"{other.folder}: expected the questions of {first.folder}. They differ: {'; '.join(parts)}; "
        "score both on the same data with: lamella evaluate DATA --model RUN --out OUT"
    )
