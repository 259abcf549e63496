"""The folder for what is made once and reused by later commands: windows, unpacked encoders, graphs, hashes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lamella.atomic import TEMPORARY, temporary_folder
from lamella.errors import LamellaError
from lamella.files import file_sha256, write_json

VARIABLE = "LAMELLA_CACHE"
ABANDONED_AFTER = 24 * 3600  # seconds after which something partially written is considered abandoned
STATE = "state.json"  # sizes and times of the other files in a folder of the cache
SECOND = 10**9  # nanoseconds


def cache_folder(content: str) -> Path | None:
    """Return the folder for one kind of content: in `$LAMELLA_CACHE`, else in the user's cache folder.

    Return None if the variable is empty, which switches the cache off.
    """
    own = os.environ.get(VARIABLE)
    if own == "":
        return None
    if own is not None:
        return Path(os.path.expanduser(own)) / content
    root = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):  # the XDG specification requires to ignore relative paths
        root = os.path.expanduser("~/.cache")
    return Path(root) / "lamella" / content if os.path.isabs(root) else None  # the user may have no home folder


def write_folder(folder: Path, write_files: Callable[[Path], None]) -> None:
    """Write a folder of files to the cache; it appears complete or not at all, and replaces a damaged one.

    Another process that writes the same folder may be faster: its folder is kept.
    """
    try:
        with temporary_folder(folder) as fresh:
            write_files(fresh)
            (fresh / STATE).write_text(json.dumps(_state(fresh)), encoding="utf-8")
            if folder.exists() and not is_intact(folder):
                shutil.rmtree(folder, ignore_errors=True)
            os.rename(fresh, folder)
    except OSError:  # no space, no permission, or another process was faster
        if not is_intact(folder):
            raise


def is_intact(folder: Path) -> bool:
    """Return whether the files of a folder are as `write_folder` wrote them; mark the folder as used."""
    try:
        written = json.loads((folder / STATE).read_bytes())
        in_seconds = {name: [size, time // SECOND * SECOND] for name, (size, time) in written.items()}
        # Archives and layers of container images keep times in whole seconds.
        if _state(folder) not in (written, in_seconds):
            return False
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):  # missing or damaged
        return False
    with contextlib.suppress(OSError):  # the cache may be read-only
        os.utime(folder)  # the least recently used folders are removed first
    return True


def _state(folder: Path) -> dict[str, list[int]]:
    stats = {path.name: path.stat() for path in folder.iterdir() if path.name != STATE}
    return {name: [status.st_size, status.st_mtime_ns] for name, status in stats.items()}


def limit_size(folder: Path, most: int, *, ending: str = "", keep: Path | None = None) -> None:
    """Remove the least recently used entries beyond `most` bytes, except `keep`, and abandoned partial ones.

    Entries are files, or folders of files, whose names have the ending and do not begin with a dot. Another process may
    do the same at the same time: what cannot be read or removed is ignored.
    """
    entries = []
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            with contextlib.suppress(OSError):
                used = path.stat().st_mtime_ns
                if path.name.endswith(TEMPORARY):
                    if used < (time.time() - ABANDONED_AFTER) * 1e9:
                        _remove(path)
                elif path.name.endswith(ending) and not path.name.startswith("."):
                    files = path.iterdir() if path.is_dir() else [path]
                    entries.append((path == keep, used, sum(file.stat().st_size for file in files), path))
    total = 0
    for kept, _, size, path in sorted(entries, reverse=True):
        total += size
        if total > most and not kept:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def remembered_sha256(path: Path) -> str:
    """Return the SHA-256 hash of a file; it is computed again only if the file changed since the last call.

    A change shows in the file's size, inode, or times, of which the time of the last change of its state cannot be set.
    """
    folder = cache_folder("hashes")
    state = file_state(path)
    if folder is None:
        return file_sha256(path)
    name = os.path.realpath(path)
    memory = folder / f"{hashlib.sha256(os.fsencode(name)).hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        entry = json.loads(memory.read_bytes())
        if entry["path"] == name and entry["state"] == state and len(entry["sha256"]) == 64:
            return str(entry["sha256"])
    sha256 = file_sha256(path)
    if file_state(path) == state:  # not written to in the meantime
        with contextlib.suppress(LamellaError):  # no space or no permission
            write_json(memory, {"path": name, "state": state, "sha256": sha256})
    return sha256


def remembered(key: Any, compute: Callable[[], Any]) -> Any:
    """Return what `compute` returned for an equal key before, as JSON has it; compute it only if that is not known.

    The key is anything that JSON can hold, and must contain all that the result depends on.
    """
    folder = cache_folder("hashes")
    if folder is None:
        return compute()
    memory = folder / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return json.loads(memory.read_bytes())["result"]
    result = compute()
    with contextlib.suppress(LamellaError, ValueError):  # no space, no permission, or NaN
        write_json(memory, {"result": result})
    return result


def file_state(path: Path) -> list[int]:
    """Return numbers of which at least one changes whenever a file is written to or replaced."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
