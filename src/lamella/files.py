"""Read and write files: every write is atomic, so that a reader sees the old file or the new one, never a part."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lamella.errors import RunError, UnreadableError

try:
    import fcntl
except ModuleNotFoundError:  # Windows, where a folder is not held
    fcntl = None  # type: ignore[assignment]


TEMPORARY = ".lamella-part"  # ends the name of what is being written; a kill may leave it behind


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder while it is written, so that no other process writes into it; the system lets go at a kill."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror}).") from None
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise RunError(f"{folder}: another process is writing there; wait, or choose another --out.") from None
    finally:
        os.close(handle)


def write_bytes(path: Path, data: bytes | memoryview) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        name = path.parent / f".{path.name}.{uuid.uuid4().hex}{TEMPORARY}"
        try:
            with name.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}).") from None


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, as UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Mapping[str, Any] | list[Any]) -> None:
    """Write a JSON file atomically, readable by people."""
    text = json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    # Half a surrogate pair has no UTF-8 form; the backslash that replaces it is JSON's own way to write it.
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_entries(path: Path, entries: Mapping[str, Any]) -> None:
    """Write a large JSON object atomically, an entry a line: to indent them takes Python several times as long."""
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
    lines = ",\n".join(f"{encode(key)}: {encode(value)}" for key, value in entries.items())
    text = f"{{\n{lines}\n}}\n" if lines else "{}\n"
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> Any:
    """Read a JSON file; what is wrong with it is said with line and column."""
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise UnreadableError(f"{path}:{error.lineno}:{error.colno}: broken JSON: {error.msg}.") from None
    except (RecursionError, ValueError):  # nested a thousand deep, a number of thousands of digits
        raise UnreadableError(f"{path}: holds JSON beyond all measure, too deep or with a number too long.") from None


def read_text(path: Path) -> str:
    """Read a text file in UTF-8, with a byte order mark or without."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UnreadableError(f"{path}: no such file.") from None
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{path}: expected UTF-8 text; byte {error.start} is not.") from None


def append_json_line(path: Path, value: Mapping[str, Any]) -> None:
    """Add one record to a file of JSON lines, in one write."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(line)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}).") from None
