"""The bundled data set: twelve short articles written for this project, with questions in SQuAD 2.0 format."""

from __future__ import annotations

import os
from pathlib import Path

from lamella.errors import UnknownNameError

SPLITS = ("train", "dev")


def data_path(name: str) -> Path:
    """Return the file for a name: `demo:train` and `demo:dev` are bundled, anything else is a path."""
    if not name.startswith("demo:"):
        return Path(os.path.expanduser(name))  # unlike pathlib, keeps an unknown ~user unchanged
    split = name.removeprefix("demo:")
    if split not in SPLITS:
        raise UnknownNameError("bundled data", name, [f"demo:{known}" for known in SPLITS])
    return Path(__file__).with_name(f"{split}.json")
