"""Fixtures of the fault tests: what the commands read, and the counts of kills."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from broken.counts import TRUST, read_counts
from fault_cases import cases, write_material
from fault_trials import Tally, Trial
from forks import ForkServer
from lamella.files import write_json
from lamella.version import __version__


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        write_material(folder)
    return folder


@pytest.fixture(scope="session")
def tallies() -> Iterator[dict[str, Tally]]:
    """The counts of all kills by command; written to the section `kills` of the file that $LAMELLA_TRUST names."""
    counts: dict[str, Tally] = {}
    yield counts
    if counts and (file := os.environ.get(TRUST)):
        commands = {name: asdict(tally) for name, tally in counts.items()}
        total = {
            "kills": sum(tally.kills for tally in counts.values()),
            "equal": sum(tally.equal for tally in counts.values()),
            "reported": sum(tally.reported for tally in counts.values()),
            "losses": sum(len(tally.losses) for tally in counts.values()),
        }
        path = Path(file)
        write_json(path, {**read_counts(path), "kills": {"lamella": __version__, "total": total, "commands": commands}})


@pytest.fixture
def trial(
    request: pytest.FixtureRequest, material: Path, tmp_path: Path, forks: ForkServer, tallies: dict[str, Tally]
) -> Trial:
    """A command by its name; its kills are counted."""
    trial = Trial(cases(material)[request.param], tmp_path / "work", forks)
    trial.tally = tallies.setdefault(request.param, trial.tally)
    return trial
