"""Compare the costs of two rows: parameters, times and distances to a teacher, by their ratio.

Times of the same work vary from run to run. Where it was timed more than once, their spread is known: a ratio within it
decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lamella.study.learning_curve import PARTS
from lamella.study.papers.matched_rows import MatchedRow
from lamella.study.papers.published_tables import DISTILLATION, METRICS, Finding
from lamella.study.papers.time_spread import TIMES
from lamella.study.papers.verdicts import NOT_RUN, REVERSED, SAME, UNDECIDED
from lamella.study.recommend import MIN_SAVING
from lamella.study.result_files import Result


class CostVerdict(NamedTuple):
    """How many times as much the second row costs, the verdict, and its reason, if it needs one."""

    ratio: float | None
    verdict: str
    reason: str = ""


def compare_costs(
    finding: Finding, first: MatchedRow, second: MatchedRow, spreads: Mapping[tuple[str, str | None], float]
) -> CostVerdict:
    """Compare two rows that have runs; `first` is the row that should cost less, or as much."""
    assert first.reader is not None
    assert second.reader is not None
    metric, device = finding.metric, first.reader.device
    costs = _cost(first, metric), _cost(second, metric)
    if not costs[0] or not costs[1]:
        return CostVerdict(None, NOT_RUN, f"{METRICS[metric]} not recorded")
    if metric in TIMES and device != second.reader.device:
        return CostVerdict(None, NOT_RUN, "timed on different devices")
    ratio, spread, tolerance, repeated = costs[1] / costs[0], 1.0, MIN_SAVING, "times of the same work"
    if metric in TIMES:
        spread = spreads.get((metric, device), 1.0)
    elif metric == DISTILLATION:
        spread, repeated = max(_spread_of_seeds(first), _spread_of_seeds(second)), "seeds"
    else:
        tolerance = 0.0
    verdict = _verdict(ratio, spread, finding, tolerance)
    varies = verdict == UNDECIDED and spread > 1
    return CostVerdict(ratio, verdict, f"{repeated} vary by × {spread:.2f}" if varies else "")


def _verdict(ratio: float, spread: float, finding: Finding, tolerance: float) -> str:
    """Return the verdict on a ratio, which varies by the factor `spread`."""
    most = 1 + finding.margin
    if finding.alike:
        if spread > most:
            return UNDECIDED
        return SAME if 1 / most <= ratio <= most else REVERSED
    if finding.margin:
        if ratio / spread >= 1 / most:
            return SAME
        return REVERSED if ratio * spread < 1 / most else UNDECIDED
    if ratio == 1 or abs(ratio - 1) < tolerance or max(ratio, 1 / ratio) <= spread:
        return UNDECIDED
    return SAME if ratio > 1 else REVERSED


def _cost(row: MatchedRow, metric: str) -> float | None:
    """Return the mean of a cost over the runs of a row; None if it is not recorded."""
    assert row.reader is not None
    if metric != DISTILLATION:
        return row.reader.mean_cost(metric)
    distances = _distances(row)
    return float(np.mean(distances)) if distances else None


def _spread_of_seeds(row: MatchedRow) -> float:
    distances = _distances(row)
    return max(distances) / min(distances)


def _distances(row: MatchedRow) -> list[float]:
    return [distance for result in row.results if (distance := _last_distance(result))]


def _last_distance(result: Result) -> float | None:
    """Return the last distillation loss of a run: the mean over the steps since the evaluation before."""
    known = [value for value in result.content.get("curve", {}).get(PARTS, {}).get("distillation", ()) if value]
    return float(known[-1]) if known else None
