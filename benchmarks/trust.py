"""Try all broken inputs and the fuzzers, and keep the counts.

    python benchmarks/trust.py [KIND ...] [--quick] [--seconds N] [--out results/trust.json]

Writes the sections `inputs` and `fuzzing` of the file, after every kind; other sections and kinds stay as they are.
Each kind has the day and the version of its count. All kinds take about an hour.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "trust.json"
QUICK = ("gzip", "documents txt", "fuzzing")
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]
os.environ["HF_HUB_OFFLINE"] = "1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two kinds, and 5 seconds of each fuzzer")
    parser.add_argument("--seconds", type=float, default=60, help="processor time of each fuzzer")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file that holds the counts")
    parser.add_argument("names", nargs="*", metavar="KIND", help="kinds of inputs, or fuzzing; default: all")
    arguments = parser.parse_args()
    from broken.kinds import KINDS

    if unknown := set(arguments.names) - {*KINDS, "fuzzing"}:
        parser.error(f"expected kinds among {', '.join(KINDS)}, or fuzzing; got {', '.join(sorted(unknown))}")
    out: Path = arguments.out
    seconds = 5.0 if arguments.quick else arguments.seconds
    for name in arguments.names or (QUICK if arguments.quick else [*KINDS, "fuzzing"]):
        found = fuzz(seconds) if name == "fuzzing" else try_kind(name)
        results = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
        if name == "fuzzing":
            results[name] = found
        else:
            kinds = {**results.get("inputs", {}).get("kinds", {}), name: found}
            results["inputs"] = add_up({kind: kinds[kind] for kind in KINDS if kind in kinds})
        out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def try_kind(name: str) -> dict[str, Any]:
    """Try the inputs of a kind in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[:2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "broken", name]
    done = subprocess.run(command, cwd=ROOT / "tests", env=environment, stdout=subprocess.PIPE, text=True, check=True)
    report = json.loads(done.stdout)
    for fault in report["faults"]:
        print(f"{name}: {fault}", file=sys.stderr)
    del report["kind"]
    found = {**report, "faults": len(report["faults"]), **counted_now()}
    print(name, found, flush=True)
    return found


def counted_now() -> dict[str, Any]:
    """Return the day and the version of a count."""
    from lamella.version import __version__

    return {"date": datetime.date.today().isoformat(), "lamella": __version__}


def add_up(kinds: dict[str, Any]) -> dict[str, Any]:
    """Return the counts of all kinds, and those of each. Inputs that several kinds try count once."""
    from broken.kinds import KINDS

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


def fuzz(seconds: float) -> dict[str, Any]:
    """Run each fuzzer for some seconds of processor time."""
    from broken.fuzzing import FUZZERS

    found = {}
    for name, make in FUZZERS.items():
        with tempfile.TemporaryDirectory() as folder:
            os.environ["LAMELLA_CACHE"] = f"{folder}/cache"
            fuzzer = make(Path(folder))
            seeds = len(fuzzer.inputs)
            fuzzer.fuzz(seconds)
        for fault, data in fuzzer.faults.items():
            print(f"{name}: {data[:2000]!r}\n{fault}", file=sys.stderr)
        found[name] = {
            "cpu_seconds": seconds,
            "inputs": fuzzer.tried,
            "kept": len(fuzzer.inputs) - seeds,
            "lines_reached": len(fuzzer.lines),
            "faults": len(fuzzer.faults),
            "longest_seconds": round(fuzzer.longest, 2),
            **counted_now(),
        }
        print(name, found[name], flush=True)
    return found


if __name__ == "__main__":
    main()
