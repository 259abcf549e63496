"""When to say "no answer", and how sure that is: thresholds and calibration, fitted on null odds with known answers.

*Null odds* are the score of "no answer" minus that of the best answer; a question is not answered where they exceed the
threshold. What is fitted and scored on the same questions looks too good: `cross_fit` and `cross_calibrate` fit for
every article on the others.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lamella.config import Calibration
from lamella.data.examples import Example
from lamella.inference.no_answer import na_probability
from lamella.inference.prediction import NO_SPAN
from lamella.scoring.metrics import QuestionScores

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Method = Literal["temperature", "isotonic"]

FOLDS = 5
BINS = 15
LEAST_SLOPE = 1e-3  # of probability over odds, these in units of their spread: it must not fall


def tune(scores: QuestionScores, odds: Floats) -> float:
    """The threshold with the highest F1, where `scores` are those of the best answer of every question.

    It lies midway between the odds of two questions, so that rounding moves none across; equal odds are never cut
    apart, as the official search does. Of thresholds that are equally good it is the one nearest to 0.
    """
    order = np.argsort(odds, kind="stable")
    gain = (scores.f1 - ~scores.answerable)[order]  # of answering over not answering
    distinct, first = np.unique(odds[order], return_index=True)
    totals = np.append(0.0, np.cumsum(np.add.reduceat(gain, first)))  # [k]: the k lowest odds are answered
    cuts = _between(distinct)
    # Sums of the same gains in another order differ in their last digits: they are equal.
    best = cuts[np.round(totals, 9) == np.round(totals, 9).max()]
    return float(best[np.argmin(np.abs(best))])


def cross_fit(scores: QuestionScores, odds: Floats, folds: NDArray[np.int64]) -> QuestionScores:
    """What every question scores at the threshold that was tuned without its fold."""
    withheld = np.zeros(len(odds), np.bool_)
    for fold in range(int(folds.max()) + 1):
        held_out = folds == fold
        withheld[held_out] = odds[held_out] > tune(scores.only(~held_out), odds[~held_out])
    return scores.withheld(withheld)


def cross_calibrate(odds: Floats, unanswerable: Bools, folds: NDArray[np.int64], method: Method) -> Floats:
    """The probability of "no answer" of every question, calibrated without its fold."""
    found = np.zeros(len(odds))
    for fold in range(int(folds.max()) + 1):
        held_out = folds == fold
        fitted = fit_calibration(odds[~held_out], unanswerable[~held_out], method)
        found[held_out] = na_probability(odds[held_out], fitted)
    return found


def assign_folds(examples: Sequence[Example], folds: int = FOLDS) -> NDArray[np.int64] | None:
    """The fold of every question, so that an article is in one alone and the folds are about equally large.

    Questions of one article resemble each other; one of them in the fitting would help the others. A question that is
    asked of several contexts counts as an article. Where all is one article its contexts are told apart; where there is
    but one context, nothing can be.
    """
    units: list[Hashable] = [("group", one.group) if one.group is not None else one.context.title for one in examples]
    if len(set(units)) < 2:
        units = [one.context.text for one in examples]
    sizes: dict[Hashable, int] = {}
    for unit in units:
        sizes[unit] = sizes.get(unit, 0) + 1
    if len(sizes) < 2:
        return None
    filled = [0] * min(folds, len(sizes))
    fold_of: dict[Hashable, int] = {}
    for unit, size in sorted(sizes.items(), key=lambda item: -item[1]):  # stable: of equal ones the first in the data
        fold_of[unit] = filled.index(min(filled))
        filled[fold_of[unit]] += size
    return np.array([fold_of[unit] for unit in units])


def fit_calibration(odds: Floats, unanswerable: Bools, method: Method) -> Calibration:
    """From null odds to the probability that there is no answer."""
    return fit_temperature(odds, unanswerable) if method == "temperature" else fit_isotonic(odds, unanswerable)


def fit_temperature(odds: Floats, unanswerable: Bools) -> Calibration:
    """The likeliest temperature and bias, with the targets of Platt (1999): (n + 1) / (n + 2) and 1 / (n + 2) in the
    place of 1 and 0, so that a few questions that the odds tell apart without a fault do not make it certain.

    The probability never falls with the odds: of a reader whose odds mislead, all are near the share of unanswerable
    questions.
    """
    spans = odds < -NO_SPAN / 2  # without a token to answer with, odds are far out, and would bend the curve for all
    if spans.any():
        odds, unanswerable = odds[spans], unanswerable[spans]
    centre, spread = float(odds.mean()), float(odds.std())
    if spread <= 1e-9 * float(np.abs(odds).max()):  # equal but for rounding: there is nothing to tell them apart by
        spread = 1.0
    z = (odds - centre) / spread
    many, few = int(unanswerable.sum()), int((~unanswerable).sum())
    targets = np.where(unanswerable, (many + 1) / (many + 2), 1 / (few + 2))
    slope, level = _fit_logistic(z, targets)
    if slope < LEAST_SLOPE:  # the likelihood has one peak: the best within bounds lies on the bound
        slope, level = LEAST_SLOPE, _fit_level(LEAST_SLOPE * z, targets)
    return Calibration(method="temperature", temperature=spread / slope, bias=level - slope * centre / spread)


def fit_isotonic(odds: Floats, unanswerable: Bools) -> Calibration:
    """The steps that rise with the odds and come nearest to the outcomes (pool adjacent violators)."""
    distinct, place = np.unique(odds, return_inverse=True)
    count = np.bincount(place).astype(np.float64)
    total = np.bincount(place, weights=unanswerable.astype(np.float64))
    blocks: list[tuple[float, float, int, int]] = []  # sum, count, first and last of the distinct odds
    for at in range(len(distinct)):
        block = (float(total[at]), float(count[at]), at, at)
        while blocks and blocks[-1][0] * block[1] >= block[0] * blocks[-1][1]:  # its mean is not above the one before
            before = blocks.pop()
            block = (before[0] + block[0], before[1] + block[1], before[2], at)
        blocks.append(block)
    ends = [(float(distinct[at]), total / size) for total, size, *pair in blocks for at in dict.fromkeys(pair)]
    return Calibration(method="isotonic", odds=[at for at, _ in ends], probability=[share for _, share in ends])


def expected_calibration_error(probability: Floats, outcome: Bools, bins: int = BINS) -> float:
    """How far, on average, the probability of a question lies from the share of outcomes among those of its like.

    Its like are one of `bins` groups of equal size, by rising probability. Questions of the same probability stand for
    each other, so that their order does not matter. From few questions it is never 0, however good the probabilities:
    of 15 groups of n, about 0.8 sqrt(p (1 - p) / n) is chance.
    """
    _, place = np.unique(probability, return_inverse=True)
    share = (np.bincount(place, weights=outcome.astype(np.float64)) / np.bincount(place))[place]
    order = np.argsort(probability, kind="stable")
    groups = np.array_split(order, min(bins, len(order)))
    gaps = [abs(float((probability[group] - share[group]).sum())) for group in groups]
    return math.fsum(gaps) / len(order)


def _between(values: Floats) -> Floats:
    """A cut below all of some rising values, between each two, and above all; `x > cut` for those above it alone."""
    low, high = values[:-1], values[1:]
    middle = low / 2 + high / 2
    middle = np.where((low <= middle) & (middle < high), middle, low)  # between neighbours there is no number
    below = min(values[0] - 1.0, np.nextafter(values[0], -np.inf))
    return np.concatenate([[below], middle, [values[-1] + 1.0]])


def _fit_logistic(x: Floats, targets: Floats) -> tuple[float, float]:
    """Slope and level of a logistic regression, by Newton's method; a step that goes too far is halved."""
    slope = level = 0.0
    loss = _log_loss(slope * x + level, targets)
    for _ in range(100):
        p = _logistic(slope * x + level)
        weight = p * (1 - p)
        by_slope, by_level = float(((p - targets) * x).sum()), float((p - targets).sum())
        a, b, c = float((weight * x * x).sum()) + 1e-12, float((weight * x).sum()), float(weight.sum()) + 1e-12
        determinant = a * c - b * b
        if determinant <= 0 or abs(by_slope) + abs(by_level) < 1e-10 * len(x):
            break
        move = ((c * by_slope - b * by_level) / determinant, (a * by_level - b * by_slope) / determinant)
        size = 1.0
        while size > 1e-6:
            tried = _log_loss((slope - size * move[0]) * x + level - size * move[1], targets)
            if tried < loss:
                break
            size /= 2
        else:
            break
        slope, level, loss = slope - size * move[0], level - size * move[1], tried
    return slope, level


def _fit_level(logits: Floats, targets: Floats) -> float:
    """What to add to some logits so that their probabilities agree with the targets on average, by bisection."""
    low, high = -100.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _logistic(logits + middle).mean() < targets.mean() else (low, middle)
    return (low + high) / 2


def _log_loss(logits: Floats, targets: Floats) -> float:
    return float((np.logaddexp(0.0, logits) - targets * logits).sum())


def _logistic(logits: Floats) -> Floats:
    """Without overflow, however large the logits."""
    return np.exp(-np.logaddexp(0.0, -logits))
