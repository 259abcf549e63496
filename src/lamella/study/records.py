"""Run folders as records: the options, scores, cost and answers of a run, read from its files."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamella import runs
from lamella.data.examples import Example
from lamella.errors import LamellaError, RunError, UnreadableError, UsageError, counted, shorten
from lamella.files import read_json
from lamella.garbage import paused_garbage_collection
from lamella.inference.questions import read_questions
from lamella.scoring.metrics import QuestionScores, language_of, score_all_answered, score_readers
from lamella.study.reader_options import SEED_OPTIONS
from lamella.study.result_files import Result, read_result, result_files

SPAN, ANSWERABILITY = "span", "answerability"  # what a run predicts: answer texts, or whether there is an answer


class TaskScore(NamedTuple):
    """The score by which runs of a task are compared."""

    key: str  # in eval_results.json
    title: str  # in a table
    unit: str  # of a difference, in a sentence
    titles: str  # of all scores that a table shows


TASK_SCORES = {
    SPAN: TaskScore("f1", "F1", "F1", "EM and F1"),
    ANSWERABILITY: TaskScore("answerability_accuracy", "accuracy", "points of accuracy", "accuracy"),
}
DEFAULT_METRICS = {SPAN: "f1", ANSWERABILITY: "answerability_f1"}  # of runs whose `training.metric` was stored as null
OPTION_TYPES: dict[tuple[str, str], tuple[type, ...]] = {  # of the options that runs are grouped by
    ("learner", "seed"): (int,),
    ("training", "order_seed"): (int, type(None)),
    ("learner", "fraction"): (float, int),
    ("training", "metric"): (str, type(None)),
}


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder describes it; a file that the folder lacks is an empty field here."""

    name: str
    folder: Path  # or the result file that the record was read from
    state: str
    config: Mapping[str, Any]
    scores: Mapping[str, Any]
    cost: Mapping[str, Any]
    data_files: tuple[str, ...]  # with the questions that it was scored on, if recorded
    result: Result | None = None  # the content of a result file

    @property
    def task(self) -> str:
        """What the run predicts: `span`, or `answerability` for a classifier, which gives no texts."""
        if self.result is not None and not self.folder.is_dir():
            return self.result.task
        return ANSWERABILITY if is_classifier(self.folder) else SPAN

    @property
    def seeds(self) -> tuple[Any, ...]:
        """The values of the seed options."""
        return tuple(map(self.options.get, SEED_OPTIONS))

    @property
    def options(self) -> dict[str, Any]:
        """The options under their full names, such as `learner.seed`."""
        return {f"{section}.{key}": value for section, part in self.config.items() for key, value in part.items()}

    @property
    def device(self) -> str | None:
        """The device that its times were measured on, if recorded."""
        device = self.cost.get("device")
        return None if device is None else str(device)

    def require_data_files(self) -> tuple[str, ...]:
        """Return the data files, or raise an error if they are not recorded."""
        if not self.data_files:
            raise UsageError(
                f"{self.folder}: expected a record of the data that the run was scored on, got none; "
                "pass the file with --data."
            )
        return self.data_files

    def decisions(self, examples: Sequence[Example]) -> QuestionScores:
        """Return the scores of a classifier at its own threshold: 1 where it decides correctly whether to answer."""
        if not self.scores:
            raise RunError(
                f"{self.folder}: expected {runs.RESULTS} with the threshold of the classifier, got no such file; score "
                "it with: lamella evaluate DATA --model RUN --out OUT"
            )
        odds = self.null_odds([example.id for example in examples])
        return score_all_answered(examples).withheld(odds > float(self.scores.get("threshold") or 0.0))

    def null_odds(self, ids: Sequence[str]) -> NDArray[np.float64]:
        """Read the null odds of some questions."""
        path = self.folder / runs.NULL_ODDS
        odds = read_json_object(path)
        if missing := [id for id in ids if not is_number(odds.get(id))]:
            raise RunError(f"{path}: expected a number for every question, got none for {missing[0]}.")
        return np.array([odds[id] for id in ids], np.float64)

    def answers(self) -> Mapping[str, Any]:
        """Read the answer to every question; of a classifier, its null odds. Nothing is cached."""
        return read_json_object(self.folder / runs.NULL_ODDS) if self.task == ANSWERABILITY else self.predictions()

    def predictions(self) -> dict[str, str]:
        """Read the answer to every question, "" for no answer. Nothing is cached."""
        path = self.folder / runs.PREDICTIONS
        if not path.is_file():
            raise RunError(f"{path}: expected the answers of a run, got no such file.")
        texts = read_json_object(path)
        if set(map(type, texts.values())) - {str}:
            id, text = next((id, text) for id, text in texts.items() if not isinstance(text, str))
            raise UnreadableError(f"{path}: expected a text for question {id}, got {text!r}; the file is damaged.")
        return texts


@dataclass(frozen=True)
class RunSelection:
    """The records of some folders, and the runs that were left out with the reason for each."""

    records: tuple[RunRecord, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)


