"""A stopwatch that adds up the seconds of several blocks of code."""

from __future__ import annotations

import time
from types import TracebackType


class Stopwatch:
    """Adds up the seconds of the `with` blocks it is used for."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> Stopwatch:
        self._began = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.seconds += time.perf_counter() - self._began
