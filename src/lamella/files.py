"""Read and write files. Every write is atomic: other processes see the old file or the new one, never a part."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lamella.atomic import OLD, lock, new_file, remove_abandoned_workspace, replace_folder, workspace
from lamella.errors import OutputError, RunError, UnreadableError, UsageError, shorten, truncate
from lamella.text_encoding import decode_text, unify_line_ends

DATA_SUFFIXES = (".json", ".jsonl", ".gz", ".safetensors", ".pt", ".onnx")  # of files in run and model folders
IN_USE = "another process is writing here"
RUST_ERROR = re.compile(r"\(os error (\d+)\)")  # how tokenizers and safetensors report errors of the system


def flatten_paths(sources: Iterable[Any], expected: str) -> Iterator[str]:
    """Yield the paths of sources, which may be lists of paths; `expected` begins the error about anything else."""
    for source in sources:
        if isinstance(source, str | os.PathLike):
            yield os.fspath(source)
        elif isinstance(source, Iterable) and not isinstance(source, bytes | Mapping):
            yield from flatten_paths(source, expected)
        else:
            raise UsageError(f"{expected}, got {shorten(source)}.")


def check_output_file(path: Path, *, inputs: Iterable[str | Path] = (), overwrite: bool = False) -> None:
    """Refuse to write a file over an input of the same command, or over an existing file without `overwrite`.

    An input may be a folder: no data or model file in it is overwritten. Call it before the work starts.
    """
    if path.is_dir():
        raise OutputError(f"{path}: expected a file to write, got a folder; choose a file name.")
    if any(_is_input(path, source) for source in inputs):
        raise OutputError(f"{path}: is read by this command and cannot be its output; choose another file.")
    if path.exists() and not overwrite:
        raise OutputError(f"{path}: exists already; choose another file, or pass --overwrite.")


def check_output_folder(folder: Path) -> None:
    """Refuse to write into a path that exists and is not an empty folder; call it before the work starts.

    What a killed process left beside the folder is removed.
    """
    remove_abandoned_workspace(Path(os.path.realpath(folder)))
    if not folder.exists():
        return
    if not is_empty(folder):
        raise OutputError(f"{folder}: exists already and is not an empty folder; choose another folder.")
    fixed = "a mounted disk" if os.path.ismount(folder) else "the working folder" if _is_working_folder(folder) else ""
    if fixed:  # a complete folder takes the place of the empty one
        raise OutputError(f"{folder}: is {fixed} and cannot be replaced; choose a folder inside it.")


def _is_working_folder(folder: Path) -> bool:
    return os.path.samestat(os.stat(folder), os.stat(os.curdir))


def same_file(first: str, second: str) -> bool:
    """Whether two names mean the same file, however their paths are written; `demo:` names are compared as they are."""
    paths = [os.path.realpath(os.path.expanduser(name)) for name in (first, second) if not name.startswith("demo:")]
    if len(paths) == 2 and paths[0] != paths[1]:
        with contextlib.suppress(OSError):  # a hard link; or a path that does not exist
            return os.path.samefile(*paths)
    return first == second or (len(paths) == 2 and paths[0] == paths[1])


def _is_input(path: Path, source: str | Path) -> bool:
    inside = path.exists() and Path(source).is_dir() and Path(source).resolve() in path.resolve().parents
    return same_file(str(path), str(source)) or (inside and path.suffix in DATA_SUFFIXES)


@contextlib.contextmanager
def locked(folder: Path, *, advice: str = "wait for it, or choose another --out") -> Iterator[int | None]:
    """Lock a folder against writes of other processes; the system releases the lock of a killed process.

    Yield the file descriptor that holds the lock: a process that inherits it holds the lock too. The error, if another
    process holds it, ends with `advice`.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = stack.enter_context(lock(folder))
        except BlockingIOError:
            raise RunError(f"{folder}: {IN_USE}; {advice}.") from None
        except OSError as error:
            raise RunError(f"{folder}: cannot be written ({error.strerror}).") from None
        yield handle


