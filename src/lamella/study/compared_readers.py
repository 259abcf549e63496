"""The readers among some runs: runs that differ only in their seeds are one reader, with the means of their scores."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.data.examples import Example
from lamella.inference.several_contexts import one_example_per_question, paragraphs_of
from lamella.scoring.metrics import QuestionScores, no_answer_f1
from lamella.study.keep import add_results, comparable_results
from lamella.study.reader_options import reader_options, without_seed
from lamella.study.records import (
    ANSWERABILITY,
    SPAN,
    TASK_SCORES,
    RunRecord,
    RunSelection,
    TaskScore,
    is_number,
    score_records,
)
from lamella.study.result_files import Result
from lamella.study.scored_runs import score_by_question

# The costs that readers are ranked by: the key in cost.json, and the title in a table.
COST_TITLES = {
    "trainable_parameters": "parameters",
    "train_seconds": "train s",
    "inference_seconds_per_1000": "ms/question",
}
TIME_COSTS = ("train_seconds", "inference_seconds_per_1000", "windows_per_second")  # depend on the device
TRAINING_FLOPS = "training_flops"  # of a whole run: not recorded, but computed from what is
THRESHOLD_PROTOCOLS = {  # the thresholds that scores are computed at, as a table describes them
    "own": "at each run's own threshold",
    "crossfit": "at cross-fitted thresholds (each article at the threshold tuned on the others)",
}


@dataclass(frozen=True, eq=False)
class ComparedReader:
    """A reader to compare: one run, or several that differ only in their seeds, averaged question by question."""

    name: str
    runs: tuple[RunRecord, ...]
    exact: NDArray[np.float64]  # one score per question
    f1: NDArray[np.float64]
    paragraphs: NDArray[np.int64]  # the number of each question's paragraph
    f1_of_runs: tuple[float, ...]  # in percent
    task: str = SPAN  # what is scored: texts, or with `answerability` the decision to answer, as `exact` and as `f1`
    no_answer_f1: float | None = None  # of decisions to answer: F1 of the class "no answer", in percent
    # Where questions have several contexts: the scores per question, of the best answer from all contexts. The other
    # scores are then per context.
    by_question: ComparedReader | None = None
    per_question: bool = False  # whether this is the `by_question` of another

    @cached_property
    def mean_exact(self) -> float:
        """Exact match in percent."""
        return 100 * float(self.exact.mean())

    @cached_property
    def mean_f1(self) -> float:
        """F1 in percent."""
        return 100 * float(self.f1.mean())

    @property
    def deviation(self) -> float | None:
        """The standard deviation of F1 between the seeds, in percent; None for a single run."""
        return float(np.std(self.f1_of_runs, ddof=1)) if len(self.runs) > 1 else None

    @property
    def score(self) -> TaskScore:
        """The score by which it is compared: F1, or the accuracy of its decisions to answer."""
        return TASK_SCORES[self.task]

    @property
    def gives_text(self) -> bool:
        """Whether it finds answers, and does not only decide whether there is one."""
        return self.runs[0].task == SPAN

    @property
    def thresholds(self) -> str:
        """The thresholds of the scores: `own` or `crossfit`."""
        result = self.runs[0].result
        if result is not None and self.per_question:
            result = result.by_question
        return result.scored_at if result else "own"

    @property
    def device(self) -> str | None:
        """The device that its times were measured on; None if there are several, or if it is not recorded.

        Runs without times, which had no device to themselves, do not count, unless no run has any.
        """
        timed = [run for run in self.runs if any(is_number(run.cost.get(key)) for key in TIME_COSTS)]
        devices = {run.device for run in timed or self.runs}
        return devices.pop() if len(devices) == 1 else None

    def mean_score(self, key: str) -> float | None:
        """Return the mean of a score of eval_results.json; None if a run does not have it."""
        return _mean([run.scores.get(key) for run in self.runs])

    def mean_cost(self, key: str) -> float | None:
        """Return the mean of a cost; None if a run does not record it, or if times come from different devices.

        Times may be recorded by some of the runs only: those that had the device to themselves.
        """
        if key in TIME_COSTS:
            timed = [run for run in self.runs if is_number(run.cost.get(key))]
            same_device = len({run.device for run in timed}) == 1
            return _mean([run.cost[key] for run in timed]) if same_device else None
        return _mean([_training_flops(run) if key == TRAINING_FLOPS else run.cost.get(key) for run in self.runs])

    def to_dict(self) -> dict[str, Any]:
        """Return name, scores and costs as plain values."""
        return {
            "name": self.name,
            "runs": [str(run.folder) for run in self.runs],
            **self._scores(),
            # Cross-fitted scores have a threshold for each fold of the articles, so there is no single one to show.
            "threshold": self.mean_score("threshold") if self.thresholds == "own" else None,
            "device": self.device,
            **{key: self.mean_cost(key) for key in COST_TITLES},
            **{key: self.mean_cost(key) for key in ("efficiency", "model_bytes", "peak_memory_bytes")},
        }

    def _scores(self) -> dict[str, float | None]:
        scores = self._own_scores()
        if self.by_question is not None:
            scores |= {f"question_{key}": value for key, value in self.by_question._own_scores().items()}
        return scores

    def _own_scores(self) -> dict[str, float | None]:
        if self.task == ANSWERABILITY:
            return {
                "answerability_accuracy": self.mean_f1,
                "answerability_accuracy_deviation": self.deviation,
                "answerability_f1": self.no_answer_f1,
            }
        scores = {"exact": self.mean_exact, "f1": self.mean_f1, "f1_deviation": self.deviation}
        return scores if self.per_question else {**scores, "best_f1": self.mean_score("best_f1")}


def group_by_reader(selection: RunSelection, data: str | None = None) -> list[ComparedReader]:
    """Return the readers among some runs.

    If any run is read from a result file, all are scored as in such files: at thresholds cross-fitted by article. If
    any is a classifier of answerability, all are scored by what all can do: decide whether there is an answer.
    """
    scores: Sequence[QuestionScores | Result]
    question_scores: Sequence[QuestionScores | Result]
    task = ANSWERABILITY if any(run.task == ANSWERABILITY for run in selection.records) else SPAN
    if any(run.result for run in selection.records):
        selection = add_results(selection, data, on_answerability=task == ANSWERABILITY)
        results = comparable_results(selection.records)
        scores, paragraphs = results, results[0].paragraphs
        of_questions = [result.by_question for result in results if result.by_question is not None]
        question_scores = of_questions if len(of_questions) == len(results) else []
        question_paragraphs = of_questions[0].paragraphs if of_questions else paragraphs
    else:
        examples, scores = score_records(selection.records, data)
        question_scores = score_by_question(selection.records, examples, task)
        numbers = _paragraph_numbers(examples)
        paragraphs = np.array([numbers[example.id] for example in examples])
        ids = one_example_per_question(examples) if question_scores else []
        question_paragraphs = np.array([numbers[question.id] for question in ids], np.int64)
    records = selection.records
    groups = _same_options(records)
    names = _reader_names([[records[index].name for index in indices] for indices in groups])
    readers = []
    for name, indices in zip(names, groups, strict=True):
        members = tuple(records[index] for index in indices)
        reader = _reader(name, members, [scores[index] for index in indices], paragraphs, task)
        if question_scores:
            chosen = [question_scores[index] for index in indices]
            per_question = _reader(name, members, chosen, question_paragraphs, task)
            reader = replace(reader, by_question=replace(per_question, per_question=True))
        readers.append(reader)
    return readers


def _reader(
    name: str,
    runs: tuple[RunRecord, ...],
    scores: Sequence[QuestionScores | Result],
    paragraphs: NDArray[np.int64],
    task: str,
) -> ComparedReader:
    """Return a reader with the mean scores of its runs, question by question."""
    return ComparedReader(
        name=name,
        runs=runs,
        exact=np.mean([of_run.exact for of_run in scores], axis=0),
        f1=np.mean([of_run.f1 for of_run in scores], axis=0),
        paragraphs=paragraphs,
        f1_of_runs=tuple(100 * float(of_run.f1.mean()) for of_run in scores),
        task=task,
        no_answer_f1=_mean(list(map(f1_of_no_answer, scores))) if task == ANSWERABILITY else None,
    )


def _paragraph_numbers(examples: Sequence[Example]) -> dict[str, int]:
    """Return the number of the paragraph of every example and question, by their ids."""
    numbers: dict[str, int] = {}
    return {id: numbers.setdefault(text, len(numbers)) for id, text in paragraphs_of(examples).items()}


def task_lines(readers: Sequence[ComparedReader]) -> list[str]:
    """Describe a mixture of readers and classifiers of answerability, in one line; none if there is no mixture."""
    texts, classifiers = ([reader.name for reader in readers if reader.gives_text is gives] for gives in (True, False))
    if not texts or not classifiers:
        return []
    return [
        f"compared by the decision whether there is an answer: {', '.join(classifiers)} only "
        f"{'decides' if len(classifiers) == 1 else 'decide'} that; {', '.join(texts)} also "
        f"{'finds' if len(texts) == 1 else 'find'} the answer"
    ]


def f1_of_no_answer(decisions: QuestionScores | Result) -> float | None:
    """Return the F1 of the class "no answer" from the scores of decisions to answer, in percent."""
    unanswerable = ~decisions.answerable
    return no_answer_f1((decisions.exact == 1) == unanswerable, unanswerable)


def _same_options(records: Sequence[RunRecord]) -> list[list[int]]:
    """Group the indices of runs whose options differ only in the seeds."""
    groups: dict[str, list[int]] = {}
    taken: set[tuple[str, Any]] = set()
    for index, run in enumerate(records):
        # A run that repeats the seeds of another adds nothing to a mean, so it gets a group of its own; and so does a
        # run without recorded options.
        key = json.dumps(reader_options(run.options), sort_keys=True) if run.config else str(run.folder)
        key = f"{key} {run.folder}" if (key, run.seeds) in taken else key
        taken.add((key, run.seeds))
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _reader_names(groups: Sequence[Sequence[str]]) -> list[str]:
    """Return a name for every group of runs: their own name without seed, with their folder only if it is needed."""
    own = [without_seed(group[0].rpartition("/")[2]) for group in groups]
    taken = {name for group in groups for name in group}
    names = []
    for group, name in zip(groups, own, strict=True):
        candidates = [_common_name(group)]
        if all(without_seed(run.rpartition("/")[2]) == name for run in group):  # `table-seed0/dot`, `table-seed1/dot`
            folder = _common_name([run.rpartition("/")[0] for run in group])
            candidates = [*([name] if own.count(name) == 1 else []), f"{folder}/{name}" if folder else name]
        free = [candidate for candidate in candidates if candidate not in taken - set(group)]
        names.append(free[0] if free and len(group) > 1 else group[0])
        taken.add(names[-1])
    return names


def _common_name(names: Sequence[str]) -> str:
    """Return the common start of some names without the word for a seed: `dot-seed0`, `dot-seed1` become `dot`."""
    columns = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    shared = "".join(letters[0] for letters in columns)
    return re.sub(r"(order_)?seed[-_=]?\d*$", "", shared).rstrip("-_.+, ") or names[0]


def _training_flops(run: RunRecord) -> float | None:
    """Return the operations per window times the windows trained on."""
    factors: list[Any] = [
        run.cost.get(key) for key in ("training_flops_per_window", "windows_per_second", "train_seconds")
    ]
    return math.prod(factors) if all(map(is_number, factors)) else None


def _mean(values: Sequence[Any]) -> float | None:
    return float(np.mean(values)) if all(map(is_number, values)) else None
