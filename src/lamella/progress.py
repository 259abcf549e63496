"""Progress for a person who waits: a bar on the terminal after two seconds, nothing anywhere else."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE = 2.0  # seconds

_shown: Progress | None = None  # a bar inside another's work joins the other's display: two would fight for the line


@contextmanager
def progress(description: str, total: int | None) -> Iterator[Callable[..., None]]:
    """Yields `advance(steps=1, note=None)`; a note stays until the next.

    Quiet where stderr is not a terminal, and in all threads but the main one: there is one line for all of them.
    """
    if not sys.stderr.isatty() or threading.current_thread() is not threading.main_thread():
        yield lambda steps=1, note=None: None
        return

    global _shown
    display = _shown or _make_display()
    owns = _shown is None
    _shown = display
    task = display.add_task(description, total=total, note="", visible=False)

    def show() -> None:
        display.update(task, visible=True)
        display.start()  # again does no harm

    patience = threading.Timer(PATIENCE, show)
    patience.daemon = True
    patience.start()

    def advance(steps: int = 1, note: str | None = None) -> None:
        display.update(task, advance=steps)
        if note is not None:
            display.update(task, note=note)

    try:
        yield advance
    finally:
        patience.cancel()
        patience.join()
        display.remove_task(task)
        if owns:
            display.stop()
            _shown = None


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
