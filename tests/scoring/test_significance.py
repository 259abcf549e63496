"""Planted truth: differences that are there are found, and those that are not are not, as often as promised."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.scoring.significance import bootstrap_differences, mcnemar, paired_difference

DRAWS = 200


def planted(gain: float, *, questions: int = 300, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Exact matches [questions, 200] of pairs of readers: both find the same questions hard, and one is better."""
    rng = np.random.default_rng(seed)
    ease = rng.beta(2, 2, size=(questions, DRAWS)) * (1 - gain)
    return rng.random((questions, DRAWS)) < ease + gain, rng.random((questions, DRAWS)) < ease


def found_by_mcnemar(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float((mcnemar((ours & ~theirs).sum(axis=0), (theirs & ~ours).sum(axis=0)) < 0.05).mean())


def found_by_bootstrap(ours: np.ndarray, theirs: np.ndarray, units: np.ndarray | None = None) -> float:
    found = bootstrap_differences(ours.astype(float) - theirs, units, draws=2000)
    return float(np.mean([one.is_clear for one in found]))


def test_mcnemar_finds_what_is_there_and_not_what_is_not() -> None:
    assert found_by_mcnemar(*planted(0.2)) > 0.95
    assert 0 < found_by_mcnemar(*planted(0.0)) <= 0.09


def test_the_bootstrap_finds_what_is_there_and_not_what_is_not() -> None:
    assert found_by_bootstrap(*planted(0.2)) > 0.95
    assert 0.02 <= found_by_bootstrap(*planted(0.0)) <= 0.09


def test_questions_that_fall_together_need_paragraphs_to_be_drawn() -> None:
    """Every paragraph is right or wrong as a whole: five questions tell no more than one."""
    ours, theirs = (np.repeat(one, 5, axis=0) for one in planted(0.0, questions=120))
    assert 0.02 <= found_by_bootstrap(ours, theirs, np.arange(600) // 5) <= 0.09
    assert found_by_bootstrap(ours, theirs) > 0.2


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_the_exact_binomial_sum(won: int, lost: int) -> None:
    total, fewer = won + lost, min(won, lost)
    exact = min(1.0, 2 * sum(comb(total, heads) for heads in range(fewer + 1)) / 2**total)
    assert mcnemar(np.array([won, 0]), np.array([lost, 0])) == pytest.approx([exact, 1.0], rel=1e-9)


def test_mcnemar_stands_large_numbers() -> None:
    p = mcnemar(np.array([6000, 5000]), np.array([6000, 7000]))
    assert p[0] == 1.0
    assert 0 <= p[1] < 1e-50


def test_the_interval_is_that_of_a_single_pair() -> None:
    rng = np.random.default_rng(3)
    ours, theirs = rng.random((2, 200))
    (many,) = bootstrap_differences((ours - theirs)[:, None])
    one = paired_difference(ours, theirs)
    assert many.value == pytest.approx(one.value)
    assert (many.low, many.high) == pytest.approx((one.low, one.high), abs=0.003)


def test_equal_readers_have_no_interval_and_units_of_unlike_size_weigh_by_size() -> None:
    (same,) = bootstrap_differences(np.zeros((50, 1)), draws=100)
    assert (same.value, same.low, same.high, same.is_clear) == (0, 0, 0, False)
    (constant,) = bootstrap_differences(np.ones((6, 1)), np.array([0, 0, 0, 0, 1, 2]), draws=100)
    assert (constant.low, constant.high) == (1, 1)
