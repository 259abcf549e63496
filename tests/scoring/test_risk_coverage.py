"""Risk-coverage curves equal their definition, question by question, and do not depend on the order of ties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.scoring.risk_coverage import area, coverage_at, risk_coverage

QUESTIONS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.5, 0.9]), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=12
)


def test_by_hand() -> None:
    confidence, f1 = [0.2, 0.9, 0.6, 0.4], [0.0, 1.0, 1.0, 0.5]
    coverage, risk = risk_coverage(confidence, f1)
    assert coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert risk == pytest.approx([0, 0, 0.5 / 3, 1.5 / 4])
    assert area(confidence, f1) == pytest.approx((0 + 0 + 0.5 / 3 + 1.5 / 4) / 4)
    assert coverage_at(confidence, f1, accuracy=0.8) == 0.75
    assert coverage_at(confidence, f1, accuracy=0.5) == 1.0
    assert coverage_at(confidence, f1, accuracy=1.0) == 0.5
    assert coverage_at([0.9, 0.1], [0.0, 1.0], accuracy=0.8) == 0.0


def test_a_later_point_counts_where_the_accuracy_is_reached_again() -> None:
    assert coverage_at([5, 4, 3, 2, 1], [0.0, 1.0, 1.0, 1.0, 1.0], accuracy=0.8) == 1.0


def test_without_questions() -> None:
    assert [len(values) for values in risk_coverage([], [])] == [0, 0]
    assert (area([], []), coverage_at([], [])) == (0.0, 0.0)
    with pytest.raises(ValueError, match="one score for each"):
        area([1.0], [])


@given(QUESTIONS, st.randoms(use_true_random=False))
def test_the_order_does_not_matter_and_a_tie_is_never_separated(questions: list[tuple[float, float]], random) -> None:
    confidence, f1 = zip(*questions, strict=True)
    mixed, mixed_f1 = zip(*random.sample(questions, len(questions)), strict=True)
    assert area(mixed, mixed_f1) == pytest.approx(area(confidence, f1))
    for accuracy in (0.5, 0.8, 1.0):
        found = coverage_at(confidence, f1, accuracy=accuracy)
        assert found == coverage_at(mixed, mixed_f1, accuracy=accuracy)
        shares = [0.0]
        for threshold in set(confidence):  # by definition: answer whatever is at least as sure as a threshold
            answered = [score for sure, score in questions if sure >= threshold]
            if np.mean(answered) >= accuracy - 1e-9:
                shares.append(len(answered) / len(questions))
        assert found == pytest.approx(max(shares))


def test_a_better_order_has_a_smaller_area() -> None:
    rng = np.random.default_rng(0)
    f1 = (rng.random(2000) < 0.6).astype(float)
    noise = rng.normal(size=2000)
    areas = [area(quality * f1 + noise, f1) for quality in (-1, 0, 1, 3)]
    assert areas == sorted(areas, reverse=True)
    assert areas[1] == pytest.approx(0.4, abs=0.03)  # an order that says nothing: the risk of answering everything
