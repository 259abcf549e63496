"""Compare the costs of two rows: parameters, times and losses, by their ratio.

Times of the same work vary from run to run. Where it was timed more than once, their spread is known: a ratio within it
decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lamella.study.learning_curve import PARTS
from lamella.study.papers.matched_rows import MatchedRow
from lamella.study.papers.published_tables import DISTILLATION, LOSS, METRICS, Finding
from lamella.study.papers.time_spread import TIMES
from lamella.study.papers.verdicts import NOT_RUN, REVERSED, SAME, UNDECIDED
from lamella.study.recommend import MIN_SAVING
from lamella.study.result_files import Result


class UntestedVerdict(NamedTuple):
    """How the rows compare (of costs: how many times as much the second costs), the verdict, and its reason, if any."""

    value: float | None
    verdict: str
    reason: str = ""


def compare_costs(
    finding: Finding, first: MatchedRow, second: MatchedRow, spreads: Mapping[tuple[str, str | None], float]
) -> UntestedVerdict:
    """Compare two rows that have runs; `first` is the row that should cost less, or as much."""
    assert first.reader is not None
    assert second.reader is not None
    metric, device = finding.metric, first.reader.device
    costs = _cost(first, metric), _cost(second, metric)
    if not costs[0] or not costs[1]:
        return UntestedVerdict(None, NOT_RUN, f"{METRICS[metric]} not recorded")
    if metric in TIMES and device != second.reader.device:
        return UntestedVerdict(None, NOT_RUN, "timed on different devices")
    ratio, spread, tolerance, repeated = costs[1] / costs[0], 1.0, MIN_SAVING, "times of the same work"
    if metric in TIMES:
        spread = spreads.get((metric, device), 1.0)
    elif metric in (DISTILLATION, LOSS):
        spread, repeated = max(_spread_of_seeds(row, metric) for row in (first, second)), "seeds"
    else:
        tolerance = 0.0
    verdict = _verdict(ratio, spread, finding, tolerance)
    varies = verdict == UNDECIDED and spread > 1
    return UntestedVerdict(ratio, verdict, f"{repeated} vary by × {spread:.2f}" if varies else "")


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
    return mean_loss(row, metric) if metric in (DISTILLATION, LOSS) else row.reader.mean_cost(metric)


def mean_loss(row: MatchedRow, metric: str = LOSS) -> float | None:
    """Return the last loss in the curves of a row's runs, averaged; None if no curve has one."""
    losses = _last_losses(row, metric)
    return float(np.mean(losses)) if losses else None


def _spread_of_seeds(row: MatchedRow, metric: str) -> float:
    losses = _last_losses(row, metric)
    return max(losses) / min(losses)


def _last_losses(row: MatchedRow, metric: str) -> list[float]:
    return [loss for result in row.results if (loss := _last_loss(result, metric))]


def _last_loss(result: Result, metric: str) -> float | None:
    """Return the last loss of a run: the mean over the steps since the evaluation before."""
    curve = result.content.get("curve", {})
    losses = curve.get("loss", ()) if metric == LOSS else curve.get(PARTS, {}).get("distillation", ())
    known = [loss for loss in losses if loss]
    return float(known[-1]) if known else None
