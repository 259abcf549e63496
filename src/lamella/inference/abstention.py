"""When to give no answer: log-odds from several features of an n-best list, and the effect of a known prior.

Nothing here needs torch: a calibration is a few numbers in the model's folder.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from lamella.calibration import Calibration
from lamella.decoding_options import DecodingOptions
from lamella.errors import UsageError, shorten
from lamella.inference.no_answer import Floats, logistic, na_probability
from lamella.inference.prediction import Candidate, Prediction
from lamella.inference.protocols import QAModel

Model = TypeVar("Model", bound=QAModel)

LARGEST_MARGIN = 20.0  # where there is no second answer
WIDEST = 3.0  # standard deviations to which a feature is cut: far from the data it was fitted on, it means little
FITTED_AT = 0.5  # share of answerable questions, where a calibration does not record it

# How eager to answer: the share of answerable questions that is assumed.
PRIORS = {"eager": 0.9, "balanced": 0.5, "strict": 0.25}


def _null_odds(prediction: Prediction) -> float:
    return prediction.null.score - prediction.best_span.score


def _margin(prediction: Prediction) -> float:
    best = prediction.best_span
    others = (candidate for candidate in prediction.candidates if candidate.text and not _overlap(candidate, best))
    second = next(others, None)
    return LARGEST_MARGIN if second is None else min(LARGEST_MARGIN, best.score - second.score)


def _length(prediction: Prediction) -> float:
    return math.log1p(len(prediction.best_span.text))


def _windows(prediction: Prediction) -> float:
    return math.log(prediction.windows)


def _entropy(prediction: Prediction) -> float:
    return -sum(row.probability * math.log(row.probability) for row in prediction.candidates if row.probability > 0)


def _overlap(first: Candidate, second: Candidate) -> bool:
    if first.context != second.context:
        return False
    return first.begin_char < second.end_char and second.begin_char < first.end_char


# The features: null odds; lead of the best answer over the best that does not overlap it; its length; how much text was
# read; how widely the n-best list is spread.
FEATURES: dict[str, Callable[[Prediction], float]] = {
    "null_odds": _null_odds,
    "margin": _margin,
    "length": _length,
    "windows": _windows,
    "entropy": _entropy,
}


def feature_table(predictions: Sequence[Prediction], names: Sequence[str] = tuple(FEATURES)) -> Floats:
    """Return the features of some predictions, a row for each [N, F]."""
    rows = [[FEATURES[name](prediction) for name in names] for prediction in predictions]
    return np.array(rows, np.float64).reshape(len(rows), len(names))


def log_odds(table: Floats, calibration: Calibration) -> Floats:
    """Return the log-odds of "no answer" for rows of the features that a calibration names."""
    means, scales, weights = (
        np.array([getattr(feature, key) for feature in calibration.features]) for key in ("mean", "scale", "weight")
    )
    odds: Floats = np.clip((table - means) / scales, -WIDEST, WIDEST) @ weights + calibration.bias
    return odds


def calibrated(prediction: Prediction, decoding: DecodingOptions) -> Prediction:
    """Return the prediction with the null odds that decide, computed from the scores of its n-best list.

    Where a model is calibrated by features, they are its log-odds. Otherwise the penalty for long texts is added: of
    many windows, one is likely to hold a span that looks like an answer.
    """
    calibration = decoding.calibration
    if calibration is not None and calibration.method == "features":
        table = feature_table([prediction], [feature.name for feature in calibration.features])
        return replace(prediction, null_odds=float(log_odds(table, calibration)[0]))
    if not decoding.window_penalty:
        return prediction
    penalty = decoding.window_penalty * math.log2(prediction.windows)
    return replace(prediction, null_odds=_null_odds(prediction) + penalty)


def at_prior(decoding: DecodingOptions, answerable: float) -> DecodingOptions:
    """Return the decoding options for questions of which this share has an answer, by Bayes' rule.

    The log-odds of "no answer" fall by the difference between the log-odds of that share and of the share that they
    were fitted at. Without a calibration, null odds count as log-odds, fitted at one half.
    """
    if isinstance(answerable, bool) or not isinstance(answerable, Real) or not 0 < answerable < 1:
        raise UsageError(
            f"answerable: expected the share of questions with an answer, between 0 and 1, got {shorten(answerable)}."
        )
    calibration = decoding.calibration or Calibration(method="temperature")
    shift = _logit(float(answerable)) - _logit(calibration.answerable or FITTED_AT)
    moved: dict[str, Any] = {"answerable": float(answerable), "bias": calibration.bias - shift}
    threshold = decoding.null_score_diff_threshold
    if calibration.method == "temperature":
        threshold += calibration.temperature * shift
    elif calibration.method == "isotonic":
        kept, odds = na_probability(np.array([threshold]), calibration), calibration.odds
        shares = logistic(_logits(calibration.probability) - shift)
        moved = {"answerable": float(answerable), "probability": shares.tolist()}
        # The threshold moves to where its probability is now; on a step of the curve, that is not a single place.
        there = float(np.interp(kept, shares, odds, left=odds[0] - 1, right=odds[-1] + 1)[0])
        threshold = threshold if not shift else max(threshold, there) if shift > 0 else min(threshold, there)
    return decoding.model_copy(
        update={"null_score_diff_threshold": threshold, "calibration": calibration.model_copy(update=moved)}
    )


def expecting(model: Model, answerable: float | None) -> Model:
    """Return the model as it is for questions of which this share has an answer; None leaves it unchanged."""
    if answerable is None:
        return model
    moved = copy.copy(model)  # the weights are shared
    moved.decoding = at_prior(model.decoding, answerable)  # type: ignore[misc]  # read-only for those that only ask
    return moved


def _logit(share: float) -> float:
    return math.log(share) - math.log1p(-share)


def _logits(shares: Sequence[float]) -> Floats:
    """Return log-odds; old files may hold probabilities of exactly 0 and 1."""
    clipped = np.clip(np.array(shares, np.float64), 1e-9, 1 - 1e-9)
    return np.log(clipped) - np.log1p(-clipped)
