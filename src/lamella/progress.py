"""Show the progress of long work: a bar on a terminal, and from commands a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

DELAY = 2.0  # seconds before the bar is shown
INTERVAL = 30.0  # seconds between lines

Log = Callable[[str], None]  # receives each line that a command reports

_interval: float | None = None  # seconds between the lines of commands; None: no lines
_active: Progress | None = None  # nested bars share one display: two displays would overwrite each other


def silent(line: str) -> None:
    """Discard a line: the default `log` of functions that are called from Python."""


@contextmanager
def progress_lines() -> Iterator[None]:
    """Print progress as lines within the block if stderr is not a terminal; for commands, not for calls from Python."""
    global _interval
    before, _interval = _interval, INTERVAL
    try:
        yield
    finally:
        _interval = before


@contextmanager
def progress(description: str, total: float | None, *, lines: bool = False) -> Iterator[Callable[..., None]]:
    """Yield `advance(steps=1, note=None)`; a note is shown until the next one.

    Shows nothing outside the main thread, since all threads share one terminal, and nothing if stderr is not a
    terminal. With `lines`, it then prints a line now and then, if a command asked for it with `progress_lines`; work
    within the block prints none of its own.
    """
    global _active, _interval
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not sys.stderr.isatty() or not in_main_thread:
        interval = _interval if lines and in_main_thread else None
        if interval is None:
            yield lambda steps=1, note=None: None
            return
        _interval = None
        try:
            yield _make_lines(description, total, interval)
        finally:
            _interval = interval
        return

    display = _active or _make_display()
    owns = _active is None
    _active = display
    task = display.add_task(description, total=total, note="", visible=False)

    def show() -> None:
        display.update(task, visible=True)
        display.start()  # does nothing if it is started already

    timer = threading.Timer(DELAY, show)
    timer.daemon = True
    timer.start()

    def advance(steps: float = 1, note: str | None = None) -> None:
        display.update(task, advance=steps)
        if note is not None:
            display.update(task, note=note)

    try:
        yield advance
    finally:
        timer.cancel()
        timer.join()
        display.remove_task(task)
        if owns:
            display.stop()
            _active = None


def _make_lines(description: str, total: float | None, interval: float) -> Callable[..., None]:
    begin = printed = time.monotonic()
    done = 0.0

    def advance(steps: float = 1, note: str | None = None) -> None:
        nonlocal done, printed
        done += steps
        now = time.monotonic()
        if total and 0 < done < total and now - printed >= interval:
            printed = now
            left = (now - begin) * (total - done) / done
            share = f"{description}: {100 * done / total:.0f} % after {describe_seconds(now - begin)}"
            sys.stderr.write(f"{share}, about {describe_seconds(left)} left\n")
            sys.stderr.flush()

    return advance


def describe_seconds(seconds: float) -> str:
    """Return a duration in its largest unit: "40 s", "12 min", "3.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _make_display() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        transient=True,
    )
