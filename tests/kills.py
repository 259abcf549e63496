"""Kill a process at an exact, repeatable point: just before its n-th change of the files in a folder.

Or stop it there, or remove something that it reads.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

# The place of the path and of its `dir_fd` among the arguments of each audit event; None: it has none.
CHANGES = {
    "os.rename": (0, 2),
    "os.remove": (0, 1),
    "os.rmdir": (0, 1),
    "os.mkdir": (0, 2),
    "os.chmod": (0, 2),
    "os.truncate": (0, None),
    "shutil.rmtree": (0, None),
}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def prelude(
    folder: Path,
    counter: Path,
    *,
    last: int | None = None,
    number: int = signal.SIGKILL,
    removed: Path | None = None,
) -> str:
    """Return the code that a process runs first: count its changes in `counter`, and kill it at number `last`.

    It gets the signal `number`. With `removed`, that folder is removed instead.
    """
    here = str(Path(__file__).parent)
    call = f"kills.watch({str(folder)!r}, {str(counter)!r}, {last!r}, {int(number)}, {str(removed or '')!r})"
    return f"import sys; sys.path.insert(0, {here!r}); import kills; {call}"


def changes(counter: Path) -> int:
    """Return how many changes a process has made, or was about to make when it was killed."""
    return counter.stat().st_size


def watch(folder: str, counter: str, last: int | None, number: int, removed: str) -> None:
    """Count the changes that this process makes in a folder, one byte of `counter` for each; act at the last."""
    root, count = os.path.realpath(folder), 0
    log = os.open(counter, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event == "open":
            path, flags = arguments[0], arguments[2]
            if not (isinstance(flags, int) and flags & WRITES):
                return
            within = None
        elif event in CHANGES:
            place, at = CHANGES[event]
            path, within = arguments[place], None if at is None else arguments[at]
        else:
            return
        name = _name(path, within)
        if name != root and not name.startswith(root + os.sep):
            return
        count += 1
        os.write(log, b".")
        if count == last and removed:
            shutil.rmtree(removed)
        elif count == last:
            os.kill(os.getpid(), number)

    sys.addaudithook(on_event)


def _name(path: Any, within: Any) -> str:
    """Return the full path of a file that is given by a path or by an open descriptor, perhaps in an open folder."""
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")
    folder = os.readlink(f"/proc/self/fd/{within}") if isinstance(within, int) and within >= 0 else os.getcwd()
    return os.path.normpath(os.path.join(folder, os.fsdecode(path)))