def read_records(
    folders: Sequence[str | os.PathLike[str]], *, unfinished: bool = False, requires: str | None = None
) -> RunSelection:
    """Read run folders, result files, and folders of either.

    A folder of several runs contributes those that are finished and have the file `requires`; with `unfinished`, also
    those that have only started. Classifiers of answerability, which write no texts, need no such file.
    """
    paths: dict[Path, Path] = {}
    left_out: dict[str, str] = {}
    for given in folders:
        folder = Path(os.path.expanduser(given))
        if files := result_files(folder):
            paths |= {file.resolve(): file for file in files}
            continue
        for path in _runs_within(folder):
            state = runs.run_state(path)
            usable = state == "finished" or (unfinished and state)
            if usable and (requires is None or (path / requires).is_file() or is_classifier(path)):
                paths.setdefault(path.resolve(), path)
            elif path != folder:
                left_out[str(path)] = f"has no {requires}" if usable else state or "not started"
            elif not usable:
                raise RunError(f"{folder}: expected a finished run, got one that is {state}.")
            else:
                raise RunError(f"{folder}: expected a run with {requires}, got none; the run was not scored.")
    if not paths:
        expected = "run that has started" if unfinished else f"finished run{f' with {requires}' if requires else ''}"
        raise RunError(f"{', '.join(map(str, folders))}: expected at least one {expected}, got none.")
    chosen = list(paths.values())
    records = [_read_record(path, name) for path, name in zip(chosen, _short_names(chosen), strict=True)]
    return RunSelection(tuple(records), left_out)


def score_records(records: Sequence[RunRecord], data: str | None = None) -> tuple[list[Example], list[QuestionScores]]:
    """Return the questions that the runs answered, and the scores of each run on them.

    If any run is a classifier of answerability, the scores of all are those of the decision to answer.
    Raises an error if the runs answered different questions: their scores could not be compared.
    """
    first, answers = records[0], records[0].answers()
    examples = answered_examples(first, answers, data)
    if data is None:
        _check_same_data(first, examples, records)

    readers = [record for record in records if record.task == SPAN]

    def predictions() -> Iterator[Mapping[str, str]]:
        for record in readers:
            texts = record.predictions()
            _check_same_questions(first, answers, record, texts)
            yield texts

    with paused_garbage_collection():
        scores = score_readers(examples, predictions(), language=language_of(examples)) if readers else []
    if len(readers) == len(records):
        return examples, scores
    of_readers = iter(scores)
    decisions = []
    for record in records:
        if record.task == SPAN:
            decisions.append(next(of_readers).on_answerability())
        else:
            _check_same_questions(first, answers, record, record.answers())
            decisions.append(record.decisions(examples))
    return examples, decisions


def read_examples(record: RunRecord, data: str | None = None) -> list[Example]:
    """Read the questions of `data`; by default, of the files that the run was scored on."""
    if data is not None:
        return list(read_questions(data, labelled=True))
    try:
        return [example for file in record.require_data_files() for example in read_questions(file, labelled=True)]
    except UnreadableError as error:
        raise UnreadableError(
            f"{error} The run {record.folder} was scored on it; if the file has moved, pass it with --data."
        ) from None


def answered_examples(record: RunRecord, answers: Mapping[str, Any], data: str | None) -> list[Example]:
    """Return the examples that a run answered: all of them, or the first ones if the run was limited to these."""
    files, examples = (data,) if data else record.data_files, read_examples(record, data)
    answered = [example for example in examples if example.id in answers]
    if len(answered) < len(answers):
        missing = answers.keys() - {example.id for example in answered}
        raise RunError(
            f"{record.folder}: expected answers to questions of {', '.join(files)}, got {len(missing)} to others, such "
            f"as {min(missing)}; pass the file that the run was scored on with --data."
        )
    if not answered:
        raise RunError(f"{record.folder}: expected answers to compare, got none.")
    return answered


def is_classifier(folder: Path) -> bool:
    """Whether a run folder holds the decisions of a classifier of answerability: null odds, and no texts."""
    return (folder / runs.NULL_ODDS).is_file() and not (folder / runs.PREDICTIONS).is_file()


def recorded_data_files(folder: Path) -> tuple[str, ...]:
    """Return the files that a run was scored on: those in its record, otherwise the dev files of its training."""
    for file, key in ((runs.RUN, "files"), (runs.CONFIG, "dev")):
        try:
            if files := (read_json_object(folder / file).get("data") or {}).get(key):
                return tuple(str(name) for name in files)
        except (AttributeError, TypeError):
            raise UnreadableError(f"{folder / file}: expected the record of a run; the file is damaged.") from None
    return ()


def read_json_object(path: Path, *, finite: bool = True) -> dict[str, Any]:
    """Read a file that holds one JSON object, of `finite` numbers; return an empty one if there is no such file."""
    if not path.is_file():
        return {}
    content = read_json(path, finite=finite)
    if not isinstance(content, dict):
        raise UnreadableError(f"{path}: expected one JSON object, got {type(content).__name__}; the file is damaged.")
    return content


