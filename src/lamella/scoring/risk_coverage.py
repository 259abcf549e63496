"""Risk and coverage: how good the answers are if a reader gives only those that it is surest of.

Questions are sorted by confidence, the surest first. If the first k of n are answered, the *coverage* is k / n, and the
*risk* is one minus the mean score of these k answers. An answer to a question that has none scores 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def risk_coverage(confidence: ArrayLike, correct_f1: ArrayLike) -> tuple[Floats, Floats]:
    """Return the coverage and the risk for k = 1 … n; `correct_f1` are the scores of the answers, from 0 to 1.

    Questions with the same confidence share their mean score, so that their order does not matter.
    """
    scores, _ = _surest_first(confidence, correct_f1)
    ranks = np.arange(1, len(scores) + 1)
    return ranks / max(1, len(scores)), 1 - np.cumsum(scores) / ranks


def area(confidence: ArrayLike, correct_f1: ArrayLike) -> float:
    """Return the area under the risk-coverage curve: the mean risk over all coverages (Geifman and El-Yaniv 2017)."""
    _, risk = risk_coverage(confidence, correct_f1)
    return float(risk.mean()) if len(risk) else 0.0


def coverage_at(confidence: ArrayLike, correct_f1: ArrayLike, *, accuracy: float = 0.8) -> float:
    """Return the largest share of the questions that can be answered with this mean score (Kamath et al. 2020).

    No threshold separates questions with the same confidence, so they are answered together or not at all.
    """
    coverage, risk = risk_coverage(confidence, correct_f1)
    _, last = _surest_first(confidence, correct_f1)
    reached = last & (1 - risk >= accuracy - 1e-9)  # sums of the same scores in another order differ in the last digits
    return float(coverage[reached].max()) if reached.any() else 0.0


def _surest_first(confidence: ArrayLike, correct_f1: ArrayLike) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the scores, the surest first and ties with their mean, and whether each is the last of its tie."""
    sure, scores = np.asarray(confidence, np.float64), np.asarray(correct_f1, np.float64)
    if sure.shape != scores.shape or sure.ndim != 1:
        raise ValueError(f"expected one score for each confidence, got {sure.shape} and {scores.shape}")
    _, place = np.unique(-sure, return_inverse=True)
    means = np.bincount(place, weights=scores) / np.maximum(1, np.bincount(place))
    place = np.sort(place)
    return means[place], np.append(place[1:] != place[:-1], True)[: len(place)]
