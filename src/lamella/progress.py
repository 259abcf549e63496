"""Progress for a person who waits: a bar on the terminal after two seconds, nothing anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 2.0  # seconds


@contextmanager
def progress(description: str, total: int | None) -> Iterator[Callable[..., None]]:
    """Yields `advance(steps=1, note="")`; quiet where standard error is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda steps=1, note="": None
        return

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(description, total=total, note="")
    began = time.monotonic()
    shown = False

    def advance(steps: int = 1, note: str = "") -> None:
        nonlocal shown
        if not shown and time.monotonic() - began > PATIENCE:
            bar.start()
            shown = True
        bar.update(task, advance=steps, note=note)

    try:
        yield advance
    finally:
        if shown:
            bar.stop()
