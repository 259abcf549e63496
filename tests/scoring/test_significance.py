"""Planted differences are found, and absent ones are not, as often as the tests promise."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.errors import UsageError
from lamella.scoring.significance import bootstrap_differences, mcnemar, paired_difference

DRAWS = 200


def planted(gain: float, *, questions: int = 300, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Exact matches [questions, 200] of pairs of readers with the same hard questions; the first gains `gain`."""
    rng = np.random.default_rng(seed)
    ease = rng.beta(2, 2, size=(questions, DRAWS)) * (1 - gain)
    return rng.random((questions, DRAWS)) < ease + gain, rng.random((questions, DRAWS)) < ease


def found_by_mcnemar(first: np.ndarray, second: np.ndarray) -> float:
    return float((mcnemar((first & ~second).sum(axis=0), (second & ~first).sum(axis=0)) < 0.05).mean())


def found_by_bootstrap(first: np.ndarray, second: np.ndarray, units: np.ndarray | None = None) -> float:
    found = bootstrap_differences(first.astype(float) - second, units, draws=2000)
    return float(np.mean([difference.is_clear for difference in found]))


def test_mcnemar_finds_planted_differences_only() -> None:
    assert found_by_mcnemar(*planted(0.2)) > 0.95
    assert 0 < found_by_mcnemar(*planted(0.0)) <= 0.09


def test_the_bootstrap_finds_planted_differences_only() -> None:
    assert found_by_bootstrap(*planted(0.2)) > 0.95
    assert 0.02 <= found_by_bootstrap(*planted(0.0)) <= 0.09


def test_dependent_questions_need_paragraphs_to_be_resampled() -> None:
    """Every paragraph is right or wrong as a whole, so five questions carry no more information than one."""
    first, second = (np.repeat(matches, 5, axis=0) for matches in planted(0.0, questions=120))
    assert 0.02 <= found_by_bootstrap(first, second, np.arange(600) // 5) <= 0.09
    assert found_by_bootstrap(first, second) > 0.2


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_the_exact_binomial_sum(won: int, lost: int) -> None:
    total, fewer = won + lost, min(won, lost)
    exact = min(1.0, 2 * sum(comb(total, heads) for heads in range(fewer + 1)) / 2**total)
    assert mcnemar(np.array([won, 0]), np.array([lost, 0])) == pytest.approx([exact, 1.0], rel=1e-9)


def test_mcnemar_handles_large_numbers() -> None:
    p = mcnemar(np.array([6000, 5000]), np.array([6000, 7000]))
    assert p[0] == 1.0
    assert 0 <= p[1] < 1e-50


def test_the_interval_equals_that_of_a_single_pair() -> None:
    rng = np.random.default_rng(3)
    first, second = rng.random((2, 200))
    (many,) = bootstrap_differences((first - second)[:, None])
    single = paired_difference(first, second)
    assert many.value == pytest.approx(single.value)
    assert (many.low, many.high) == pytest.approx((single.low, single.high), abs=0.003)


def test_equal_readers_have_an_empty_interval_and_units_weigh_by_size() -> None:
    (same,) = bootstrap_differences(np.zeros((50, 1)), draws=100)
    assert (same.value, same.low, same.high, same.is_clear) == (0, 0, 0, False)
    (constant,) = bootstrap_differences(np.ones((6, 1)), np.array([0, 0, 0, 0, 1, 2]), draws=100)
    assert (constant.low, constant.high) == (1, 1)


# --- a single pair of readers

scores = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30)


def slow_bootstrap(differences: np.ndarray, draws: int) -> np.ndarray:
    """The definition: questions resampled with replacement."""
    rng = np.random.default_rng(1)
    chosen = rng.integers(0, len(differences), size=(draws, len(differences)))
    return np.quantile(differences[chosen].mean(1), [0.025, 0.975])


def test_counting_values_equals_resampling_questions() -> None:
    rng = np.random.default_rng(0)
    first = rng.integers(0, 3, 80) / 2
    second = np.where(rng.random(80) < 0.6, first, rng.random(80).round(1))
    found = paired_difference(first, second)
    assert found.value == pytest.approx((first - second).mean())
    assert [found.low, found.high] == pytest.approx(slow_bootstrap(first - second, 20_000), abs=0.006)


@given(scores)
def test_swapping_the_readers_flips_the_sign(pairs: list[tuple[float, float]]) -> None:
    first, second = zip(*pairs, strict=True)
    forward, back = paired_difference(first, second, draws=400), paired_difference(second, first, draws=400)
    assert forward.value == pytest.approx(-back.value)
    assert forward.low - 1e-9 <= forward.high
    differences = np.subtract(first, second)
    assert differences.min() - 1e-9 <= forward.low
    assert forward.high <= differences.max() + 1e-9


def test_equal_readers_have_no_difference() -> None:
    found = paired_difference([0.0, 0.5, 1.0], [0.0, 0.5, 1.0])
    assert (found.value, found.low, found.high, found.is_clear) == (0.0, 0.0, 0.0, False)


def test_the_same_seed_gives_the_same_interval_and_a_wider_level_a_wider_one() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.random(50), rng.random(50)
    assert paired_difference(first, second) == paired_difference(first, second)
    narrow, wide = (paired_difference(first, second, level=level) for level in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.high < wide.high


def test_pairs_make_the_interval_narrow() -> None:
    """Both fail on the same questions: 2 points are clear, although each score alone is uncertain by 6."""
    hard = np.random.default_rng(0).random(1000) < 0.4
    second = np.where(hard, 0.0, 1.0)
    first = second.copy()
    first[np.flatnonzero(hard)[:20]] = 1.0
    found = paired_difference(first, second).in_percent()
    assert found.value == pytest.approx(2.0)
    assert found.is_clear
    assert found.high - found.low < 2.0


def test_intervals_cover_the_truth_as_often_as_they_should() -> None:
    """200 pairs of readers on 300 questions: intervals miss the truth about one time in twenty."""
    rng = np.random.default_rng(7)
    missed = {0.0: 0, 0.1: 0}
    for planted in missed:
        for _ in range(200):
            second = (rng.random(300) < 0.5).astype(float)
            changed = rng.random(300)
            first = np.where(changed < 0.15 + planted / 2, 1.0, np.where(changed > 0.85 + planted / 2, 0.0, second))
            # P(first = 1) - P(second = 1) = (0.15 + p/2) + 0.7 * 0.5 - 0.5 = p / 2
            found = paired_difference(first, second, draws=1000)
            missed[planted] += not found.low <= planted / 2 <= found.high
    assert all(2 <= times <= 20 for times in missed.values()), missed


def test_scores_that_cannot_be_paired_are_refused() -> None:
    with pytest.raises(UsageError, match="the same questions, got 2 and 1 scores"):
        paired_difference([0.0, 1.0], [0.0])
    with pytest.raises(UsageError, match="got 0 and 0"):
        paired_difference([], [])
    with pytest.raises(UsageError, match="level: expected a number between 0 and 1, got 95"):
        paired_difference([0.0], [0.0], level=95)
