"""Micro-batches: the windows of requests that are answered at the same time go through the encoder together.

A list of questions is answered in a thread of its own, which waits here for the logits of its windows. A thread takes
what waits, up to a budget of tokens, and runs it. While it runs, the next windows gather, so batches grow with the
load. Two threads take turns: where every core computes a window of its own, the next batch begins before the last
windows of this one are finished, so that no core is idle while windows wait. A GPU gains from waiting a few
milliseconds for windows that other threads have announced; a CPU does not, and the patience of its engine is 0.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from lamella.models.window_engine import Engine, Row
from lamella.serve.calls import CALL, Call
from lamella.serve.refusals import RefusedError

Logits = list[NDArray[np.float32]]
Observer = Callable[[int, int, float], None]  # windows, tokens, and seconds that the engine ran since the last batch


@dataclass(eq=False)
class _Job:
    """Windows of a list of questions that wait for their logits."""

    rows: Sequence[Row]
    call: Call | None
    arrived: float = field(default_factory=perf_counter)
    finished: threading.Event = field(default_factory=threading.Event)
    logits: Logits | None = None
    error: BaseException | None = None

    @property
    def tokens(self) -> int:
        return sum(len(row.input_ids) for row in self.rows)

    def finish(self, logits: Logits | None = None, error: BaseException | None = None) -> None:
        self.logits, self.error = logits, error
        self.finished.set()


class MicroBatcher:
    """The queue of an engine, with the threads that empty it. Any thread may ask for logits."""

    def __init__(self, engine: Engine, *, most_tokens: int, observe: Observer | None = None) -> None:
        self.engine, self.most_tokens, self._observe = engine, most_tokens, observe
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._turn = threading.Lock()  # held by the thread whose batch runs, until the next one may begin
        self._running, self._counted = 0, 0.0  # batches that run; the time until which their seconds are counted
        self._started = self._closed = False
        self._announced = 0  # threads that cut windows
        self._own = threading.local()  # whether this thread is one of them

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Announce that this thread cuts windows, which a batch may wait for, until it asks for their logits."""
        with self._changed:
            self._announced += 1
            self._own.announced = True
        try:
            yield
        finally:
            with self._changed:
                self._end_announcement()

    def _end_announcement(self) -> None:
        if getattr(self._own, "announced", False):
            self._own.announced = False
            self._announced -= 1
            self._changed.notify()

    def logits(self, rows: Sequence[Row]) -> Logits:
        """Return the logits [2, T] of each window, when the engine has computed them."""
        call = CALL.get()
        if call is not None:
            call.check()
        job = _Job(rows, call)
        with self._changed:
            closed = self._closed
            self._end_announcement()
            if not closed:
                if not self._started:
                    self._started = True
                    for _ in range(2):
                        threading.Thread(target=self._work, name="lamella-batches", daemon=True).start()
                self._jobs.append(job)
                self._changed.notify()
        if closed:  # the reader has been replaced, and this is one of its last requests
            self._run([job])
        job.finished.wait(None if call is None else max(0.0, call.deadline - perf_counter()))
        if call is not None and not job.finished.is_set():
            call.check()
            job.finished.wait()  # woken before the deadline
        if job.error is not None:
            raise job.error
        assert job.logits is not None
        return job.logits

    def close(self) -> None:
        """End the threads when their queue is empty; later calls compute their logits themselves."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    @property
    def waiting(self) -> int:
        """The number of windows that wait."""
        with self._changed:
            return sum(len(job.rows) for job in self._jobs)

    def _work(self) -> None:
        while self._run_next():  # a function of its own: a batch that is kept would keep its readers in memory
            pass

    def _run_next(self) -> bool:
        """Wait for a batch and run it; return whether there was one."""
        with ExitStack() as turn:
            turn.enter_context(self._turn)
            batch = self._next()
            if batch:
                self._run(batch, end_turn=turn.close)
            return bool(batch)

    def _next(self) -> list[_Job]:
        """Wait for jobs; return as many as the budget of tokens allows, at least one; none when closed."""
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait()
            if self._jobs and self.engine.pace.patience:
                until = self._jobs[0].arrived + self.engine.pace.patience
                while self._announced and not self._closed and sum(job.tokens for job in self._jobs) < self.most_tokens:
                    if (left := until - perf_counter()) <= 0:
                        break
                    self._changed.wait(left)
            batch: list[_Job] = []
            tokens = 0
            while self._jobs and (not batch or tokens + self._jobs[0].tokens <= self.most_tokens):
                job = self._jobs.popleft()
                tokens += job.tokens
                batch.append(job)
            return batch

    def _run(self, batch: Sequence[_Job], end_turn: Callable[[], None] = lambda: None) -> None:
        wanted = []
        for job in batch:
            try:
                if job.call is not None:
                    job.call.check()
                wanted.append(job)
            except RefusedError as error:
                job.finish(error=error)
        if not wanted:
            return
        rows = [row for job in wanted for row in job.rows]
        left, overlap = len(rows), self.engine.overlap(len(rows))
        begin = self._begin()
        try:
            logits = iter(self.engine.run(rows))
            for job in wanted:  # none waits for the windows of those behind it
                own = list(islice(logits, len(job.rows)))
                if job.call is not None:
                    job.call.note_run(job.arrived, begin, perf_counter())
                job.finish(own)
                left -= len(own)
                if left <= overlap:
                    end_turn()
        except BaseException as error:
            self._end()
            if len(wanted) == 1:
                wanted[0].finish(error=error)
                return
            for job in wanted:  # one of them is at fault; the others must not fail with it
                if not job.finished.is_set():
                    self._run([job])
            return
        seconds = self._end()
        if self._observe is not None:
            self._observe(len(rows), sum(len(row.input_ids) for row in rows), seconds)

    def _begin(self) -> float:
        """Note that a batch begins; return the time."""
        with self._changed:
            now = perf_counter()
            if not self._running:
                self._counted = now
            self._running += 1
            return now

    def _end(self) -> float:
        """Note that a batch has ended; return the seconds that the engine ran since the last one ended."""
        with self._changed:
            self._running -= 1
            before, self._counted = self._counted, perf_counter()
            return self._counted - before
