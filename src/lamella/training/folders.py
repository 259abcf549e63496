"""Where the runs of a plan are written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lamella import runs
from lamella.plan import Plan


@dataclass(frozen=True)
class RunFolders:
    """A single run is written into `out` itself, several each into a folder of its name."""

    out: Path
    by_run: Mapping[str, Path]

    @classmethod
    def of(cls, plan: Plan, out: Path, runs_folder: Path | None = None) -> RunFolders:
        """Several runs lie in `runs_folder`, or in `out` where none is given."""
        several = len(plan.runs) > 1
        return cls(out, {name: (runs_folder or out) / name if several else out for name in plan.runs})

    @property
    def several(self) -> bool:
        return len(self.by_run) > 1

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of the pass that is being trained; the passes take turns."""
        return self.out / runs.CHECKPOINT

    def of_pass(self, names: Iterable[str]) -> dict[str, Path]:
        return {name: self.by_run[name] for name in names}
