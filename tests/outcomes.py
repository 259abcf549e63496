"""The files that a command wrote, for comparison with another run of it."""

from __future__ import annotations

from pathlib import Path

from lamella import runs


def outcome(out: Path) -> dict[str, bytes]:
    """Every file of a folder by name, except those that depend on the time and the machine."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name not in (runs.RUN, runs.ENVIRONMENT, runs.COST)
    }
