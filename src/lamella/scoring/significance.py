"""Whether readers differ on the same questions: bootstrap intervals and the exact McNemar test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.errors import UsageError

DRAWS = 10_000
HELD = 6_000_000  # counts that are held in memory at a time: as many draws as that makes
FEW = 200  # readers, times scores
ROUNDING = 1e-6  # in the half as long numbers of the products, what cancels out may leave this much


@dataclass(frozen=True)
class Difference:
    """The mean of one reader's scores less that of another's, and where it would lie for other such questions."""

    value: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0

    def in_percent(self) -> Difference:
        """The same for scores that are told as percentages."""
        return Difference(100 * self.value, 100 * self.low, 100 * self.high)


def paired_difference(
    ours: Sequence[float] | NDArray[np.float64],
    theirs: Sequence[float] | NDArray[np.float64],
    *,
    level: float = 0.95,
    draws: int = DRAWS,
    seed: int = 0,
) -> Difference:
    """The difference of two readers' scores, a question at the same place in both, with a bootstrap interval.

    Questions are drawn with replacement, as many as there are, `draws` times; the interval leaves out the same share of
    the mean differences at both ends. Drawing *questions* keeps the pairs together: where both readers fail at the
    hard ones, the interval is far narrower than those of the two scores.

    Most differences are equal (0, 1 or -1), so it is counted how often each *value* is drawn: the same distribution
    as drawing the questions themselves, for a fraction of the work.
    """
    if not 0 < level < 1:
        raise UsageError(f"level: expected a share between 0 and 1. Got {level}.")
    if len(ours) != len(theirs) or not len(ours):
        raise UsageError(f"expected the scores of the same questions. Got {len(ours)} and {len(theirs)} of them.")
    differences = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
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
    """The mean of every column of `differences` [questions, readers] with its interval.

    Rows are drawn with replacement, the same for all readers; with `units`, a number for each row, all rows of a unit
    are drawn together (the questions of a paragraph stand and fall together). Only how often a unit is drawn matters,
    so a draw is a row of counts, and all means of many draws are one product of matrices.
    """
    sums, sizes = differences, np.ones(len(differences))
    if units is not None:
        sums = np.zeros((int(units.max()) + 1, differences.shape[1]))
        np.add.at(sums, units, differences)
        sizes = np.bincount(units).astype(np.float64)
    count = len(sizes)
    rng = np.random.default_rng(seed)
    # In long numbers, where there are few readers, so that the ends of an interval are the same on every machine.
    kind: Any = np.float64 if differences.shape[1] <= FEW else np.float32
    table = np.column_stack([sums, sizes]).astype(kind)
    means = np.empty((differences.shape[1], draws), kind)  # quantiles are taken along what lies together
    chunk = max(1, HELD // count)
    for begin in range(0, draws, chunk):
        end = min(begin + chunk, draws)
        drawn = rng.integers(count, size=(end - begin, count)) + count * np.arange(end - begin)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=(end - begin) * count).reshape(end - begin, count)
        totals = counts.astype(kind) @ table
        means[:, begin:end] = (totals[:, :-1] / totals[:, -1:]).T
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=1)
    low, high = (np.where(np.abs(end) < ROUNDING, 0.0, end) for end in (low, high))
    return [
        Difference(float(value), float(least), float(most))
        for value, least, most in zip(differences.mean(axis=0), low, high, strict=True)
    ]


def mcnemar(won: NDArray[np.integer], lost: NDArray[np.integer]) -> NDArray[np.float64]:
    """How likely so lopsided a division of questions into won and lost is, if each went either way like a coin.

    The exact test, on two sides: twice the chance of min(won, lost) heads or fewer in won + lost throws, at most 1.
    With 1 won and 7 lost that is 2 * (1 + 8) / 256 = 0.0703.
    """
    won, lost = np.asarray(won), np.asarray(lost)
    throws, fewer = won + lost, np.minimum(won, lost)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, throws.max(initial=0) + 1)))])
    chances = []
    for n, k in zip(throws.tolist(), fewer.tolist(), strict=True):
        heads = np.arange(k + 1)
        terms = log_factorial[n] - log_factorial[heads] - log_factorial[n - heads] - n * np.log(2.0)
        chances.append(min(1.0, 2.0 * float(np.exp(terms).sum())))
    return np.array(chances)
