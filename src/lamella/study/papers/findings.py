"""Decide the findings of a published table by its runs: paired tests over questions, and over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.config import QUESTION_METRICS
from lamella.scoring.significance import Difference, bootstrap_intervals
from lamella.study.differences import MIN_UNITS, variance_between_seeds
from lamella.study.papers.cost_verdicts import compare_costs
from lamella.study.papers.matched_rows import MatchedRow, MatchedTable, question_lists
from lamella.study.papers.published_tables import (
    COST_METRICS,
    EFFICIENCY,
    METRICS,
    RUN_METRICS,
    SCORE_METRICS,
    Finding,
)
from lamella.study.papers.run_verdicts import compare_run_numbers
from lamella.study.papers.verdicts import CLEAR, NOT_RUN, REVERSED, SAME, UNDECIDED, VERDICTS
from lamella.study.result_files import Result

CONFIDENCE = 0.95  # the level of the intervals shown, which decide whether a difference is clear
PER_QUESTION, CROSSFIT = "question_", "crossfit_"  # the prefixes of metrics, in this order
LEANING = 0.8  # the level at which an interval on the published side of 0 counts as the same sign


@dataclass(frozen=True)
class RowDifference:
    """The difference between two rows of a table; positive where it has the published sign."""

    better: str
    worse: str
    metric: str
    margin: float  # points; for costs, a share
    published: float | None  # for costs: how many times as much the worse row costs
    ours: Difference | None = None  # in points; None if a row has no runs, or the metric is not tested
    untested: float | None = None  # of costs the ratio, of numbers per run the difference
    runs: tuple[int, int] = (0, 0)  # that were compared, of the better and of the worse row
    verdict: str = NOT_RUN
    reason: str = ""  # why there is no verdict, or why values that are not tested are not distinguished
    alike: bool = False  # whether costs should be the same, within the margin

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as plain values."""
        return {
            "better": self.better,
            "worse": self.worse,
            "metric": self.metric,
            "margin": self.margin,
            "published": self.published,
            "ours": self.untested if self.ours is None else self.ours.value,
            "interval": None if self.ours is None else [self.ours.low, self.ours.high],
            "runs": list(self.runs),
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class JudgedFinding:
    """A finding with its comparisons, and the verdict on all of them."""

    finding: Finding
    differences: tuple[RowDifference, ...]
    # The same by other scores, which decide nothing: per question, where questions have several contexts, and with
    # cross-fitted thresholds.
    others: tuple[RowDifference, ...] = ()

    @property
    def verdict(self) -> str:
        """The least favourable verdict of its comparisons; `not run` if a row is missing."""
        return min((difference.verdict for difference in self.differences), key=VERDICTS.index)

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as plain values."""
        comparisons = [difference.to_dict() for difference in self.differences]
        others = [difference.to_dict() for difference in self.others]
        return {
            "finding": self.finding.text,
            "verdict": self.verdict,
            "comparisons": comparisons,
            **({"other_comparisons": others} if others else {}),
        }


def judge(matched: MatchedTable) -> list[JudgedFinding]:
    """Return the findings of a table with their verdicts."""
    planned = [
        [_planned(matched, finding, better, worse) for better, worse in finding.pairs]
        for finding in matched.table.finding
    ]
    others = [
        sorted(
            (
                replace(difference, metric=metric, published=None)
                for difference in differences
                for metric in _other_metrics(finding, difference)
            ),
            key=lambda difference: [*METRICS].index(difference.metric),
        )
        for finding, differences in zip(matched.table.finding, planned, strict=True)
    ]
    tested, tested_others = iter(_tested(matched, list(chain(*planned)))), iter(_tested(matched, list(chain(*others))))
    return [
        JudgedFinding(
            finding,
            tuple(islice(tested, len(own))),
            tuple(difference for difference in islice(tested_others, len(other)) if not difference.reason),
        )
        for finding, own, other in zip(matched.table.finding, planned, others, strict=True)
    ]


def _other_metrics(finding: Finding, difference: RowDifference) -> list[str]:
    """Return the scores by which two rows are compared besides that of the finding, if they are recorded."""
    if difference.reason or difference.metric not in SCORE_METRICS:
        return []
    metrics = [difference.metric]
    if f"{PER_QUESTION}{difference.metric}" in QUESTION_METRICS:
        metrics.append(f"{PER_QUESTION}{difference.metric}")
    if finding.crossfit:
        metrics += [_crossfit(metric) for metric in metrics]
    return metrics[1:]


def _crossfit(metric: str) -> str:
    per_question = PER_QUESTION if metric.startswith(PER_QUESTION) else ""
    return f"{per_question}{CROSSFIT}{metric.removeprefix(per_question)}"


def _planned(matched: MatchedTable, finding: Finding, better: str, worse: str) -> RowDifference:
    """Return a comparison with its published value; one that is not tested with its verdict."""
    first, second = matched.row(better), matched.row(worse)
    is_cost = finding.metric in COST_METRICS
    values = first.row.value(finding.metric), second.row.value(finding.metric)
    published = None
    if values[0] is not None and values[1] is not None:
        published = values[1] / values[0] if is_cost else values[0] - values[1]
    runs = (len(first.results), len(second.results))
    planned = RowDifference(better, worse, finding.metric, finding.margin, published, runs=runs, alike=finding.alike)
    missing = [row.row.run for row in (first, second) if row.reader is None]
    if missing:
        return replace(planned, reason=f"no run of {' and '.join(missing)}")
    if (first, second) in same_encoder(matched, finding):
        return replace(planned, reason="both rows have the same encoder")
    if is_cost:
        untested = compare_costs(finding, first, second, matched.time_spreads)
    elif finding.metric in RUN_METRICS:
        untested = compare_run_numbers(finding.metric, first, second)
    else:
        return planned
    return replace(planned, untested=untested.value, verdict=untested.verdict, reason=untested.reason)


def same_encoder(matched: MatchedTable, finding: Finding) -> list[tuple[MatchedRow, MatchedRow]]:
    """Return the rows that a finding about encoders compares, although they were trained on the same encoder."""
    if finding.about != "encoder":
        return []
    pairs = [(matched.row(better), matched.row(worse)) for better, worse in finding.pairs]
    return [
        (first, second)
        for first, second in pairs
        if first.reader and second.reader and _encoder(first) == _encoder(second)
    ]


def _encoder(row: MatchedRow) -> tuple[object, object]:
    encoder = row.results[0].content["encoder"]
    return encoder.get("name"), encoder.get("sha256")


@dataclass(frozen=True, eq=False)
class _Test:
    """A difference to test: its value for every question, and the variance of its mean between seeds."""

    place: int  # among the comparisons
    values: NDArray[np.float64]
    variance: float | None  # None without several seeds
    runs: tuple[int, int]  # of both rows
    paragraphs: NDArray[np.int64] | None  # None: questions are resampled


def _tested(matched: MatchedTable, planned: Sequence[RowDifference]) -> list[RowDifference]:
    """Return the comparisons with their intervals and verdicts; tests of the same questions share their resamples."""
    tested = list(planned)
    groups: dict[tuple[str, bool], list[_Test]] = {}
    for place, difference in enumerate(planned):
        if not difference.reason and difference.metric not in (*COST_METRICS, *RUN_METRICS):
            test = _test(matched, place, difference)
            if test is None:
                missing = "parameters" if difference.metric == EFFICIENCY else "scores per question"
                tested[place] = replace(difference, reason=f"{missing} not recorded")
            else:
                subset = difference.metric.rpartition("_")[0]  # `HasAns`, `NoAns`, or all questions
                groups.setdefault((subset, test.paragraphs is not None), []).append(test)
    for tests in groups.values():
        columns = np.stack([test.values for test in tests], axis=1)
        intervals = bootstrap_intervals(columns, tests[0].paragraphs, levels=(CONFIDENCE, LEANING))
        for test, interval, narrow in zip(tests, *intervals, strict=True):
            verdict = _verdict(test, interval, narrow, planned[test.place].margin)
            tested[test.place] = replace(planned[test.place], ours=interval, runs=test.runs, verdict=verdict)
    return tested


def _test(matched: MatchedTable, place: int, difference: RowDifference) -> _Test | None:
    values, means, runs = [], [], []
    for results in _results_of_same_seeds(matched.row(difference.better), matched.row(difference.worse)):
        of_runs = _values(results, difference.metric, matched.at_0)
        if of_runs is None:
            return None
        values.append(of_runs.mean(axis=0))
        runs.append(len(of_runs))
        means.append(of_runs.mean(axis=1).tolist())
    result = matched.row(difference.better).results[0]
    several = max(runs) > 1
    # The scores of a question's contexts depend on each other, so they are resampled together.
    per_question = difference.metric.startswith(PER_QUESTION)
    by_paragraph = several or (not per_question and result.by_question is not None)
    if per_question:
        assert result.by_question is not None
        result = result.by_question
    chosen = _chosen(difference.metric, result.answerable)
    numbers = np.unique(result.paragraphs[chosen], return_inverse=True)[1]
    return _Test(
        place,
        values[0] - values[1],
        variance_between_seeds(*means),
        (runs[0], runs[1]),
        numbers if by_paragraph else None,
    )


def _results_of_same_seeds(first: MatchedRow, second: MatchedRow) -> tuple[list[Result], list[Result]]:
    """Return the results of two rows with the seeds that both have; all of them if they have none in common.

    Seeds differ by points, and a head has the encoder of its own seed, so that a seed of one row alone would show as a
    difference between the rows.
    """
    by_seeds = first.results_by_seeds, second.results_by_seeds
    shared = by_seeds[0].keys() & by_seeds[1].keys()
    if not shared:
        return first.results, second.results
    of_first, of_second = ([result for seeds, result in results.items() if seeds in shared] for results in by_seeds)
    return of_first, of_second


def _values(results: Sequence[Result], metric: str, at_0: bool) -> NDArray[np.float64] | None:
    """Return a metric for every run and question, in points; None if what it needs is not recorded."""
    rows = []
    of_questions = [result.by_question for result in results if result.by_question is not None]
    if metric.startswith(PER_QUESTION):
        if len(of_questions) < len(results):
            return None
        metric, results = metric.removeprefix(PER_QUESTION), of_questions
    if metric.startswith(CROSSFIT):
        if any(result.scored_at != "crossfit" for result in results):
            return None
        metric, at_0 = metric.removeprefix(CROSSFIT), False
    for result in results:
        exact, f1 = question_lists(result, at_0)
        if metric == EFFICIENCY:
            parameters = result.content["cost"].get("trainable_parameters")
            if not parameters or parameters < 10:
                return None
            rows.append((100 * f1 - 50) / math.log10(parameters))
        else:
            rows.append(100 * (f1 if metric == "f1" else exact)[_chosen(metric, result.answerable)])
    return np.stack(rows)


def _chosen(metric: str, answerable: NDArray[np.bool_]) -> NDArray[np.bool_]:
    if metric.startswith("HasAns_"):
        return answerable
    return ~answerable if metric.startswith("NoAns_") else np.ones_like(answerable)


def _verdict(test: _Test, interval: Difference, narrow: Difference, margin: float) -> str:
    """Return the verdict by two intervals and, with several seeds, by two standard errors between them."""
    units = len(test.values) if test.paragraphs is None else len(np.unique(test.paragraphs))
    if units < MIN_UNITS:
        return UNDECIDED
    beyond_seeds = test.variance is None or abs(interval.value + margin) >= 2 * math.sqrt(test.variance)
    if beyond_seeds and interval.low + margin > 0:
        return CLEAR
    if beyond_seeds and interval.high + margin < 0:
        return REVERSED
    return SAME if narrow.low + margin > 0 else UNDECIDED
