"""Fit thresholds and calibrations for "no answer", on null odds with known answers.

*Null odds* are the score of "no answer" minus the score of the best answer; a question is not answered if they exceed
the threshold. Scores on the questions that a threshold was fitted on are too good: `cross_fit` fits for every article
on the other articles. Questions may have weights, so that each of several data files counts the same.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lamella.calibration import Calibration
from lamella.data.examples import Example
from lamella.inference.no_answer import Floats, logistic
from lamella.inference.prediction import NO_SPAN
from lamella.scoring.metrics import QuestionScores

Bools = NDArray[np.bool_]
Method = Literal["temperature", "isotonic", "features"]

FOLDS = 5
BINS = 15
PRIOR = 100  # questions whose F1 does not depend on the odds
WORTHLESS = 50.0  # log-odds of the F1 of answers where no question has one
LEAST_SLOPE = 1e-3  # of the log-odds over standardised null odds: the probability must not fall as they rise


def tune(scores: QuestionScores, odds: Floats, weights: Floats | float = 1.0) -> float:
    """Return the threshold with the highest F1; `scores` are the scores of the best answer of every question.

    It lies midway between the odds of two questions, so that rounding moves no question across. Unlike the official
    search, it never separates questions with equal odds. Among equally good thresholds it is the nearest to 0.
    """
    order = np.argsort(odds, kind="stable")
    gain = (weights * (scores.f1 - ~scores.answerable))[order]  # of answering instead of abstaining
    distinct, first = np.unique(odds[order], return_index=True)
    totals = np.append(0.0, np.cumsum(np.add.reduceat(gain, first)))  # [k]: the k lowest odds are answered
    cuts = _between(distinct)
    # Sums of the same gains in a different order differ in the last digits and count as equal.
    best = cuts[np.round(totals, 9) == np.round(totals, 9).max()]
    return float(best[np.argmin(np.abs(best))])


def break_even(scores: QuestionScores, odds: Floats, weights: Floats | None = None) -> float:
    """Return the threshold where answering and abstaining have the same expected F1, given the best answers' `scores`.

    Abstaining earns the probability p of "no answer"; answering earns 1 - p times the mean F1 of the answers to
    answerable questions. Both are fitted to all questions as functions of the odds: doubtful answers are worth less.
    So chance moves this threshold less than that of `tune`, which depends on the few questions near it. It lies at most
    1 beyond the odds of the questions.
    """
    answerable = scores.answerable
    weights = np.ones(len(odds)) if weights is None else weights
    fitted = fit_temperature(odds, ~answerable, weights)
    falling, level = _fit_worth(odds[answerable], scores.f1[answerable], weights[answerable])

    def gain(threshold: float) -> float:
        """Return the log of what answering earns at these odds, relative to abstaining; it falls as they rise."""
        worth = -np.logaddexp(0.0, falling * threshold - level)
        return float(worth - threshold / fitted.temperature - fitted.bias)

    low, high = float(odds.min()) - 1.0, float(odds.max()) + 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    return (low + high) / 2


def _fit_worth(odds: Floats, f1: Floats, weights: Floats) -> tuple[float, float]:
    """Fit the mean F1 of answers to answerable questions, logistic(level - falling * odds); it never rises with them.

    A hundred questions more have the mean F1, one standard deviation below and above the mean odds: with few
    questions, all answers are worth about the same.
    """
    if not len(odds):
        return 0.0, -WORTHLESS
    spans = with_a_span(odds)
    odds, f1, weights = odds[spans], f1[spans], weights[spans]
    centre, spread = _centre_and_spread(odds)
    mean, half = np.clip((weights * f1).sum() / weights.sum(), 1e-3, 1 - 1e-3), PRIOR / 2 * weights.mean()
    x = np.concatenate([(odds - centre) / spread, [-1.0, 1.0]])
    targets, weights = np.concatenate([f1, [mean, mean]]), np.concatenate([weights, [half, half]])
    slope, level = _fit_logistic(x, targets, weights)
    if slope > 0:
        slope, level = 0.0, _fit_level(np.zeros(len(x)), targets, weights)
    return -slope / spread, level - slope * centre / spread


def cross_fit(scores: QuestionScores, odds: Floats, folds: NDArray[np.int64]) -> QuestionScores:
    """Return the score of every question at the threshold tuned without its fold."""
    withheld = np.zeros(len(odds), np.bool_)
    for fold in range(int(folds.max()) + 1):
        held_out = folds == fold
        withheld[held_out] = odds[held_out] > tune(scores.only(~held_out), odds[~held_out])
    return scores.withheld(withheld)


def assign_folds(examples: Sequence[Example], folds: int = FOLDS) -> NDArray[np.int64] | None:
    """Return the fold of every question: articles are never split, and folds are of about equal size.

    Questions on one article are similar, so fitting on some of them would help the others. A question with several
    contexts counts as an article of its own, and so does a context without a title. A single article is split by its
    contexts; a single context cannot be split, and returns None.
    """
    units: list[Hashable] = [_article(example) for example in examples]
    if len(set(units)) < 2:
        units = [example.context.text for example in examples]
    sizes: dict[Hashable, int] = {}
    for unit in units:
        sizes[unit] = sizes.get(unit, 0) + 1
    if len(sizes) < 2:
        return None
    filled = [0] * min(folds, len(sizes))
    fold_of: dict[Hashable, int] = {}
    for unit, size in sorted(sizes.items(), key=lambda item: -item[1]):  # stable: on a tie the first in the data
        fold_of[unit] = filled.index(min(filled))
        filled[fold_of[unit]] += size
    return np.array([fold_of[unit] for unit in units])


def _article(example: Example) -> Hashable:
    if example.group is not None:
        return ("group", example.group)
    return ("title", example.context.title) if example.context.title else ("text", example.context.text)


def fit_temperature(odds: Floats, unanswerable: Bools, weights: Floats | None = None) -> Calibration:
    """Fit temperature and bias by maximum likelihood, with Platt's targets.

    The probability never falls as the odds rise: for a reader with misleading odds, all probabilities are close to the
    share of unanswerable questions.
    """
    weights = np.ones(len(odds)) if weights is None else weights
    spans = with_a_span(odds)
    odds, unanswerable, weights = odds[spans], unanswerable[spans], weights[spans]
    centre, spread = _centre_and_spread(odds)
    z = (odds - centre) / spread
    low, high = platt_targets(int((~unanswerable).sum()), int(unanswerable.sum()))
    targets = np.where(unanswerable, high, low)
    slope, level = _fit_logistic(z, targets, weights)
    if slope < LEAST_SLOPE:  # the likelihood has one peak, so the constrained optimum lies on the bound
        slope, level = LEAST_SLOPE, _fit_level(LEAST_SLOPE * z, targets, weights)
    return Calibration(method="temperature", temperature=spread / slope, bias=level - slope * centre / spread)


def fit_isotonic(odds: Floats, unanswerable: Bools, weights: Floats | None = None) -> Calibration:
    """Fit the rising step function nearest to the outcomes (pool adjacent violators), between Platt's targets."""
    distinct, place = np.unique(odds, return_inverse=True)
    weights = np.ones(len(odds)) if weights is None else weights
    count, total = np.bincount(place, weights=weights), np.bincount(place, weights=weights * unanswerable)
    blocks: list[tuple[float, float, int, int]] = []  # sum, count, first and last index of the distinct odds
    for index in range(len(distinct)):
        block = (float(total[index]), float(count[index]), index, index)
        while blocks and blocks[-1][0] * block[1] >= block[0] * blocks[-1][1]:  # its mean is not above the last block's
            last = blocks.pop()
            block = (last[0] + block[0], last[1] + block[1], last[2], index)
        blocks.append(block)
    low, high = platt_targets(int((~unanswerable).sum()), int(unanswerable.sum()))
    # Rounding may make a mean smaller than the one before.
    means = np.maximum.accumulate([total / size for total, size, *_ in blocks])
    shares = (low + means * (high - low)).tolist()
    ends = [
        (float(distinct[index]), share)
        for share, (_, _, *pair) in zip(shares, blocks, strict=True)
        for index in dict.fromkeys(pair)
    ]
    return Calibration(method="isotonic", odds=[odd for odd, _ in ends], probability=[share for _, share in ends])


