"""Find the runs of the rows of a published table, among run folders and result files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.errors import UsageError
from lamella.scoring.significance import Difference, bootstrap_differences
from lamella.study.compared_readers import ComparedReader, f1_of_no_answer
from lamella.study.keep import add_results, comparable_results
from lamella.study.papers.published_tables import PublishedRow, PublishedTable, known_run_files
from lamella.study.papers.time_spread import time_spreads
from lamella.study.reader_options import reader_options
from lamella.study.records import RunRecord, RunSelection
from lamella.study.result_files import Result

SEEDS = r"(?:[-_](?:order_)?seed[-_=]?\d+)*"  # at the end of a run's name


@dataclass(frozen=True, eq=False)
class MatchedRow:
    """A published row, and the reader that was trained for it: one run, or several with different seeds."""

    row: PublishedRow
    reader: ComparedReader | None
    # In percent, at threshold 0 and `crossfit_*`; per question, where there are several contexts, `question_*`.
    scores: Mapping[str, float] = field(default_factory=dict)

    @property
    def results(self) -> list[Result]:
        """The results of its runs."""
        return [run.result for run in self.reader.runs if run.result is not None] if self.reader else []

    @property
    def results_by_seeds(self) -> dict[tuple[Any, ...], Result]:
        """The results of its runs by their seeds; a seed that a run does not have (an ensemble has no order) is 0."""
        return {
            tuple(seed or 0 for seed in run.seeds): run.result
            for run in (self.reader.runs if self.reader else ())
            if run.result is not None and run.config
        }


@dataclass(frozen=True, eq=False)
class MatchedTable:
    """A published table with the readers of its rows; EM and F1 are at threshold 0, as in all four papers."""

    table: PublishedTable
    rows: tuple[MatchedRow, ...]
    # The results of the runs that rows are copies of, `bert` for `bert@0.3`; none where these were not given.
    sources: Mapping[str, Sequence[Result]] = field(default_factory=dict)
    # By kind of time and device: the factor by which times of the same work vary.
    time_spreads: Mapping[tuple[str, str | None], float] = field(default_factory=dict)

    @cached_property
    def results(self) -> list[Result]:
        """The results of all its runs."""
        return [result for row in self.rows for result in row.results]

    @property
    def at_0(self) -> bool:
        """Whether every run has the scores of single questions at threshold 0; early result files do not."""
        return all(result.at_0 is not None for result in self.results)

    @property
    def metric(self) -> str:
        """The score that has intervals: F1, or the accuracy of a classifier, whose F1 is no mean over questions."""
        return "exact" if self.table.task == "answerability" else "f1"

    @cached_property
    def intervals(self) -> dict[str, Difference]:
        """The 95 % interval of our score at threshold 0, in percent, by the run of the row."""
        readers = [row.reader for row in self.rows if row.reader is not None]
        if not readers or not self.at_0:
            return {}
        columns = np.stack([100 * getattr(reader, self.metric) for reader in readers], axis=1)
        intervals = bootstrap_differences(columns, self.results[0].paragraphs)
        return {reader.name: interval for reader, interval in zip(readers, intervals, strict=True)}

    def deviation(self, row: MatchedRow) -> float | None:
        """Return the standard deviation of the score between seeds, in percent; None for a single run."""
        place = 0 if self.metric == "exact" else 1
        means = [100 * float(question_lists(result, self.at_0)[place].mean()) for result in row.results]
        return float(np.std(means, ddof=1)) if len(means) > 1 else None

    def row(self, run: str) -> MatchedRow:
        """Return the row with this run."""
        return next(row for row in self.rows if row.row.run == run)


def match_tables(
    tables: Sequence[PublishedTable], records: Sequence[RunRecord], data: str | None = None
) -> tuple[list[MatchedTable], list[RunRecord]]:
    """Return the tables with the runs of their rows, and the runs that belong to no row.

    A run belongs to a row by its name: `dot`, or `dot-seed1` for one of several seeds. Where run files share the name,
    the folder or the start of the file's name decides: `pce-table2/dot`, `pce-table2-dot.json`. The runs that rows are
    copies of belong to the table, too.
    """
    identified = [(record, *identify(record)) for record in records]
    runs_of = {
        (table.id, row.run): _runs_of_row(table, row, tables, identified) for table in tables for row in table.row
    }
    sources_of = {table.id: _runs_copied(table, identified) for table in tables}
    all_runs = [*runs_of.values(), *(runs for of_table in sources_of.values() for runs in of_table.values())]
    used = {run.folder: run for runs in all_runs for run in runs}
    selection = add_results(RunSelection(tuple(used.values())), data) if used else RunSelection(())
    scored = {run.folder: run for run in selection.records}
    matched, spreads = [], time_spreads(records)
    for table in tables:
        members = {row.run: [scored[run.folder] for run in runs_of[table.id, row.run]] for row in table.row}
        if all_members := [run for runs in members.values() for run in runs]:
            _check_task(table, all_members)
            comparable_results(all_members)
        at_0 = all(run.result and run.result.at_0 is not None for run in all_members)
        sources = {
            name: [result for run in runs if (result := scored[run.folder].result) is not None]
            for name, runs in sources_of[table.id].items()
        }
        rows = tuple(_match(table, row, members[row.run], at_0) for row in table.row)
        matched.append(MatchedTable(table, rows, sources, spreads))
    return matched, [run for run in records if run.folder not in used]


def question_lists(result: Result, at_0: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return exact match and F1 of every question: at threshold 0, or as an early result file has them."""
    return result.at_0 if at_0 and result.at_0 is not None else (result.exact, result.f1)


