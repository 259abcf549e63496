"""The cores that this process may use, and how many of them other programs leave free."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

STAT = Path("/proc/stat")  # where Linux counts what the cores have done
IDLE = (3, 4)  # fields of its first line: idle, and waiting for a disk
FIELDS = 8  # the further ones are contained in the first
SHORTEST = 0.1  # seconds that a measurement takes at least: the counts are in hundredths


def usable_cores() -> int:
    """Return the number of cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class CoreMeter:
    """Measures how many cores other programs use, as a mean since it was made."""

    def __init__(self) -> None:
        self._began, self._own, self._busy = time.perf_counter(), time.process_time(), busy_seconds()

    def others(self) -> float:
        """Return the mean number of cores that other programs have used; 0 where the system does not count it."""
        time.sleep(max(0.0, SHORTEST - (time.perf_counter() - self._began)))
        seconds = time.perf_counter() - self._began
        busy = busy_seconds() - self._busy - (time.process_time() - self._own)
        return max(0.0, busy / seconds)

    def free_cores(self) -> int:
        """Return how many cores this process can have for itself: at least one, at most those it may use."""
        free = (os.cpu_count() or 1) - self.others()
        return max(1, min(usable_cores(), round(free)))


def busy_seconds() -> float:
    """Return the seconds that the cores have worked since the machine started; 0 on systems other than Linux."""
    with suppress(OSError, ValueError, IndexError):
        ticks = [int(field) for field in STAT.read_text().splitlines()[0].split()[1 : 1 + FIELDS]]
        return sum(count for place, count in enumerate(ticks) if place not in IDLE) / os.sysconf("SC_CLK_TCK")
    return 0.0
