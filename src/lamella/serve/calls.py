"""A request while it is answered: until when it may take, whether anyone waits for it, and where its time goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter

from lamella.serve.refusals import AbandonedError, RefusedError, TimedOutError

Interval = tuple[float, float]  # begin and end, of `perf_counter`
PATIENCE = 0.1  # seconds after which a waiting thread looks whether anyone still waits for it


@dataclass(eq=False)
class Call:
    """A request while it is answered: until when it may take, and where its time goes."""

    deadline: float  # of `perf_counter`
    seconds_allowed: float
    waits: list[Interval] = field(default_factory=list)  # in which its windows, or a reader, waited
    runs: list[Interval] = field(default_factory=list)  # in which batches with windows of its list ran
    abandoned: bool = False  # its client has left, or one of its readers has failed
    batch: object = None  # identifies the batch of questions that it belongs to, if any

    @property
    def queued(self) -> float:
        """The seconds that it waited; several readers may wait at the same time."""
        return _union(self.waits)

    @property
    def computing(self) -> float:
        """The seconds that batches with windows of its list of questions ran."""
        return _union(self.runs)

    def refusal(self) -> RefusedError | None:
        """Return an error if the answer would come too late, or to nobody."""
        if self.abandoned:
            return AbandonedError()
        return TimedOutError(self.seconds_allowed) if perf_counter() > self.deadline else None

    def check(self) -> None:
        """Raise an error if the answer would come too late, or to nobody."""
        if (refusal := self.refusal()) is not None:
            raise refusal

    def note_run(self, arrived: float, begin: float, end: float) -> None:
        """Note that windows waited from `arrived` to `begin`, and ran until `end`."""
        self.waits.append((arrived, begin))
        self.runs.append((begin, end))


class JointCall(Call):
    """Several requests that are answered together, as long as anyone waits for one of them."""

    def __init__(self, calls: Sequence[Call]) -> None:
        last = max(calls, key=lambda call: call.deadline)
        super().__init__(last.deadline, last.seconds_allowed)
        self._calls = calls

    def refusal(self) -> RefusedError | None:
        """Return an error if all answers would come too late, or to nobody."""
        return self._calls[0].refusal() if all(call.refusal() for call in self._calls) else None

    def note_run(self, arrived: float, begin: float, end: float) -> None:
        """Note when windows waited and ran, for each of the requests."""
        for call in self._calls:
            call.note_run(arrived, begin, end)


CALL: ContextVar[Call | None] = ContextVar("call", default=None)  # of the thread that answers


@contextmanager
def answering(call: Call) -> Iterator[None]:
    """Let this thread answer a request."""
    token = CALL.set(call)
    try:
        call.check()
        yield
    finally:
        CALL.reset(token)


def wait_patiently(wait: Callable[[float], bool]) -> None:
    """Repeat a wait of some seconds until it succeeds, or the request of this thread is abandoned or too late."""
    call = CALL.get()
    while not wait(PATIENCE):
        if call is not None:
            call.check()


def _union(intervals: Sequence[Interval]) -> float:
    """Return the seconds that at least one of the intervals covers."""
    seconds, covered = 0.0, -math.inf
    for begin, end in sorted(intervals):
        seconds += max(0.0, end - max(begin, covered))
        covered = max(covered, end)
    return seconds