def identify(record: RunRecord) -> tuple[str | None, str]:
    """Return the run file that the name or the folder of a run starts with, if any, and the name without it."""
    name = record.folder.stem if record.result else record.folder.name
    run_file = run_file_of(name)
    if run_file:
        rest = name.removeprefix(run_file).lstrip("-_.")
        return run_file, re.sub(r"^(?:order_)?seed\d+[-_]", "", rest)  # `pce-table2-seed1-dot` is a dot
    return run_file_of(record.folder.resolve().parent.name), name


def run_file_of(name: str) -> str | None:
    """Return the run file of a paper that a name starts with, if any."""
    names = [run_file for run_file in known_run_files() if re.match(rf"{re.escape(run_file)}(?![a-z0-9])", name)]
    return max(names, key=len, default=None)


def _runs_of_row(
    table: PublishedTable,
    row: PublishedRow,
    tables: Sequence[PublishedTable],
    identified: Sequence[tuple[RunRecord, str | None, str]],
) -> list[RunRecord]:
    found = []
    for record, run_file, name in identified:
        if not re.fullmatch(re.escape(row.run_name) + SEEDS, name):
            continue
        homes = {other.run_file_of(twin) for other in tables for twin in other.row if twin.run_name == row.run_name}
        if run_file is None and len(homes) > 1:
            raise UsageError(
                f"{record.folder}: expected a folder or file named after its run file, {' or '.join(sorted(homes))}, "
                f"since each has a run {row.run_name}; rename it, or choose a table that has only one."
            )
        if run_file in (None, table.run_file_of(row)):
            found.append(record)
    return found


def _runs_copied(
    table: PublishedTable, identified: Sequence[tuple[RunRecord, str | None, str]]
) -> dict[str, list[RunRecord]]:
    """Return the runs that rows of a table are copies of, by their names without seeds."""
    copied = {
        (table.run_file_of(row), name) for row in table.row for name, at, _ in [row.run_name.partition("@")] if at
    }
    return {
        name: [
            record
            for record, home, run in identified
            if home == run_file and re.fullmatch(re.escape(name) + SEEDS, run)
        ]
        for run_file, name in sorted(copied)
    }


def _check_task(table: PublishedTable, runs: Sequence[RunRecord]) -> None:
    for run in runs:
        task = run.result.task if run.result else table.task
        if task != table.task:
            raise UsageError(f"{run.folder}: expected a run of the task {table.task}, as in {table.id}, got {task}.")


def _match(table: PublishedTable, row: PublishedRow, runs: Sequence[RunRecord], at_0: bool) -> MatchedRow:
    """Return a row with the mean of its runs, question by question."""
    runs = _without_repetitions(table, row, runs)
    results = [run.result for run in runs if run.result is not None]
    if not results:
        return MatchedRow(row, None)
    lists = [question_lists(result, at_0) for result in results]
    reader = ComparedReader(
        name=row.run,
        runs=tuple(runs),
        exact=np.mean([exact for exact, _ in lists], axis=0),
        f1=np.mean([f1 for _, f1 in lists], axis=0),
        paragraphs=results[0].paragraphs,
        f1_of_runs=tuple(100 * float(f1.mean()) for _, f1 in lists),
    )
    if table.task == "answerability":
        scores = [_classification_scores(result) for result in results]
    else:
        scores = [_span_scores(result) for result in results]
    shared = set.intersection(*map(set, scores))
    return MatchedRow(row, reader, {key: float(np.mean([of_run[key] for of_run in scores])) for key in shared})


def _span_scores(result: Result) -> dict[str, float]:
    scores = {**result.content["scores"]["at_0"], **_crossfit_scores(result)}
    if result.by_question is not None:
        of_questions = {**result.by_question.content["scores"]["at_0"], **_crossfit_scores(result.by_question)}
        scores |= {f"question_{key}": value for key, value in of_questions.items()}
    return scores


def _crossfit_scores(result: Result) -> dict[str, float]:
    crossfit = result.content["scores"].get("crossfit", {})
    return {f"crossfit_{key}": crossfit[key] for key in ("exact", "f1") if key in crossfit}


def _classification_scores(result: Result) -> dict[str, float]:
    """Return accuracy, and F1 of the class "no answer", as `exact` and `f1`."""
    scores: dict[str, float] = {}
    for prefix, lists in (("", result.at_0), ("crossfit_", (result.exact, result.f1))):
        if lists is not None:
            scores[f"{prefix}exact"] = 100 * float(lists[0].mean())
            scores[f"{prefix}f1"] = f1_of_no_answer(replace(result, exact=lists[0])) or 0.0
    return scores


def _without_repetitions(table: PublishedTable, row: PublishedRow, runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs of a row without repeated seeds; check that they differ in nothing else."""
    by_seeds: dict[object, RunRecord] = {}
    for run in runs:
        different = _different_options(runs[0], run)
        if different:
            raise UsageError(
                f"{run.folder}: expected the options of {runs[0].folder} with another seed, since both are the row "
                f"{row.run} of {table.id}, but {different[0]} differs; give the runs of one of them."
            )
        by_seeds.setdefault(run.seeds if run.config else run.folder, run)
    return list(by_seeds.values())


def _different_options(first: RunRecord, second: RunRecord) -> list[str]:
    """Return the options that two runs do not share; files and models are compared without their folders."""
    one, two = (
        # Early files store null for the task's own metric; the config has it in its place.
        reader_options({**run.result.content["options"], "training.metric": run.options.get("training.metric")})
        for run in (first, second)
        if run.result is not None
    )
    return sorted(key for key in {*one, *two} if one.get(key) != two.get(key))
