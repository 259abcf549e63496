"""The counts of broken inputs and of fuzzing in a file such as `results/trust.json`."""

from __future__ import annotations

import collections
import datetime
from pathlib import Path
from typing import Any

from broken.fuzzing import Fuzzer
from broken.kinds import KINDS
from lamella.files import read_json, write_json
from lamella.version import __version__

TRUST = "LAMELLA_TRUST"  # the environment variable with the file to which the slow tests write their counts


def keep_kind(path: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Write what `python -m broken` reports of a kind, and the sums of all kinds; return what was written of it."""
    kind = report["kind"]
    found = {**report, "faults": len(report["faults"]), **_counted_now()}
    del found["kind"]
    results = read_counts(path)
    kinds = {**results.get("inputs", {}).get("kinds", {}), kind: found}
    results["inputs"] = _add_up({name: kinds[name] for name in KINDS if name in kinds})
    write_json(path, results)
    return found


def keep_fuzzer(path: Path, name: str, fuzzer: Fuzzer, seeds: int, seconds: float) -> dict[str, Any]:
    """Write what a fuzzer with `seeds` first inputs did in some processor time; return what was written."""
    found = {
        "cpu_seconds": seconds,
        "inputs": fuzzer.tried,
        "kept": len(fuzzer.inputs) - seeds,
        "lines_reached": len(fuzzer.lines),
        "faults": len(fuzzer.faults),
        "longest_seconds": round(fuzzer.longest, 2),
        **_counted_now(),
    }
    results = read_counts(path)
    results["fuzzing"] = {**results.get("fuzzing", {}), name: found}
    write_json(path, results)
    return found


def read_counts(path: Path) -> dict[str, Any]:
    """Return the sections of the file, or none if there is no file yet."""
    return read_json(path) if path.is_file() else {}


def _counted_now() -> dict[str, str]:
    return {"date": datetime.date.today().isoformat(), "lamella": __version__}


def _add_up(kinds: dict[str, Any]) -> dict[str, Any]:
    """Return the counts of all kinds, and those of each. Inputs that several kinds try count once."""
    outcomes: collections.Counter[str] = collections.Counter()
    for kind in kinds.values():
        outcomes.update(kind["outcomes"])
    return {
        "inputs": sum(kind["inputs"] for name, kind in kinds.items() if not KINDS[name].again),
        "commands": outcomes.total(),
        "outcomes": dict(sorted(outcomes.items())),
        "tracebacks": outcomes["traceback"],
        "faults": sum(kind["faults"] for kind in kinds.values()),
        "largest_memory_mib": max(kind["memory_mib"] for kind in kinds.values()),
        "longest_seconds": max(kind["longest_seconds"] for kind in kinds.values()),
        "kinds": kinds,
    }