def with_a_span(odds: Floats) -> Bools:
    """Choose the questions to fit to: contexts without a token have extreme odds, which would distort the fit."""
    spans = odds < -NO_SPAN / 2
    return spans if spans.any() else np.ones_like(spans)


def platt_targets(answerable: int, unanswerable: int) -> tuple[float, float]:
    """Return the targets of Platt (1999) instead of 0 and 1, for these numbers of questions.

    A few questions that the odds separate perfectly then do not give certainty.
    """
    return 1 / (answerable + 2), (unanswerable + 1) / (unanswerable + 2)


def expected_calibration_error(probability: Floats, outcome: Bools, bins: int = BINS) -> float:
    """Return the expected calibration error: the mean gap between probability and observed share within groups.

    Questions are sorted by probability into `bins` groups of equal size. Questions with the same probability share
    their mean outcome, so that their order does not matter. With few questions the error is never 0, however good the
    probabilities: in 15 groups of n, about 0.8 sqrt(p (1 - p) / n) is chance.
    """
    share, groups = mean_outcomes(probability, outcome), groups_by_probability(probability, bins)
    gaps = [abs(float((probability[group] - share[group]).sum())) for group in groups]
    return math.fsum(gaps) / len(probability)


def mean_outcomes(probability: Floats, outcome: Bools) -> Floats:
    """Return for each question the mean outcome of all questions with its probability: their order does not matter."""
    _, place = np.unique(probability, return_inverse=True)
    shares: Floats = (np.bincount(place, weights=outcome.astype(np.float64)) / np.bincount(place))[place]
    return shares


