"""The memory for the bodies of requests until they are parsed: clients share it, however many they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lamella.serve.refusals import BusyError

FREE = 64 * 1024  # bytes of each body that are not counted, so that large files never keep questions out


class BodyBudget:
    """Counts the bytes of bodies in memory. It belongs to one event loop."""

    def __init__(self, most: int) -> None:
        self._most, self.used = most, 0

    @contextmanager
    def body(self) -> Iterator[Body]:
        """Count a body until its request has been read and parsed, or was given up."""
        body = Body(self)
        try:
            yield body
        finally:
            self.used -= body.counted

    def check(self, more: int) -> None:
        """Raise an error if there is no room for more bytes."""
        if self.used + more > self._most:
            raise BusyError(
                f"body: the server holds {self._most // 2**20} MiB of requests already, its limit; try again later.",
                retry_after=2,
            )


class Body:
    """A body that is being read."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget, self.read, self.counted = budget, 0, 0

    def add(self, count: int) -> None:
        """Count further bytes, or raise an error if there is no room for them."""
        self.read += count
        more = max(0, self.read - FREE) - self.counted
        self._budget.check(more)
        self.counted += more
        self._budget.used += more
