"""Try all broken inputs and the fuzzers, and keep the counts.

    python benchmarks/trust.py [KIND ...] [--quick] [--seconds N] [--out results/trust.json]

Writes the sections `inputs` and `fuzzing` of the file, after every kind; other sections and kinds stay as they are.
Each kind has the day and the version of its count. All kinds take about an hour. `LAMELLA_TRUST=FILE make test-slow`
writes the same counts, and those of kills.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

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
    from broken.fuzzing import FUZZERS
    from broken.kinds import KINDS

    if unknown := set(arguments.names) - {*KINDS, "fuzzing"}:
        parser.error(f"expected kinds among {', '.join(KINDS)}, or fuzzing; got {', '.join(sorted(unknown))}")
    for name in arguments.names or (QUICK if arguments.quick else [*KINDS, "fuzzing"]):
        if name != "fuzzing":
            try_kind(name, arguments.out)
            continue
        for fuzzer in FUZZERS:
            fuzz(fuzzer, 5.0 if arguments.quick else arguments.seconds, arguments.out)


def try_kind(name: str, out: Path) -> None:
    """Try the inputs of a kind in a process of its own, and write the counts."""
    from broken.counts import keep_kind

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[:2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "broken", name]
    done = subprocess.run(command, cwd=ROOT / "tests", env=environment, stdout=subprocess.PIPE, text=True, check=True)
    report = json.loads(done.stdout)
    for fault in report["faults"]:
        print(f"{name}: {fault}", file=sys.stderr)
    print(name, keep_kind(out, report), flush=True)


def fuzz(name: str, seconds: float, out: Path) -> None:
    """Run a fuzzer for some seconds of processor time, and write the counts."""
    from broken.counts import keep_fuzzer
    from broken.fuzzing import FUZZERS

    with tempfile.TemporaryDirectory() as folder:
        os.environ["LAMELLA_CACHE"] = f"{folder}/cache"
        fuzzer = FUZZERS[name](Path(folder))
        seeds = len(fuzzer.inputs)
        fuzzer.fuzz(seconds)
    for fault, data in fuzzer.faults.items():
        print(f"{name}: {data[:2000]!r}\n{fault}", file=sys.stderr)
    print(name, keep_fuzzer(out, name, fuzzer, seeds, seconds), flush=True)


if __name__ == "__main__":
    main()
