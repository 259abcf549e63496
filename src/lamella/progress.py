"""Show a progress bar on the terminal for work that takes more than two seconds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

DELAY = 2.0  # seconds before the bar is shown

Log = Callable[[str], None]  # receives each line that a command reports

_active: Progress | None = None  # nested bars share one display: two displays would overwrite each other


def silent(line: str) -> None:
    """Discard a line: the default `log` of functions that are called from Python."""


@contextmanager
def progress(description: str, total: int | None) -> Iterator[Callable[..., None]]:
    """Yield `advance(steps=1, note=None)`; a note is shown until the next one.

    Shows nothing if stderr is not a terminal, or outside the main thread, since all threads share one terminal.
    """
    if not sys.stderr.isatty() or threading.current_thread() is not threading.main_thread():
        yield lambda steps=1, note=None: None
        return

    global _active
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

    def advance(steps: int = 1, note: str | None = None) -> None:
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
