"""Micro-batches: what waits runs together, within a budget, and no request waits or fails because of another."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import perf_counter

import numpy as np
import pytest
from numpy.typing import NDArray

from lamella.models.window_engine import Pace, Row
from lamella.serve.calls import CALL, Call
from lamella.serve.micro_batch import MicroBatcher
from lamella.serve.refusals import RefusedError, TimedOutError


class CountingEngine:
    """Returns the token ids as logits; waits before the first batch, and before the window with token 99."""

    def __init__(self, patience: float = 0.0, overlap: int = 0) -> None:
        self.pace, self.last = Pace(lists=2, windows=None, patience=patience), overlap
        self.batches: list[list[int]] = []  # the tokens of each window
        self.go, self.go_on = threading.Event(), threading.Event()

    def overlap(self, windows: int) -> int:
        return self.last

    def run(self, rows: Sequence[Row]) -> Iterator[NDArray[np.float32]]:
        self.batches.append([len(row.input_ids) for row in rows])
        assert self.go.wait(10)
        for row in rows:
            if row.input_ids[0] == 13:
                raise ValueError("this window is at fault")
            if row.input_ids[0] == 99:
                assert self.go_on.wait(10)
            yield np.stack([row.input_ids, row.input_ids]).astype(np.float32)


def window(token: int, length: int = 10) -> Row:
    ids = np.full(length, token)
    return Row(None, ids, ids, ids > 0)


def wait_until(batcher: MicroBatcher, windows: int) -> None:
    end = perf_counter() + 10
    while batcher.waiting < windows:
        assert perf_counter() < end
        threading.Event().wait(0.005)


def ask(batcher: MicroBatcher, *rows: Row) -> list[float]:
    return [float(logits[0, 0]) for logits in batcher.logits(rows)]


def test_windows_that_wait_run_together_up_to_the_budget() -> None:
    engine = CountingEngine()
    batcher = MicroBatcher(engine, most_tokens=50)
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(ask, batcher, window(1))
        while not engine.batches:
            threading.Event().wait(0.005)
        others = []
        for token in range(2, 9):
            others.append(pool.submit(ask, batcher, window(token)))
            wait_until(batcher, token - 1)  # so that their order is known
        engine.go.set()
        assert [future.result() for future in (first, *others)] == [[float(token)] for token in range(1, 9)]
    assert engine.batches == [[10], [10] * 5, [10] * 2]
    batcher.close()


def test_a_request_beyond_the_budget_runs_alone() -> None:
    engine = CountingEngine()
    engine.go.set()
    batcher = MicroBatcher(engine, most_tokens=5)
    assert ask(batcher, window(1), window(2)) == [1, 2]
    batcher.close()


def test_only_the_request_at_fault_fails_and_nobody_waits_for_the_last() -> None:
    engine = CountingEngine()
    batcher = MicroBatcher(engine, most_tokens=1000)
    with ThreadPoolExecutor(8) as pool:
        pool.submit(ask, batcher, window(1))
        while not engine.batches:
            threading.Event().wait(0.005)
        futures = {}
        for number, token in enumerate((2, 99, 13, 3)):
            futures[token] = pool.submit(ask, batcher, window(token))
            wait_until(batcher, number + 1)
        engine.go.set()
        assert futures[2].result(10) == [2]  # while the next window is still computed
        assert not futures[99].done()
        engine.go_on.set()
        assert futures[99].result(10) == [99]
        with pytest.raises(ValueError, match="at fault"):
            futures[13].result(10)
        assert futures[3].result(10) == [3]
    batcher.close()


def test_expired_and_abandoned_requests_are_not_computed() -> None:
    engine = CountingEngine()
    batcher = MicroBatcher(engine, most_tokens=1000)

    def late(call: Call) -> list[float]:
        CALL.set(call)
        try:
            return ask(batcher, window(5))
        finally:
            CALL.set(None)

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(ask, batcher, window(1))
        while not engine.batches:
            threading.Event().wait(0.005)
        expired = pool.submit(late, Call(perf_counter() + 0.05, 0.05))
        abandoned_call = Call(perf_counter() + 10, 10)
        abandoned = pool.submit(late, abandoned_call)
        wait_until(batcher, 2)
        abandoned_call.abandoned = True
        with pytest.raises(TimedOutError):
            expired.result(10)  # before the engine goes on
        engine.go.set()
        assert first.result(10) == [1]
        with pytest.raises(RefusedError):
            abandoned.result(10)
    assert engine.batches == [[10]]
    batcher.close()


def test_an_engine_with_patience_waits_for_windows_that_are_announced() -> None:
    engine = CountingEngine(patience=5.0)
    engine.go.set()
    batcher = MicroBatcher(engine, most_tokens=30)
    cutting, go = threading.Event(), threading.Event()

    def cut_and_ask(token: int) -> list[float]:
        with batcher.announced():
            cutting.set()
            assert go.wait(10)
            return ask(batcher, window(token))

    begin = perf_counter()
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(cut_and_ask, 2)
        assert cutting.wait(10)
        first = pool.submit(ask, batcher, window(1))
        wait_until(batcher, 1)
        go.set()
        assert [first.result(), late.result()] == [[1], [2]]
    assert ask(batcher, window(3)) == [3]  # nothing is announced any more
    assert perf_counter() - begin < 5
    assert engine.batches == [[10, 10], [10]]
    batcher.close()


def test_an_engine_with_patience_waits_for_failed_threads_no_longer() -> None:
    engine = CountingEngine(patience=60.0)
    engine.go.set()
    batcher = MicroBatcher(engine, most_tokens=30)
    with pytest.raises(ZeroDivisionError), batcher.announced():
        raise ZeroDivisionError
    assert ask(batcher, window(1)) == [1]
    batcher.close()


def test_an_engine_with_patience_waits_until_the_budget_is_reached() -> None:
    engine = CountingEngine(patience=60.0)
    engine.go.set()
    batcher = MicroBatcher(engine, most_tokens=20)
    with batcher.announced(), ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(ask, batcher, window(token)) for token in (1, 2)]
        assert [future.result(10) for future in futures] == [[1], [2]]
    assert engine.batches == [[10, 10]]
    batcher.close()


def test_a_batch_that_has_run_keeps_no_reader_in_memory() -> None:
    engine = CountingEngine()
    engine.go.set()
    batcher = MicroBatcher(engine, most_tokens=100)
    deltas = [np.zeros(1) for _ in range(3)]  # of readers
    for delta in deltas:
        batcher.logits([replace(window(1), delta=delta)])
    kept = [weakref.ref(delta) for delta in deltas]
    del delta
    deltas.clear()
    end = perf_counter() + 10
    while any(each() is not None for each in kept):
        assert perf_counter() < end
        threading.Event().wait(0.005)
    batcher.close()


def test_a_closed_queue_still_answers() -> None:
    engine = CountingEngine()
    engine.go.set()
    batcher = MicroBatcher(engine, most_tokens=20)
    assert ask(batcher, window(1)) == [1]
    batcher.close()
    assert ask(batcher, window(2)) == [2]


@pytest.mark.parametrize("overlap", [0, 1])
def test_the_next_batch_begins_while_the_last_windows_run_if_the_engine_allows_it(overlap: int) -> None:
    engine, seconds = CountingEngine(overlap=overlap), []
    begin = perf_counter()
    batcher = MicroBatcher(engine, most_tokens=1000, observe=lambda windows, tokens, ran: seconds.append(ran))
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(ask, batcher, window(1), window(2))]
        while not engine.batches:
            threading.Event().wait(0.005)
        futures += [pool.submit(ask, batcher, window(3))]
        wait_until(batcher, 1)
        slow = pool.submit(ask, batcher, window(99))
        wait_until(batcher, 2)
        engine.go.set()
        assert [future.result(10) for future in futures] == [[1, 2], [3]]
        last = pool.submit(ask, batcher, window(4))
        if overlap:
            assert last.result(10) == [4]
        else:
            wait_until(batcher, 1)
        assert not slow.done()
        engine.go_on.set()
        assert (slow.result(10), last.result(10)) == ([99], [4])
    batcher.close()
    assert engine.batches == [[10, 10], [10, 10], [10]]
    assert 0 < sum(seconds) <= perf_counter() - begin  # time in which two batches run is counted once
