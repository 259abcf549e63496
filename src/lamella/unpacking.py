"""Unpack gzip and zip files within a limit: a file of a few kilobytes can unpack to gigabytes."""

from __future__ import annotations

import gzip
import io
import zipfile
import zlib

from lamella.errors import UnreadableError

# A file may unpack to 64 MiB, and beyond that to 200 times its size. Real data sets unpack to 3 to 12 times their size,
# and a file that repeats 11,000 characters for every question to 100 times; the most that gzip can do is 1,032 times.
ALWAYS_ALLOWED = 64 << 20
MOST_TIMES = 200
_STEP = 1 << 20


class TooLargeFileError(UnreadableError):
    """A file beyond a limit."""


def unpack_gzip(data: bytes, name: str, *, most_bytes: int | None = None) -> bytes:
    """Return the content of a gzip file; `most_bytes` limits its size, whatever the size of the file.

    The limits hold at every point of the file, so the first part of a malicious file is enough to refuse it.
    """
    packed, pieces, size = io.BytesIO(data), [], 0
    try:
        with gzip.GzipFile(fileobj=packed) as file:
            while piece := file.read(_STEP):
                pieces.append(piece)
                size += len(piece)
                if size > allowed_size(packed.tell()):
                    raise TooLargeFileError(f"{name}: {_suspicious('gzip file')}; if you trust it, unpack it yourself.")
                if most_bytes is not None and size > most_bytes:
                    raise TooLargeFileError(
                        f"{name}: expected at most {most_bytes >> 20} MiB unpacked, got more; split the file."
                    )
    except (OSError, EOFError, zlib.error) as error:
        raise UnreadableError(
            f"{name}: the gzip file is truncated or damaged ({error}); copy or compress it again."
        ) from None
    return b"".join(pieces)


def check_archive(archive: zipfile.ZipFile, packed: int, name: str) -> None:
    """Refuse a zip archive of `packed` bytes that unpacks to far too much.

    The sizes are those that the archive declares; `zipfile` never returns more of a file than that.
    """
    if sum(file.file_size for file in archive.infolist()) > allowed_size(packed):
        raise TooLargeFileError(f"{name}: {_suspicious('ZIP archive')}; if you trust it, convert it to CSV or JSONL.")


def allowed_size(packed: int) -> int:
    """Return how many bytes a file of `packed` bytes may unpack to."""
    return ALWAYS_ALLOWED + MOST_TIMES * packed


def _suspicious(kind: str) -> str:
    limit = f"{ALWAYS_ALLOWED >> 20} MiB and {MOST_TIMES} times its size"
    return f"expected a {kind} that unpacks to at most {limit}, got more than ordinary data"