def write_bytes(path: Path, data: bytes | memoryview, *, private: bool = False) -> None:
    """Write a file atomically, and make its folder if needed; only its owner can read a `private` file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path, private=private) as file:
            file.write(data)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}).") from None


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, as UTF-8; half of a surrogate pair, which has no UTF-8 form, as an escape."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_json(path: Path, value: Mapping[str, Any] | list[Any]) -> None:
    """Write an indented JSON file atomically."""
    text = json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    # Half of a surrogate pair has no UTF-8 form; `backslashreplace` writes it as the escape that JSON knows.
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_entries(path: Path, entries: Mapping[str, Any], *, encode: Callable[[Any], str] | None = None) -> None:
    """Write a large JSON object atomically, one entry per line: indenting it takes Python several times as long.

    `encode` returns the JSON of a value, on one line; the default is that of the json module.
    """
    encode_key = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
    encode = encode or encode_key
    lines = ",\n".join([f"{encode_key(key)}: {encode(value)}" for key, value in entries.items()])
    text = f"{{\n{lines}\n}}\n" if lines else "{}\n"
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def file_sha256(path: Path) -> str:
    """Return the SHA-256 hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path, *, unique_keys: bool = False, finite: bool = False) -> Any:
    """Read a JSON file; an error names the line and the column.

    `unique_keys` refuses an object with a repeated key, `finite` NaN and numbers that are too large for a float.
    """
    text = read_text(path)
    if not text.strip():
        raise UnreadableError(f"{path}: the file is empty.")
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique if unique_keys else None,
            parse_float=_finite if finite else None,
            parse_constant=_finite if finite else None,
        )
    except _RepeatedKeyError as error:
        raise UnreadableError(
            f"{path}: expected every key once, got {shorten(error.key)} more than once; remove all but one."
        ) from None
    except json.JSONDecodeError as error:
        raise UnreadableError(f"{path}:{error.lineno}:{error.colno}: broken JSON: {error.msg}.") from None
    except _NotFiniteError as error:
        raise UnreadableError(f"{path}: expected finite numbers, got {truncate(error.text)}.") from None
    except (RecursionError, ValueError):
        raise UnreadableError(f"{path}: JSON nested too deeply, or a number with too many digits.") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; an error names the line and the column."""
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        hint = "" if Path(path).suffix == ".toml" else "; expected a TOML file, such as run.toml"
        raise UnreadableError(f"{path}: broken TOML: {error}{hint}.") from None
    except (RecursionError, ValueError):
        raise UnreadableError(f"{path}: TOML nested too deeply, or a number with too many digits.") from None


def read_text(path: Path) -> str:
    """Read a text file in UTF-8, or in UTF-16 with a byte order mark; line ends become `\\n`."""
    try:
        return unify_line_ends(decode_text(path.read_bytes(), str(path)))
    except FileNotFoundError:
        raise UnreadableError(f"{path}: no such file.") from None
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be read ({error.strerror}).") from None


class _RepeatedKeyError(Exception):
    def __init__(self, key: str) -> None:
        self.key = key


class _NotFiniteError(Exception):
    def __init__(self, text: str) -> None:
        self.text = text


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _NotFiniteError(text)
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise _RepeatedKeyError(key)
        made[key] = value
    return made


def append_json_line(path: Path, value: Mapping[str, Any]) -> None:
    """Append one record to a JSON Lines file, in one write."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(line)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}).") from None


@contextlib.contextmanager
def new_folder(folder: Path, *, replace: bool = True) -> Iterator[Path]:
    """Yield an empty folder to write into; it replaces `folder` when the block ends, and is removed on an error.

    Refuse it while another process writes the same folder, and, unless it may be replaced, if it holds anything. A
    symbolic link to an empty folder stays, and the folder that it points to is written.
    """
    place = folder if replace else Path(os.path.realpath(folder))
    try:
        with workspace(place) as work:
            if not replace:
                check_output_folder(folder)  # again: another process may have written it since the command began
            fresh = work / "new"
            fresh.mkdir()
            yield fresh
            _make_readable(fresh)
            replace_folder(fresh, place, work / OLD)
    except BlockingIOError:
        raise RunError(f"{folder}: {IN_USE}; wait for it, or choose another folder.") from None
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror}).") from None
    except Exception as error:
        if (number := RUST_ERROR.search(str(error))) is None:
            raise
        raise RunError(f"{folder}: cannot be written ({os.strerror(int(number[1]))}).") from None


def is_empty(folder: Path) -> bool:
    """Return whether a folder exists and holds nothing."""
    return folder.is_dir() and not any(folder.iterdir())


def _make_readable(folder: Path) -> None:
    """Give the files of a new folder the usual access rights: some libraries write files that only their owner reads.

    The folder was made with the rights that the umask allows; files get the same, without the right to execute.
    """
    rights = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(rights)
