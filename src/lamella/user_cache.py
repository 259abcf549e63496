"""The folder for what is made once and reused by later commands: windows, unpacked encoders, graphs, hashes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from lamella.errors import LamellaError
from lamella.files import file_sha256, write_json

VARIABLE = "LAMELLA_CACHE"


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
