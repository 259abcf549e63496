"""Fit a calibration to several files, so that it is not far off on any of them."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lamella.calibration import Calibration
from lamella.inference.no_answer import Floats
from lamella.scoring.threshold import Bools, fit_temperature, with_a_span

ROUNDS = 60


def fit_to_worst(odds: Floats, unanswerable: Bools, files: NDArray[np.int64]) -> Calibration:
    """Fit temperature and bias so that the largest loss of a file is as small as possible.

    The loss of a file is its log loss beyond that of a calibration fitted to it alone, so that a file whose questions
    are hard does not count more. A fit to the mean of the files is calibrated well on kinds of texts that several files
    have, and badly on the others.

    The largest loss is smallest for some weights of the files. In every round, those that lose more get more weight.
    """
    spans = with_a_span(odds)
    odds, unanswerable, files = odds[spans], unanswerable[spans], files[spans]
    places = [np.flatnonzero(files == number) for number in np.unique(files)]
    alone = [_log_loss(fit_temperature(odds[at], unanswerable[at]), odds[at], unanswerable[at]) for at in places]
    shares = np.full(len(places), 1 / len(places))
    best, least = fit_temperature(odds, unanswerable), math.inf
    weights = np.zeros(len(odds))
    for number in range(1, ROUNDS + 1):
        for at, share in zip(places, shares, strict=True):
            weights[at] = len(odds) * share / len(at)
        fitted = fit_temperature(odds, unanswerable, weights)
        losses = np.array([_log_loss(fitted, odds[at], unanswerable[at]) for at in places]) - alone
        if losses.max() < least:
            best, least = fitted, float(losses.max())
        shares = shares * np.exp(losses / max(1e-9, np.abs(losses).max()) / math.sqrt(number))
        shares /= shares.sum()
    return best


def _log_loss(calibration: Calibration, odds: Floats, unanswerable: Bools) -> float:
    logits = odds / calibration.temperature + calibration.bias
    return float(np.logaddexp(0.0, np.where(unanswerable, -logits, logits)).mean())
