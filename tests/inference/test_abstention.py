"""When a reader gives no answer: the features of an n-best list, and Bayes' rule for a known share of answers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.calibration import Calibration, FeatureWeight
from lamella.decoding_options import DecodingOptions
from lamella.errors import UsageError
from lamella.inference.abstention import (
    FEATURES,
    LARGEST_MARGIN,
    PRIORS,
    WIDEST,
    at_prior,
    calibrated,
    feature_table,
)
from lamella.inference.no_answer import na_probability
from lamella.inference.prediction import rank, rank_passages, rank_together
from lamella.scoring.threshold import expected_calibration_error, fit_isotonic, fit_temperature

SPANS = [("in Rome", 0, 7, 4.0, 0), ("Rome", 3, 7, 3.0, 0), ("Ostia", 20, 25, 1.5, 0)]
WEIGHTS = [
    FeatureWeight(name="null_odds", mean=-1.0, scale=2.0, weight=1.5),
    FeatureWeight(name="margin", mean=2.0, scale=1.0, weight=-0.5),
]
BY_FEATURES = Calibration(method="features", features=WEIGHTS, bias=0.25, answerable=0.4)
FEATURED = DecodingOptions(calibration=BY_FEATURES)
LOGIT = lambda p: math.log(p / (1 - p))  # noqa: E731


def test_features_by_hand() -> None:
    prediction = rank(SPANS, 2.0, windows=8)
    row = dict(zip(FEATURES, feature_table([prediction])[0].tolist(), strict=True))
    shares = np.exp([4.0, 3.0, 2.0, 1.5]) / np.exp([4.0, 3.0, 2.0, 1.5]).sum()
    assert row == pytest.approx(
        {
            "null_odds": -2.0,
            "margin": 2.5,  # "Rome" overlaps the best answer
            "length": math.log(8),
            "windows": math.log(8),
            "entropy": -(shares * np.log(shares)).sum(),
        }
    )
    elsewhere = rank([SPANS[0], ("Rome", 3, 7, 3.0, 1)], 2.0)  # the same place in another context is another answer
    assert feature_table([elsewhere], ["margin"])[0, 0] == 1.0
    assert feature_table([rank(SPANS[:2], 2.0)], ["margin"])[0, 0] == LARGEST_MARGIN
    assert np.isfinite(feature_table([rank([], 2.0)])).all()  # a context without a token
    assert tuple(FEATURES) == get_args(FeatureWeight.model_fields["name"].annotation)


def test_log_odds_replace_the_null_odds() -> None:
    prediction = rank(SPANS, 2.0)
    found = calibrated(prediction, FEATURED)
    assert found.null_odds == pytest.approx(1.5 * (-2 + 1) / 2 - 0.5 * (2.5 - 2) / 1 + 0.25)
    assert calibrated(found, FEATURED) == found  # from the scores, not from the odds
    assert (found.rows, found.best_span.text) == (prediction.rows, "in Rome")
    assert na_probability(np.array([found.null_odds]), BY_FEATURES)[0] == pytest.approx(
        1 / (1 + math.exp(-found.null_odds))
    )
    far = calibrated(rank([("Rome", 0, 4, 900.0, 0)], 0.0), FEATURED)
    assert far.null_odds == pytest.approx(-1.5 * WIDEST - 0.5 * WIDEST + 0.25)
    for other in (None, Calibration(method="temperature", temperature=3.0)):
        assert calibrated(prediction, DecodingOptions(calibration=other)) is prediction


def test_the_penalty_grows_with_each_doubling_of_the_windows() -> None:
    options = DecodingOptions(window_penalty=0.5)
    odds = [calibrated(rank(SPANS, 2.0, windows=windows), options).null_odds for windows in (1, 2, 4, 20)]
    assert odds == pytest.approx([-2.0, -1.5, -1.0, -2.0 + 0.5 * math.log2(20)])
    once = calibrated(rank(SPANS, 2.0, windows=4), options)
    assert calibrated(once, options) == once
    apart = [calibrated(rank([SPANS[0]], 2.0, windows=3), options), calibrated(rank([SPANS[2]], 1.0), options)]
    assert calibrated(rank_together(apart, 5), options).null_odds == pytest.approx(-3.0 + 0.5 * math.log2(4))


def test_contexts_and_passages_are_merged_before_they_are_calibrated() -> None:
    apart = [calibrated(rank([SPANS[0]], 2.0, windows=3), FEATURED), calibrated(rank([SPANS[2]], 1.0), FEATURED)]
    together = calibrated(rank_together(apart, 5), FEATURED)
    assert together == replace(calibrated(rank([SPANS[0], (*SPANS[2][:4], 1)], 1.0), FEATURED), windows=4)
    assert rank_passages(apart, [(0, 0), (0, 100)], 5).windows == 4


def test_a_calibration_is_checked() -> None:
    assert Calibration.model_validate(BY_FEATURES.model_dump()) == BY_FEATURES
    for broken in ({"method": "features"}, {"method": "temperature", "features": WEIGHTS}):
        with pytest.raises(ValueError, match="features with the method features"):
            Calibration.model_validate(broken)


def planted(rng: np.random.Generator, count: int, answerable: float) -> tuple[np.ndarray, np.ndarray]:
    """Null odds that differ between the two kinds of questions, whatever their shares."""
    unanswerable = rng.random(count) > answerable
    return rng.normal(np.where(unanswerable, 2.0, -2.0), 2.0), unanswerable


@pytest.mark.parametrize("fit", [fit_temperature, fit_isotonic])
@pytest.mark.parametrize("answerable", [0.1, 0.9])
def test_a_known_share_of_answers_makes_probabilities_right(fit: Any, answerable: float) -> None:
    rng = np.random.default_rng(0)
    calibration = fit(*planted(rng, 20_000, 0.5)).model_copy(update={"answerable": 0.5})
    odds, unanswerable = planted(rng, 20_000, answerable)
    fitted = DecodingOptions(calibration=calibration, null_score_diff_threshold=0.0)
    moved = at_prior(fitted, answerable)
    before, after = (
        expected_calibration_error(na_probability(odds, decoding.calibration), unanswerable)
        for decoding in (fitted, moved)
    )
    assert before > 0.05
    assert after < 0.02
    right = [((odds > decoding.null_score_diff_threshold) == unanswerable).mean() for decoding in (fitted, moved)]
    assert right[1] > right[0] + 0.02  # more of its decisions are right


CALIBRATIONS = [
    None,
    Calibration(method="temperature", temperature=3.0, bias=0.5, answerable=0.3),
    Calibration(method="isotonic", odds=[-3.0, -1.0, 1.0, 2.0], probability=[0.1, 0.2, 0.2, 0.9], answerable=0.5),
    Calibration(method="isotonic", odds=[-1.0, 1.0], probability=[0.0, 1.0]),  # as older versions wrote it
    BY_FEATURES,
]


@pytest.mark.parametrize("calibration", CALIBRATIONS)
@given(share=st.floats(0.01, 0.99), threshold=st.floats(-4, 4))
def test_probabilities_and_decisions_move_together(
    calibration: Calibration | None, share: float, threshold: float
) -> None:
    """The log-odds fall by the same amount everywhere, and the threshold keeps its probability."""
    decoding = DecodingOptions(calibration=calibration, null_score_diff_threshold=threshold)
    moved = at_prior(decoding, share)
    shift = LOGIT(share) - LOGIT((calibration and calibration.answerable) or 0.5)
    raw = [rank([("x", 0, 1, 0.0, 0)], odds) for odds in np.linspace(-3, 3, 13)]
    before, after = ([calibrated(prediction, options).null_odds for prediction in raw] for options in (decoding, moved))
    p, q = na_probability(np.array(before), calibration), na_probability(np.array(after), moved.calibration)
    inside = (p > 1e-6) & (p < 1 - 1e-6) & (q > 1e-6) & (q < 1 - 1e-6)
    if calibration is None or calibration.method != "isotonic":  # between its steps, isotonic odds are interpolated
        assert np.log(q / (1 - q))[inside] == pytest.approx(np.log(p / (1 - p))[inside] - shift, abs=1e-6)
    answered = [
        sum(odds <= options.null_score_diff_threshold for odds in found)
        for options, found in ((decoding, before), (moved, after))
    ]
    assert answered[1] >= answered[0] if shift > 0 else answered[1] <= answered[0]


@pytest.mark.parametrize("calibration", CALIBRATIONS)
def test_the_share_it_was_fitted_at_changes_nothing(calibration: Calibration | None) -> None:
    decoding = DecodingOptions(calibration=calibration, null_score_diff_threshold=0.5)
    fitted_at = (calibration and calibration.answerable) or 0.5
    moved = at_prior(decoding, fitted_at)
    odds = np.linspace(-3, 3, 13)
    assert moved.null_score_diff_threshold == 0.5
    assert na_probability(odds, moved.calibration) == pytest.approx(na_probability(odds, calibration), abs=1e-8)
    if calibration is None or calibration.method != "isotonic":
        there_and_back = at_prior(at_prior(decoding, 0.9), fitted_at)
        assert there_and_back.null_score_diff_threshold == pytest.approx(0.5)


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, math.nan, "many", True, None])
def test_a_share_lies_between_0_and_1(share: Any) -> None:
    with pytest.raises(UsageError, match="answerable: expected the share of questions with an answer, between 0 and 1"):
        at_prior(DecodingOptions(), share)


def test_eager_answers_more_than_strict() -> None:
    thresholds = [at_prior(DecodingOptions(), PRIORS[name]).null_score_diff_threshold for name in PRIORS]
    assert list(PRIORS) == ["eager", "balanced", "strict"]
    assert thresholds == pytest.approx([math.log(9), 0, -math.log(3)])
