"""Run a command on a broken input, and judge the outcome: a clear error or a result, and nothing half-written."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

LONGEST_LINE = 2000  # characters of a message


class TooSlowError(BaseException):
    """Raised by the alarm; not an Exception, so that no handler of the code under test catches it."""


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int | None  # the exit code; None after an exception
    out: str
    err: str
    seconds: float
    traceback: str = ""

    @property
    def word(self) -> str:
        """The outcome in a word, for counting."""
        if self.code is None:
            return "traceback"
        return {0: "result", 1: "refused", 2: "unreadable"}.get(self.code, f"exit code {self.code}")


def run_command(arguments: Sequence[object], *, limit: float = 60.0) -> Outcome:
    """Run the command line in this process, for at most `limit` seconds."""
    from lamella.__main__ import main

    with mock.patch.object(sys, "argv", ["lamella", *map(str, arguments)]):
        return _observe(main, limit)


def run_function(function: Callable[[], object], *, limit: float = 60.0) -> Outcome:
    """Call a function; an error that a user can cause becomes the exit code and the message of a command."""
    from lamella.errors import LamellaError

    def call() -> None:
        try:
            function()
        except LamellaError as error:
            sys.stderr.write(f"lamella: {error}\n")
            sys.exit(error.exit_code)

    return _observe(call, limit)


def _observe(function: Callable[[], object], limit: float) -> Outcome:
    out, err, began = io.StringIO(), io.StringIO(), time.perf_counter()
    code: int | None = None
    problem = ""
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
            alarm(limit),
        ):
            warnings.simplefilter("error")
            function()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        problem = "".join(traceback.format_exception(error)[-4:])
    return Outcome(code, out.getvalue(), err.getvalue(), time.perf_counter() - began, problem)


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise TooSlowError in the block after some seconds."""

    def ring(*_: Any) -> None:
        raise TooSlowError(f"took more than {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def find_fault(outcome: Outcome, *, written: Path | None = None, reports: bool = False) -> str:
    """Describe what is wrong with an outcome; an empty text if nothing is.

    `written` is the output of the command: it must not exist after an error. With `reports`, a list of problems on
    standard output is an error message too.
    """
    if outcome.code is None:
        return outcome.traceback
    if outcome.code not in (0, 1, 2):
        return f"exit code {outcome.code}: {outcome.err[-500:]}"
    if "Traceback" in outcome.err:
        return outcome.err[-2000:]
    lines = outcome.err.splitlines()
    if outcome.code and not any(line.startswith("lamella: ") for line in lines) and not (reports and outcome.out):
        return f"no message: {outcome.err[-500:]!r}"
    if any(len(line) > LONGEST_LINE for line in lines):
        return f"a line of {max(map(len, lines))} characters: {max(lines, key=len)[:300]}"
    if any(not line.isprintable() for line in lines):
        return f"control characters: {next(line for line in lines if not line.isprintable())!r}"
    if outcome.code and written is not None and (left := _left_behind(written)):
        return f"left {', '.join(left)} after: {outcome.err[-500:]}"
    return ""


def _left_behind(written: Path) -> list[str]:
    """Return the files that a failed command left, its output and temporary files; a run may state that it failed."""
    left = [*written.parent.glob(f".{written.name}*"), *([written] if written.exists() else []), *written.rglob("*")]
    record = written / "run.json"
    if record.is_file() and json.loads(record.read_bytes())["state"] == "failed":
        left = [path for path in left if path.name.startswith(".")]
    return [path.name for path in left]
