"""Broken inputs of every kind: a clear error or a result, never a traceback, and nothing half-written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from broken.kind import Bench, sample
from broken.kinds import KINDS

SAMPLED = 10  # inputs of each kind; `make test-slow` tries all of them
TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_of_each_kind(kind: str, tmp_path: Path) -> None:
    _skip_without_libraries(kind)
    bench = Bench(KINDS[kind], tmp_path)
    for outcome, fault in bench.attempt(None):
        assert not fault
        assert outcome.code == 0 or bench.kind.reports
    chosen = sample(bench.damages, SAMPLED, kind)
    assert len(chosen) == SAMPLED
    refused = 0
    for damage in chosen:
        for outcome, fault in bench.attempt(damage):
            assert not fault, f"{damage.name}: {fault}"
            refused += outcome.code != 0
    assert refused or not bench.kind.refuses, "nothing was damaged"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_inputs_of_each_kind(kind: str) -> None:
    """In a process of its own, with limited memory."""
    _skip_without_libraries(kind)
    done = subprocess.run(
        [sys.executable, "-m", "broken", kind],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert not report["faults"]
    assert report["memory_mib"] < 1500
    assert report["longest_seconds"] < 60


def test_the_corpus_is_large_and_has_no_name_twice(tmp_path: Path) -> None:
    names = [damage.name for damage in Bench(KINDS["squad"], tmp_path).damages]
    assert len(names) > 800
    assert len(set(names)) == len(names)


def _skip_without_libraries(kind: str) -> None:
    for library in KINDS[kind].needs:
        if find_spec(library) is None:
            pytest.skip(f"needs {library}")
