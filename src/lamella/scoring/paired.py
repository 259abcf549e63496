"""Whether one reader is better than another on the same questions: a difference with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lamella.errors import UsageError

DRAWS = 10_000


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
