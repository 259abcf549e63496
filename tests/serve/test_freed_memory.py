"""Memory that was freed goes back to the system."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from lamella.serve import freed_memory
from lamella.serve.freed_memory import FreedMemory, return_freed_memory

PIECES, SIZE = 2000, 20_000  # bytes: too small to be returned when they are freed


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_it_returns_what_other_allocations_keep_in_the_heap() -> None:
    pieces = [bytearray(SIZE) for _ in range(PIECES)]
    kept = pieces[::50]  # so that the heap cannot shrink from its end
    del pieces
    before = resident()
    if not return_freed_memory():
        pytest.skip("needs glibc")
    assert before - resident() > PIECES * SIZE // 2
    assert len(kept) == PIECES // 50


def test_many_requests_are_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, ran = [], threading.Event()
    monkeypatch.setattr(freed_memory, "SECONDS", 0.05)
    monkeypatch.setattr(freed_memory, "return_freed_memory", lambda: (runs.append(1), ran.set()))
    memory = FreedMemory()
    for _ in range(100):
        memory.request()
    assert ran.wait(10)
    assert len(runs) == 1
    ran.clear()
    memory.request()
    assert ran.wait(10)
