"""The folder for what is made once and reused by later commands: windows, unpacked encoders, graphs, hashes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from pathlib import Path

from lamella.errors import LamellaError
from lamella.files import TEMPORARY, file_sha256, write_json

VARIABLE = "LAMELLA_CACHE"
ABANDONED_AFTER = 24 * 3600  # seconds after which something partially written is considered abandoned


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
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        entry = json.loads(memory.read_bytes())
        if entry["path"] == name and entry["state"] == state and len(entry["sha256"]) == 64:
            return str(entry["sha256"])
    sha256 = file_sha256(path)
    if file_state(path) == state:  # not written to in the meantime
        with contextlib.suppress(LamellaError):  # no space or no permission
            write_json(memory, {"path": name, "state": state, "sha256": sha256})
    return sha256


def file_state(path: Path) -> list[int]:
    """Return numbers of which at least one changes whenever a file is written to or replaced."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
