"""Read files that may be damaged or malicious in a process of its own, with limits on time and memory.

A small PDF or docx file can unpack to gigabytes, and Python's HTML parser takes hours for a megabyte of tags that never
end. The process (`python -m lamella.documents.text_process`) reads one file after the other from its standard input, so
that a folder of files does not start a process for each.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from types import TracebackType
from typing import IO, Any, Self

from lamella.child_process import module_command, module_environment
from lamella.errors import UnreadableError

MOST_MEMORY = 1 << 30
PROCESS_SECONDS = 30.0  # per file
PROCESSOR_SECONDS = {"html": 15, "pdf": 25, "docx": 25}  # of processor time; 20 MiB of ordinary HTML take 13
NAMES = {"html": "an HTML page", "pdf": "a PDF", "docx": "a docx file"}  # of the kinds that are read here


class UnfinishedError(UnreadableError):
    """A file whose reading was stopped; another time, or on another machine, it may be read."""


class TextProcess:
    """A process that reads files; it starts with the first file, and again after a file that ended it."""

    def __init__(self, *, patience: int = 1) -> None:
        """Allow a file `patience` times as long as usual."""
        self._process: subprocess.Popen[bytes] | None = None
        self._patience = patience

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, data: bytes, name: str, kind: str, most_characters: int) -> list[str]:
        """Return the pages of a PDF, the paragraphs of a docx file, or the blocks of an HTML page."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        expired = threading.Event()

        def stop() -> None:
            expired.set()
            process.kill()

        seconds = self._patience * PROCESS_SECONDS
        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                _send(process.stdin, [kind, most_characters, self._patience * PROCESSOR_SECONDS[kind]], data)
            reply = _receive(process.stdout)
        finally:
            timer.cancel()
        if reply is None:
            self.close()
            if expired.is_set():
                reason = (
                    f"expected {NAMES[kind]} that is read within {seconds:g} seconds, got a larger one; "
                    "split it or save it as text"
                )
            else:
                reason = (
                    f"expected {NAMES[kind]} of reasonable size, got one that takes too long to read; save it as text"
                )
            raise UnfinishedError(f"{name}: {reason}.")
        problem, text = reply
        if problem:
            raise UnreadableError(f"{name}: {problem}.")
        parts: list[str] = json.loads(text)
        return parts

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(BrokenPipeError), process:  # closes its pipes, with unsent data or not, and waits
                pass

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                module_command("lamella.documents.text_process"),
                env=module_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self._process


def main() -> None:
    """Answer requests until the standard input ends."""
    _limit_memory()
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    while (request := _receive(requests)) is not None:
        (kind, most_characters, seconds), data = request
        _limit_time(seconds)
        problem, parts = None, []
        try:
            parts = _read(data, kind, most_characters)
            text = json.dumps(parts).encode("ascii")
        except ValueError as error:
            problem, text = str(error), b""
        except MemoryError:
            problem = "expected a file of reasonable size, got one that takes too much memory; save it as text"
            text = b""
        except Exception:  # parsers raise whatever a damaged structure leads to
            problem, text = f"expected {NAMES[kind]}, got a damaged one; save it again", b""
        _send(replies, problem, text)


def _read(data: bytes, kind: str, most_characters: int) -> list[str]:
    if kind == "html":
        from lamella.data.html_text import BETWEEN, text_of_html

        return text_of_html(data.decode("utf-8")).split(BETWEEN)
    if kind == "docx":
        from lamella.documents.docx_text import paragraphs_of_docx

        return paragraphs_of_docx(data, most_characters)
    from lamella.documents.pdf_text import pages_of_pdf

    return pages_of_pdf(data, most_characters)


def _send(file: IO[bytes], head: Any, data: bytes) -> None:
    """Write a message: a line of JSON with the length of the data, then the data."""
    file.write(json.dumps([head, len(data)]).encode("ascii") + b"\n")
    file.write(data)
    file.flush()


def _receive(file: IO[bytes]) -> tuple[Any, bytes] | None:
    """Read a message; return None if there is none, or only a part of one."""
    line = file.readline()
    if not line.endswith(b"\n"):
        return None
    head, length = json.loads(line)
    data = file.read(length)
    return (head, data) if len(data) == length else None


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, AttributeError, ValueError, OSError):  # Windows has no such limits
        import resource

        os.nice(10)  # answers come first
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time(seconds: int) -> None:
    """Let the system end this process after some more seconds of processor time."""
    with contextlib.suppress(ImportError, AttributeError, ValueError, OSError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + seconds, hard))


if __name__ == "__main__":
    main()
