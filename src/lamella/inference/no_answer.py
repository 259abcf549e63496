"""The probability of "no answer", from null odds and a fitted calibration."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lamella.calibration import Calibration

Floats = NDArray[np.float64]


def na_probability(odds: Floats, calibration: Calibration | None) -> Floats:
    """Return the probability of "no answer"; without a calibration, an uncalibrated logistic function of the odds.

    With the method `features`, the odds of a prediction are calibrated log-odds already.
    """
    if calibration is None or calibration.method == "features":
        return logistic(odds)
    if calibration.method == "isotonic":
        return np.interp(odds, calibration.odds, calibration.probability)
    return logistic(odds / calibration.temperature + calibration.bias)


def logistic(logits: Floats) -> Floats:
    """Return 1 / (1 + exp(-logits)) without overflow, however large the logits."""
    return np.exp(-np.logaddexp(0.0, -logits))
