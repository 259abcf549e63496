"""Broken inputs of every kind: a clear error or a result, never a traceback, and nothing half-written."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from broken.counts import TRUST, keep_kind
from broken.kind import Bench, sample
from broken.kinds import KINDS
from lamella.data.windows.tokenizer_check import find_problem
from lamella.user_cache import STATE, is_intact
from samples import plain_tokenizer

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.sampled])
def test_a_sample_of_each_kind(kind: str, tmp_path: Path) -> None:
    _skip_without_libraries(kind)
    bench = Bench(KINDS[kind], tmp_path)
    for outcome, fault in bench.attempt(None, each=2 if bench.kind.again else None):
        assert not fault
        assert outcome.code == 0 or bench.kind.reports
    chosen = sample(bench.damages, bench.kind.sampled, kind)
    assert len(chosen) == bench.kind.sampled
    refused = 0
    for damage in chosen:
        for outcome, fault in bench.attempt(damage):
            assert not fault, f"{damage.name}: {fault}"
            refused += outcome.code != 0
    assert refused or bench.kind.again or not bench.kind.refuses, "nothing was damaged"


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
    if file := os.environ.get(TRUST):
        keep_kind(Path(file), report)
    assert not report["faults"]
    assert report["memory_mib"] < 1500
    assert report["longest_seconds"] < 60


def test_the_corpus_is_large_and_has_no_name_twice(tmp_path: Path) -> None:
    names = [damage.name for damage in Bench(KINDS["squad"], tmp_path).damages]
    assert len(names) > 800
    assert len(set(names)) == len(names)


def test_an_unknown_token_that_a_copy_would_lose_is_a_problem() -> None:
    """Which of two tokens with one id is kept differs each time."""
    table = json.loads(plain_tokenizer().backend_tokenizer.to_str())
    table["model"]["vocab"]["[UNK]"] = table["model"]["vocab"]["[PAD]"]
    problems = set()
    for _ in range(30):
        tokenizer = Tokenizer.from_str(json.dumps(table))
        problems.add(problem := find_problem(tokenizer))
        if problem is None:
            assert copy.deepcopy(tokenizer).encode("\U0002a6a5").ids
    assert problems > {None}


@pytest.mark.parametrize("content", ["[" * 3000, "[]", "{", '{"model.onnx": 1}'])
def test_a_damaged_folder_of_the_cache_is_not_intact(content: str, tmp_path: Path) -> None:
    (tmp_path / STATE).write_text(content)
    assert not is_intact(tmp_path)


def _skip_without_libraries(kind: str) -> None:
    for library in KINDS[kind].needs:
        if find_spec(library) is None:
            pytest.skip(f"needs {library}")
