"""The interval of a difference: it covers what was planted, and cries wolf as seldom as it says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.errors import UsageError
from lamella.scoring.significance import paired_difference

scores = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30)


def slow_bootstrap(differences: np.ndarray, draws: int) -> np.ndarray:
    """The definition: whole questions drawn with replacement."""
    rng = np.random.default_rng(1)
    chosen = rng.integers(0, len(differences), size=(draws, len(differences)))
    return np.quantile(differences[chosen].mean(1), [0.025, 0.975])


def test_counting_values_is_drawing_questions() -> None:
    rng = np.random.default_rng(0)
    ours = rng.integers(0, 3, 80) / 2
    theirs = np.where(rng.random(80) < 0.6, ours, rng.random(80).round(1))
    found = paired_difference(ours, theirs)
    assert found.value == pytest.approx((ours - theirs).mean())
    assert [found.low, found.high] == pytest.approx(slow_bootstrap(ours - theirs, 20_000), abs=0.006)


@given(scores)
def test_the_other_way_round_the_signs_turn(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = zip(*pairs, strict=True)
    there, back = paired_difference(ours, theirs, draws=400), paired_difference(theirs, ours, draws=400)
    assert there.value == pytest.approx(-back.value)
    assert there.low - 1e-9 <= there.high
    differences = np.subtract(ours, theirs)
    assert differences.min() - 1e-9 <= there.low
    assert there.high <= differences.max() + 1e-9


def test_equal_readers_have_no_difference() -> None:
    found = paired_difference([0.0, 0.5, 1.0], [0.0, 0.5, 1.0])
    assert (found.value, found.low, found.high, found.is_clear) == (0.0, 0.0, 0.0, False)


def test_the_same_seed_gives_the_same_interval_and_a_wider_level_a_wider_one() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = rng.random(50), rng.random(50)
    assert paired_difference(ours, theirs) == paired_difference(ours, theirs)
    narrow, wide = (paired_difference(ours, theirs, level=level) for level in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.high < wide.high


def test_pairs_make_the_interval_narrow() -> None:
    """Both fail at the same questions: 2 points are clear, though each score by itself is uncertain by 6."""
    hard = np.random.default_rng(0).random(1000) < 0.4
    theirs = np.where(hard, 0.0, 1.0)
    ours = theirs.copy()
    ours[np.flatnonzero(hard)[:20]] = 1.0
    found = paired_difference(ours, theirs).in_percent()
    assert found.value == pytest.approx(2.0)
    assert found.is_clear
    assert found.high - found.low < 2.0


def test_a_planted_difference_is_covered_and_equal_readers_seldom_differ() -> None:
    """200 pairs of readers on 300 questions: intervals miss the truth about one time in twenty."""
    rng = np.random.default_rng(7)
    missed = {0.0: 0, 0.1: 0}
    for planted in missed:
        for _ in range(200):
            theirs = (rng.random(300) < 0.5).astype(float)
            changed = rng.random(300)
            ours = np.where(changed < 0.15 + planted / 2, 1.0, np.where(changed > 0.85 + planted / 2, 0.0, theirs))
            # P(ours = 1) - P(theirs = 1) = (0.15 + p/2) + 0.7 * 0.5 - 0.5 = p / 2
            found = paired_difference(ours, theirs, draws=1000)
            missed[planted] += not found.low <= planted / 2 <= found.high
    assert all(2 <= times <= 20 for times in missed.values()), missed


def test_what_cannot_be_compared() -> None:
    with pytest.raises(UsageError, match=r"the same questions\. Got 2 and 1 of them"):
        paired_difference([0.0, 1.0], [0.0])
    with pytest.raises(UsageError, match="Got 0 and 0"):
        paired_difference([], [])
    with pytest.raises(UsageError, match=r"level: expected a share between 0 and 1\. Got 95"):
        paired_difference([0.0], [0.0], level=95)
