"""Scores on other kinds of texts, computed by hand for four questions."""

from __future__ import annotations

import pytest

from lamella.calibration import Calibration
from lamella.decoding_options import DecodingOptions
from lamella.inference.prediction import Prediction
from lamella.scoring.domain_scores import domain_scores
from samples import example

EXAMPLES = [
    example("Huygens discovered Titan.", "Huygens", "Who discovered Titan?", "right"),
    example("Cassini discovered Rhea.", "Cassini", "Who discovered Rhea?", "refused"),
    example("Titan is a moon.", None, "Who is Titan?", "withheld"),
    example("Rhea is a moon.", None, "Who is Rhea?", "tempted"),
]


def prediction(text: str, null_odds: float) -> Prediction:
    return Prediction(((text, 0, len(text), 0.0, 0.5, 0), ("", 0, 0, null_odds, 0.5, 0)), null_odds)


PREDICTIONS = {
    "right": prediction("Huygens", -4.0),
    "refused": prediction("Cassini", 1.0),
    "withheld": prediction("moon", 3.0),
    "tempted": prediction("moon", -1.0),
}


def test_scores_at_the_threshold_of_the_reader() -> None:
    row = domain_scores("set.json", EXAMPLES, PREDICTIONS, DecodingOptions(null_score_diff_threshold=0.5))
    assert (row.data, row.questions, row.unanswerable, row.threshold) == ("set.json", 4, 2, 0.5)
    assert row.f1 == row.f1_at_0 == 50.0
    assert row.best_f1 == 75.0  # above 1, or below -1
    assert (row.has_answer_f1, row.no_answer_f1, row.refused) == (50.0, 50.0, 50.0)
    assert row.f1_low <= row.f1 <= row.f1_high


def test_an_eager_reader_refuses_less() -> None:
    calibration = Calibration(method="temperature", answerable=0.5)
    unsure = DecodingOptions(null_score_diff_threshold=-1.5, calibration=calibration)
    sure = DecodingOptions(null_score_diff_threshold=-1.0, calibration=calibration)
    # 90 % answerable questions raise a threshold by log 9, about 2.2: null odds of 1 are above -1.5 + 2.2.
    assert domain_scores("set.json", EXAMPLES, PREDICTIONS, unsure).refused_eager == 50.0
    assert domain_scores("set.json", EXAMPLES, PREDICTIONS, sure).refused_eager == 0.0


def test_risk_is_of_the_surest_answers() -> None:
    row = domain_scores("set.json", EXAMPLES, PREDICTIONS, DecodingOptions())
    # By confidence: right, tempted (no answer exists), refused (its best answer is right), withheld.
    assert row.risk[:2] == [0.0, 0.0]
    assert row.risk[4] == 50.0
    assert row.risk[-1] == 50.0
    assert row.area_under_risk == pytest.approx(100 * (0 + 1 / 2 + 1 / 3 + 1 / 2) / 4, abs=0.01)
    assert row.coverage_at_80 == 25.0


def test_an_article_as_the_answer_to_an_unanswerable_question_is_a_risk_with_the_official_f1() -> None:
    predictions = {"right": prediction("Huygens", -1.0), "tempted": prediction("a", -4.0)}
    row = domain_scores("set.json", [EXAMPLES[0], EXAMPLES[3]], predictions, DecodingOptions())
    assert row.f1 == row.no_answer_f1 == 100.0  # as in the official script, "a" normalises to ""
    assert (row.risk[0], row.risk[-1], row.coverage_at_80) == (100.0, 50.0, 0.0)
    assert row.area_under_risk == 75.0


def test_a_set_of_answerable_questions_has_no_calibration_error() -> None:
    answerable = {example.id: PREDICTIONS[example.id] for example in EXAMPLES[:2]}
    row = domain_scores("set.json", EXAMPLES[:2], answerable, DecodingOptions())
    assert row.calibration_error is None
    assert row.no_answer_f1 is None
    assert domain_scores("set.json", EXAMPLES, PREDICTIONS, DecodingOptions()).calibration_error is not None
