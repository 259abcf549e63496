"""The second of two processes that write the same folder is refused in one line, and the first ends as if alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fault_cases import cases
from fault_trials import Trial
from forks import ForkServer

WRITERS = [name for name in cases(Path()) if name != "ask"]  # answering never waits for another process


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    server = ForkServer(tmp_path_factory.mktemp("other"))
    yield server
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_the_second_is_refused(name: str, material: Path, tmp_path: Path, forks: ForkServer, other: ForkServer) -> None:
    trial = Trial(cases(material)[name], tmp_path / "work", forks)
    assert "another process is writing here; wait for it" in trial.refuse_a_second(other)
