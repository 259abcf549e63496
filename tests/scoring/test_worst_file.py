"""A calibration for several files: no file is calibrated much worse than it could be."""

from __future__ import annotations

import numpy as np
import pytest

from lamella.inference.no_answer import na_probability
from lamella.inference.prediction import NO_SPAN
from lamella.scoring.threshold import expected_calibration_error, fit_temperature
from lamella.scoring.worst_file import fit_to_worst


def planted(temperatures: list[float], *, spread: float = 6.0, count: int = 3000) -> tuple:
    """Questions of several files, each with a temperature of its own."""
    rng = np.random.default_rng(3)
    odds = rng.normal(0, spread, (len(temperatures), count))
    unanswerable = rng.random(odds.shape) < 1 / (1 + np.exp(-odds / np.array(temperatures)[:, None]))
    return odds.ravel(), unanswerable.ravel(), np.repeat(np.arange(len(temperatures)), count)


def test_the_fit_lies_between_two_files() -> None:
    odds, unanswerable, files = planted([2.0, 8.0])
    assert 3 < fit_to_worst(odds, unanswerable, files).temperature < 6


def test_many_files_of_one_kind_do_not_outweigh_one_of_another() -> None:
    odds, unanswerable, files = planted([2.0, 2.0, 2.0, 2.0, 8.0])
    few = fit_to_worst(*planted([2.0, 8.0]))
    worst, mean = fit_to_worst(odds, unanswerable, files), fit_temperature(odds, unanswerable)
    assert worst.temperature == pytest.approx(few.temperature, rel=0.1)

    def errors(calibration) -> list[float]:
        probability = na_probability(odds, calibration)
        return [expected_calibration_error(probability[files == n], unanswerable[files == n]) for n in range(5)]

    assert max(errors(worst)) < 0.75 * max(errors(mean))


def test_a_file_of_hard_questions_does_not_count_more() -> None:
    odds, unanswerable, files = planted([3.0, 3.0])
    hard = files == 1
    rng = np.random.default_rng(4)
    odds[hard] = rng.normal(0, 0.5, hard.sum())  # nearly a coin toss each, and calibrated like the others
    unanswerable[hard] = rng.random(hard.sum()) < 1 / (1 + np.exp(-odds[hard] / 3.0))
    assert fit_to_worst(odds, unanswerable, files).temperature == pytest.approx(3.0, rel=0.15)


def test_the_numbers_and_sizes_of_the_files_do_not_matter() -> None:
    odds, unanswerable, files = planted([2.0, 8.0])
    fitted = fit_to_worst(odds, unanswerable, files)
    renumbered = fit_to_worst(odds, unanswerable, np.where(files == 0, 7, 2))
    twice = np.concatenate([np.arange(len(odds)), np.flatnonzero(files == 1)])  # the second file twice
    larger = fit_to_worst(odds[twice], unanswerable[twice], files[twice])
    for other in (renumbered, larger):
        assert other.temperature == pytest.approx(fitted.temperature, rel=0.03)
        assert other.bias == pytest.approx(fitted.bias, abs=0.05)


def test_contexts_without_a_span_do_not_count() -> None:
    odds, unanswerable, files = planted([2.0, 8.0])
    without = np.full(5, -2 * NO_SPAN)  # null odds of contexts without a token
    fitted = fit_to_worst(odds, unanswerable, files)
    more = (np.append(odds, without), np.append(unanswerable, [False] * 5), np.append(files, [0] * 5))
    assert fit_to_worst(*more) == fitted
