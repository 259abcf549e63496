"""Corrections: questions with their right answers, as people marked them on the page, in a SQuAD 2.0 file.

The file is an ordinary data file: `lamella check` reads it, and training can use it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lamella.data.dataset import load_examples
from lamella.data.examples import Answer, Context, Example
from lamella.data.file_formats.writers import write_squad
from lamella.errors import RunError, UnreadableError, UsageError, counted, shorten, truncate
from lamella.files import locked
from lamella.serve.refusals import RefusedError, TooLargeError

FILE = "corrections.json"
MOST = 5_000
MOST_BYTES = 20 * 1024 * 1024  # of the file, which is read and written with every correction
LONGEST_ANSWER = 1_000  # characters
WAITS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)  # seconds between attempts to change the file
LONGEST_CONTEXT = 20_000  # characters; of longer texts, the part around the answer is kept


class UnknownCorrectionError(RefusedError):
    """An id that no correction has."""

    status = 404
    kind = "unknown_correction"


class Corrections:
    """The corrections in a folder. Threads may share it; every change is written at once, atomically."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._lock = threading.Lock()

    def examples(self) -> list[Example]:
        """Return all corrections, the oldest first; the file may have been edited by hand."""
        try:
            return list(load_examples(str(self.path), labelled=True).examples) if self.path.exists() else []
        except UsageError as error:  # a fault of the file, not of the request
            raise RunError(str(error)) from None
        except UnreadableError as error:
            if isinstance(error.__context__, FileNotFoundError):  # the last correction was removed meanwhile
                return []
            raise

    def add(
        self, question: str, context: str, place: tuple[int, int] | None, *, near: int | None = None
    ) -> dict[str, Any]:
        """Keep the right answer to a question: its first and last character (exclusive), or None for no answer.

        A second correction of the same question replaces the first. Of a long text, the part around the answer is
        kept; without an answer, the part around `near`, where the reader saw one.
        """
        question = question.strip()
        if not question or not context.strip():
            raise UsageError("correction: expected a question and its text, got an empty one.")
        if place is not None:
            begin, end = place
            if not 0 <= begin < end <= len(context) or not context[begin:end].strip():
                raise UsageError(
                    f"correction: expected an answer within the {counted(len(context), 'character')} of the text, got "
                    f"{begin} to {end}; mark the words of the answer."
                )
            if end - begin > LONGEST_ANSWER:
                raise TooLargeError(
                    f"correction: expected an answer of at most {LONGEST_ANSWER:,} characters, got {end - begin:,}; "
                    "mark only the words of the answer."
                )
        context, begin = _part(context, place[0] if place else near or 0, (place[1] - place[0]) if place else 0)
        answers: tuple[Answer, ...] = ()
        if place is not None:
            start = place[0] - begin
            answers = (Answer(context[start : start + place[1] - place[0]], start),)
        with self._changing():
            kept = [
                example
                for example in self.examples()
                if (example.question, example.context.text) != (question, context)
            ]
            if len(kept) >= MOST:
                raise TooLargeError(
                    f"corrections: expected at most {MOST:,}, got one more; download the file, then remove some."
                )
            if self._bytes() + len(context.encode()) > MOST_BYTES:
                raise TooLargeError(
                    f"corrections: expected at most {MOST_BYTES // 2**20} MiB, got more; download the file, then "
                    "remove some."
                )
            known = {example.context.text: example.context for example in kept}
            example = Example(uuid.uuid4().hex[:12], question, known.get(context, Context(context)), answers)
            write_squad([*kept, example], self.path)
        return describe(example)

    def remove(self, id_: str) -> None:
        """Remove a correction."""
        with self._changing():
            examples = self.examples()
            kept = [example for example in examples if example.id != id_]
            if len(kept) == len(examples):
                raise UnknownCorrectionError(
                    f"correction: expected the id of a correction, got {shorten(id_)}; see GET /v1/corrections."
                )
            write_squad(kept, self.path) if kept else self.path.unlink()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Wait for other threads and processes that change the file."""
        with self._lock, contextlib.ExitStack() as stack:
            for wait in (*WAITS, None):
                try:
                    stack.enter_context(locked(self.path.parent))
                    break
                except RunError:
                    if wait is None:
                        raise
                    time.sleep(wait)
            yield

    def listed(self) -> list[dict[str, Any]]:
        """Return all corrections as JSON values, the newest first."""
        return [describe(example) for example in reversed(self.examples())]

    def _bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def file(self) -> bytes:
        """Return the content of the SQuAD file."""
        try:
            return self.path.read_bytes()
        except FileNotFoundError:  # it is removed with the last correction
            return b'{"version": "v2.0", "data": []}\n'


def describe(example: Example) -> dict[str, Any]:
    """Return a correction as JSON values, without its context."""
    answer = example.answers[0] if example.answers else None
    return {
        "id": example.id,
        "question": example.question,
        "answer": answer.text if answer else None,
        "no_answer": answer is None,
        "context_start": truncate(example.context.text.strip(), 60),
    }


def _part(context: str, begin: int, length: int) -> tuple[str, int]:
    """Return the part of a long text around some characters, cut between lines or words, and where it begins."""
    if len(context) <= LONGEST_CONTEXT:
        return context, 0
    around = max(0, LONGEST_CONTEXT - length) // 2
    first = max(0, min(begin - around, len(context) - LONGEST_CONTEXT))
    last = min(len(context), max(first + LONGEST_CONTEXT, begin + length))
    if first:
        first = _gap(context, first, begin)
    if last < len(context):
        cut = max(context.rfind("\n", begin + length, last), context.rfind(" ", begin + length, last))
        last = cut if cut > begin + length else last
    return context[first:last], first


def _gap(context: str, first: int, begin: int) -> int:
    """Return the first place after a white space from `first` on, before `begin`."""
    for separator in ("\n", " "):
        place = context.find(separator, first, begin)
        if place >= 0:
            return place + 1
    return first