def is_number(value: object) -> bool:
    """Whether a value read from a file is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _runs_within(folder: Path) -> list[Path]:
    """List the single runs of a folder: itself, those that its record names, or those that lie in it."""
    kind = runs.kind_of_run(folder)
    if kind is not None and kind[0] == "analyse":
        raise RunError(f"{folder}: expected a run, got an analysis of runs.")
    if kind is not None and not kind[1]:
        return [folder]
    if kind is not None:
        inside = [folder / name for name in kind[1]]
    else:
        children = list(folder.iterdir()) if folder.is_dir() else []
        kinds = {child: runs.kind_of_run(child) for child in children}
        inside = sorted(
            (child for child, kind in kinds.items() if kind and kind[0] != "analyse"),
            key=lambda child: _natural_key(child.name),
        )
    if not inside:
        if not folder.exists():
            raise UnreadableError(
                f"{folder}: no such folder; give a run folder, a folder of run folders, or a result file."
            )
        raise RunError(f"{folder}: expected a run folder with {runs.RUN}, or a folder of run folders, got neither.")
    return [run for child in inside for run in (_runs_within(child) if _is_run(child) else [child])]


def _is_run(folder: Path) -> bool:
    return (folder / runs.RUN).is_file()


def _natural_key(name: str) -> list[tuple[int, str]]:
    """Sort `run-10` after `run-9`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def _read_record(path: Path, name: str) -> RunRecord:
    if path.is_file():
        result = read_result(path)
        data_files = tuple(str(file["name"]) for file in result.content["dev"]["files"])
        config, cost = _with_metric(result.config()), result.content["cost"]
        return RunRecord(name, path, "finished", config, result.scores(), cost, data_files, result)
    config, scores = (read_json_object(path / file) for file in (runs.CONFIG, runs.RESULTS))
    costs = read_json_object(path / runs.COST, finite=False)
    cost = {key: value for key, value in costs.items() if not isinstance(value, float) or math.isfinite(value)}
    config.pop("plugins", None)  # the only key that is no section
    if not all(isinstance(section, dict) for section in config.values()):
        raise UnreadableError(f"{path / runs.CONFIG}: expected the options of a run, by section; the file is damaged.")
    for (section, option), kinds in OPTION_TYPES.items():
        value = config.get(section, {}).get(option, kinds[0]())
        if not isinstance(value, kinds) or isinstance(value, bool):
            where = f"{path / runs.CONFIG}: {section}.{option}"
            raise UnreadableError(f"{where}: expected {kinds[0].__name__}, got {shorten(value)}; the file is damaged.")
    state = str(runs.run_state(path))
    return RunRecord(name, path, state, _with_metric(config), scores, cost, recorded_data_files(path))


def _with_metric(config: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the metric that selected the checkpoint; early runs store null for the task's own."""
    training, task = config.get("training", {}), config.get("learner", {}).get("task")
    if training.get("metric", "") is None:
        name = task.get("name") if isinstance(task, Mapping) else task
        training["metric"] = DEFAULT_METRICS.get(str(name), DEFAULT_METRICS[SPAN])
    return config


def _short_names(paths: Sequence[Path]) -> list[str]:
    """Return the last name of each path, without suffix, and as many parents as make them unique."""
    parts = [Path(os.path.abspath(path.with_suffix("") if path.is_file() else path)).parts for path in paths]
    length = 1
    while len({part[-length:] for part in parts}) < len(parts):
        length += 1
    return ["/".join(part[-length:]) for part in parts]


def _check_same_data(first: RunRecord, examples: Sequence[Example], records: Sequence[RunRecord]) -> None:
    """Check that equal ids mean equal questions; two files may give one id to different contexts or answers.

    A file that no longer exists is not held against its run.
    """
    contents = {example.id: _content(example) for example in examples}
    for files, record in {record.data_files: record for record in reversed(records)}.items():
        if not files or files == first.data_files:
            continue
        try:
            compared = read_examples(record)
        except LamellaError:
            continue
        for example in compared:
            if contents.get(example.id, _content(example)) != _content(example):
                raise RunError(
                    f"{record.folder}: expected the same questions as {first.folder}, but {example.id} differs between "
                    f"{', '.join(files)} and {', '.join(first.data_files)}; choose the data with --data."
                )


def _content(example: Example) -> tuple[str, str, list[str]]:
    return example.question, example.context.text, [answer.text for answer in example.answers]


def _check_same_questions(
    first: RunRecord, answers: Mapping[str, Any], record: RunRecord, texts: Mapping[str, Any]
) -> None:
    if answers.keys() == texts.keys():
        return
    parts = []
    for run, ids in ((first, answers.keys() - texts.keys()), (record, texts.keys() - answers.keys())):
        if ids:
            some = ", ".join(sorted(ids)[:3]) + (", …" if len(ids) > 3 else "")
            parts.append(f"{counted(len(ids), 'question')} answered only by {run.name} ({some})")
    raise RunError(
        f"{record.folder}: expected the questions of {first.folder}, got {'; '.join(parts)}; "
        "score both on the same data with: lamella evaluate DATA --model RUN --out OUT"
    )
