"""What a command leaves behind, to be compared with what another one left."""

from __future__ import annotations

from pathlib import Path

from lamella import runs


def outcome(out: Path) -> dict[str, bytes]:
    """Every file of a folder by its name, but for those that tell of the clock and the machine."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name not in (runs.RUN, runs.ENVIRONMENT, runs.COST)
    }
