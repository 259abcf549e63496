"""The files that a command wrote, for comparison with another run of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lamella import runs


def outcome(out: Path) -> dict[str, bytes]:
    """Every file of a folder by name, except what depends on the time and the machine."""
    return {
        str(path.relative_to(out)): _content(path)
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name not in (runs.RUN, runs.ENVIRONMENT, runs.COST)
    }


def _content(path: Path) -> bytes:
    return json.dumps(timeless_history(path)).encode() if path.name == runs.HISTORY else path.read_bytes()


def timeless_history(path: Path) -> list[dict[str, Any]]:
    """The records of a history without their seconds, which differ from run to run."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]