def groups_by_probability(probability: Floats, groups: int) -> list[NDArray[np.intp]]:
    """Return the questions in groups of equal size, by rising probability; at most one group per question."""
    order = np.argsort(probability, kind="stable")
    return np.array_split(order, min(groups, len(order)))


def _between(values: Floats) -> Floats:
    """Return a cut below all of some rising values, between each two, and above all; `x > cut` holds only above it."""
    low, high = values[:-1], values[1:]
    middle = low / 2 + high / 2
    middle = np.where((low <= middle) & (middle < high), middle, low)  # adjacent floats have no number between them
    below = min(values[0] - 1.0, np.nextafter(values[0], -np.inf))
    return np.concatenate([[below], middle, [values[-1] + 1.0]])


def _centre_and_spread(odds: Floats) -> tuple[float, float]:
    centre, spread = float(odds.mean()), float(odds.std())
    return centre, spread if spread > 1e-9 * float(np.abs(odds).max()) else 1.0  # equal except for rounding


def _fit_logistic(x: Floats, targets: Floats, weights: Floats) -> tuple[float, float]:
    """Fit slope and level of a logistic regression by Newton's method; a step that overshoots is halved."""
    slope = level = 0.0
    loss = _log_loss(slope * x + level, targets, weights)
    for _ in range(100):
        p = logistic(slope * x + level)
        weight, error = weights * p * (1 - p), weights * (p - targets)
        by_slope, by_level = float((error * x).sum()), float(error.sum())
        a, b, c = float((weight * x * x).sum()) + 1e-12, float((weight * x).sum()), float(weight.sum()) + 1e-12
        determinant = a * c - b * b
        if determinant <= 0 or abs(by_slope) + abs(by_level) < 1e-10 * len(x):
            break
        move = ((c * by_slope - b * by_level) / determinant, (a * by_level - b * by_slope) / determinant)
        size = 1.0
        while size > 1e-6:
            tried = _log_loss((slope - size * move[0]) * x + level - size * move[1], targets, weights)
            if tried < loss:
                break
            size /= 2
        else:
            break
        slope, level, loss = slope - size * move[0], level - size * move[1], tried
    return slope, level


def _fit_level(logits: Floats, targets: Floats, weights: Floats) -> float:
    """Return the constant that makes the mean probability of some logits equal that of the targets, by bisection."""
    low, high, wanted = -100.0, 100.0, float((weights * targets).sum())
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if (weights * logistic(logits + middle)).sum() < wanted else (low, middle)
    return (low + high) / 2


def _log_loss(logits: Floats, targets: Floats, weights: Floats) -> float:
    return float((weights * (np.logaddexp(0.0, logits) - targets * logits)).sum())
