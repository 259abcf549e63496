"""Whether many readers differ from one on the same questions: exact McNemar, and intervals from shared draws."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.scoring.paired import DRAWS, Difference

HELD = 6_000_000  # counts that are held in memory at a time: as many draws as that makes
FEW = 200  # readers, times scores
ROUNDING = 1e-6  # in the half as long numbers of the products, what cancels out may leave this much


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
