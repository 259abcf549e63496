"""The folder for what is made once and reused by later commands: windows, unpacked encoders."""

from __future__ import annotations

import os
from pathlib import Path

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
