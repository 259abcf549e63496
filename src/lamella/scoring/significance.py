"""Significance of differences between readers on the same questions: bootstrap intervals, exact McNemar test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.errors import UsageError

DRAWS = 10_000
DRAWS_IN_MEMORY = 6_000_000  # counts held in memory at once
FEW_COLUMNS = 200  # readers times scores; up to here everything is computed in double precision
ROUNDING = 1e-6  # in single precision, terms that cancel may leave this much


@dataclass(frozen=True)
class Difference:
    """The mean difference between the scores of two readers, with its confidence interval."""

    value: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0

    def in_percent(self) -> Difference:
        """Return the difference in percentage points."""
        return Difference(100 * self.value, 100 * self.low, 100 * self.high)


def paired_difference(
    first: Sequence[float] | NDArray[np.float64],
    second: Sequence[float] | NDArray[np.float64],
    *,
    level: float = 0.95,
    draws: int = DRAWS,
    seed: int = 0,
) -> Difference:
    """Return the mean difference of two readers' scores, paired by question, with a bootstrap interval.

    All questions are resampled with replacement, `draws` times; the interval leaves out the same share of the mean
    differences at both ends. Resampling *questions* keeps the pairs together: where both readers fail on the hard
    questions, the interval is far narrower than the intervals of the two scores.

    Most differences are equal (0, 1 or -1), so only the number of times each *value* is drawn is sampled: the same
    distribution as resampling questions, for a fraction of the work.
    """
    if not 0 < level < 1:
        raise UsageError(f"level: expected a number between 0 and 1, got {level}.")
    if len(first) != len(second) or not len(first):
        raise UsageError(f"expected scores of the same questions, got {len(first)} and {len(second)} scores.")
    differences = np.asarray(first, np.float64) - np.asarray(second, np.float64)
    values, counts = np.unique(differences, return_counts=True)
    total = len(differences)
    rng = np.random.default_rng(seed)
    drawn = np.concatenate(
        [
            rng.multinomial(total, counts / total, size=min(1000, draws - begin)) @ values
            for begin in range(0, draws, 1000)
        ]
    )
    low, high = np.quantile(drawn / total, [(1 - level) / 2, (1 + level) / 2])
    return Difference(float(differences.mean()), float(low), float(high))


def bootstrap_differences(
    differences: NDArray[np.float64],
    units: NDArray[np.integer] | None = None,
    *,
    level: float = 0.95,
    draws: int = DRAWS,
    seed: int = 0,
) -> list[Difference]:
    """Return the mean of every column of `differences` [questions, readers] with its bootstrap interval.

    See `bootstrap_intervals`, which gives the intervals of several levels for the price of one.
    """
    return bootstrap_intervals(differences, units, levels=[level], draws=draws, seed=seed)[0]


def bootstrap_intervals(
    differences: NDArray[np.float64],
    units: NDArray[np.integer] | None = None,
    *,
    levels: Sequence[float],
    draws: int = DRAWS,
    seed: int = 0,
) -> list[list[Difference]]:
    """Return the mean of every column of `differences` [questions, readers] with its interval, for each level.

    Rows are resampled with replacement, the same rows for all readers. With `units`, a number per row, all rows of a
    unit are drawn together (the questions of a paragraph are not independent). Only how often a unit is drawn matters,
    so a draw is a row of counts, and the means of many draws are one matrix product.
    """
    sums, sizes = differences, np.ones(len(differences))
    if units is not None:
        sums = np.zeros((int(units.max()) + 1, differences.shape[1]))
        np.add.at(sums, units, differences)
        sizes = np.bincount(units).astype(np.float64)
    count = len(sizes)
    rng = np.random.default_rng(seed)
    # Double precision for few readers, so that intervals are identical on every machine.
    kind: Any = np.float64 if differences.shape[1] <= FEW_COLUMNS else np.float32
    table = np.column_stack([sums, sizes]).astype(kind)
    means = np.empty((differences.shape[1], draws), kind)  # quantiles run along contiguous memory
    chunk = max(1, DRAWS_IN_MEMORY // count)
    for begin in range(0, draws, chunk):
        end = min(begin + chunk, draws)
        drawn = rng.integers(count, size=(end - begin, count)) + count * np.arange(end - begin)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=(end - begin) * count).reshape(end - begin, count)
        totals = counts.astype(kind) @ table
        means[:, begin:end] = (totals[:, :-1] / totals[:, -1:]).T
    values = differences.mean(axis=0)
    intervals = []
    for level in levels:
        low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=1)
        low, high = (np.where(np.abs(end) < ROUNDING, 0.0, end) for end in (low, high))
        intervals.append([Difference(*map(float, ends)) for ends in zip(values, low, high, strict=True)])
    return intervals


def mcnemar(won: NDArray[np.integer], lost: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the p-values of the exact two-sided McNemar test, from the questions won and lost against another reader.

    The p-value is twice the probability of min(won, lost) or fewer heads in won + lost throws of a coin, at most 1.
    With 1 won and 7 lost it is 2 * (1 + 8) / 256 = 0.0703.
    """
    won, lost = np.asarray(won), np.asarray(lost)
    throws, fewer = won + lost, np.minimum(won, lost)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, throws.max(initial=0) + 1)))])
    p_values = []
    for n, k in zip(throws.tolist(), fewer.tolist(), strict=True):
        heads = np.arange(k + 1)
        terms = log_factorial[n] - log_factorial[heads] - log_factorial[n - heads] - n * np.log(2.0)
        p_values.append(min(1.0, 2.0 * float(np.exp(terms).sum())))
    return np.array(p_values)
