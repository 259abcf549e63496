"""Read files from disk as text, several at a time."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from lamella.documents.file_text import FileText, text_of_file
from lamella.documents.text_process import TextProcess, UnfinishedError
from lamella.errors import LamellaError, UsageError
from lamella.progress import progress
from lamella.unpacking import TooLargeFileError

MOST_BYTES = 100 << 20  # of a file
MOST_CHARACTERS = 20_000_000
PATIENCE = 10  # times as long as a server may take for a file: these are the user's own, and some are books
MOST_PROCESSES = 4  # that read PDFs, docx files and HTML pages


@dataclass(frozen=True)
class ReadProblem:
    """The reason why a file could not be read; one that is not `lasting` may be gone although the file is the same."""

    reason: str
    lasting: bool


def read_files(paths: Sequence[Path], encoding: str | None = None) -> Iterator[FileText | ReadProblem]:
    """Yield the text of each file in turn; for a file that cannot be read, yield the reason."""
    workers = min(MOST_PROCESSES, os.cpu_count() or 1, len(paths))
    if not workers:
        return
    with ExitStack() as stack:
        idle: SimpleQueue[TextProcess] = SimpleQueue()
        for _ in range(workers):
            idle.put(stack.enter_context(TextProcess(patience=PATIENCE)))
        pool = stack.enter_context(ThreadPoolExecutor(workers))
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)  # if the caller stops halfway

        def read(path: Path) -> FileText | ReadProblem:
            process = idle.get()
            try:
                return _read(path, process, encoding)
            finally:
                idle.put(process)

        advance = stack.enter_context(progress("reading", len(paths), lines=True))
        for found in pool.map(read, paths):
            yield found
            advance()


def _read(path: Path, process: TextProcess, encoding: str | None) -> FileText | ReadProblem:
    name = path.name
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe or a device may never end
            return ReadProblem("expected a regular file, got a pipe or a device", lasting=False)
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)  # a file may grow
        if len(data) > MOST_BYTES:
            raise TooLargeFileError(f"{name}: expected at most {MOST_BYTES >> 20} MiB, got more; split the file.")
        return text_of_file(
            data,
            name,
            process=process,
            most_bytes=MOST_BYTES,
            most_characters=MOST_CHARACTERS,
            encoding=encoding,
        )
    except UsageError:  # an unknown encoding
        raise
    except LamellaError as error:
        reason = str(error).removeprefix(f"{name}: ").rstrip(".")
        return ReadProblem(reason, lasting=not isinstance(error, UnfinishedError))
    except OSError as error:
        return ReadProblem(f"cannot be read ({error.strerror})", lasting=False)
