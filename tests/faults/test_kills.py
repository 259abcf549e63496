"""A command that is killed with SIGKILL at any point leaves what was finished, and completes when it is repeated.

`LAMELLA_TRUST=results/trust.json pytest tests/faults` writes the counts of kills to that file.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fault_cases import cases
from fault_trials import Trial

POINTS = int(os.environ.get("LAMELLA_KILL_POINTS", "12"))  # per command
NAMES = tuple(cases(Path()))


@pytest.mark.parametrize("trial", ["train", "export --half", "calibrate --out", "index"], indirect=True)
def test_killed_at_a_few_exact_points(trial: Trial) -> None:
    for change in (trial.changes // 2, trial.changes):
        trial.kill_at(change)
    assert trial.tally.losses == []
    assert trial.tally.equal == trial.tally.kills


@pytest.mark.slow
@pytest.mark.parametrize("trial", NAMES, indirect=True)
def test_killed_at_exact_points(trial: Trial) -> None:
    """Points that are spread over the command, the first and the last among them; POINTS is large to try them all."""
    points = {1 + round(number * (trial.changes - 1) / (POINTS - 1)) for number in range(POINTS)}
    for change in sorted(points):
        trial.kill_at(change)
    assert trial.tally.losses == []


@pytest.mark.slow
@pytest.mark.parametrize("trial", NAMES, indirect=True)
def test_killed_at_random_moments(trial: Trial) -> None:
    killed = [trial.kill_after(moment) for moment in trial.random_moments(6)]
    assert trial.tally.losses == []
    assert sum(killed) >= 2
