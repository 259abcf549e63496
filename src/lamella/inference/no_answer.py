"""The probability of "no answer", from null odds and a calibration."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lamella.config import Calibration

Floats = NDArray[np.float64]


def na_probability(odds: Floats, calibration: Calibration | None) -> Floats:
    """The probability of "no answer"; without a calibration the logistic function of the odds, which is but a guess."""
    if calibration is not None and calibration.method == "isotonic":
        return np.interp(odds, calibration.odds, calibration.probability)
    logits = odds if calibration is None else odds / calibration.temperature + calibration.bias
    return _logistic(logits)


def _logistic(logits: Floats) -> Floats:
    """Without overflow, however large the logits."""
    return np.exp(-np.logaddexp(0.0, -logits))
