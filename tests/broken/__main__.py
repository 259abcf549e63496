"""Try all inputs of some kinds: `python -m broken [KIND…]` in the folder `tests`; without names, of all kinds."""

from __future__ import annotations

import argparse
import collections
import json
import os
import resource
import sys
import tempfile
from pathlib import Path

from broken.kind import Bench, sample
from broken.kinds import KINDS
from lamella.scoring.cost import peak_memory

MOST_MEMORY = 16 << 30  # bytes of addresses; torch alone reserves several gigabytes that it does not use


def main() -> None:
    """Print a line of JSON for every kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    parser.add_argument("--sample", type=int, help="try only this many inputs of each kind")
    parser.add_argument("--only", default="", help="try only inputs whose name contains this text")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    for name in arguments.kinds or KINDS:
        with tempfile.TemporaryDirectory(prefix="lamella-broken-") as folder:
            os.environ["LAMELLA_CACHE"] = f"{folder}/cache"
            sys.stdout.write(json.dumps(try_all(name, Path(folder), arguments.sample, arguments.only)) + "\n")
            sys.stdout.flush()


def try_all(name: str, folder: Path, count: int | None = None, only: str = "") -> dict[str, object]:
    """Try the inputs of a kind; return how many had which outcome, and describe the faults."""
    bench = Bench(KINDS[name], folder / "bench")
    damages = [damage for damage in bench.damages if only in damage.name]
    if count is not None:
        damages = sample(damages, count, name)
    for outcome, fault in bench.attempt(None):
        assert not fault, fault
        assert outcome.code == 0 or bench.kind.reports, outcome
    outcomes: collections.Counter[str] = collections.Counter()
    faults: list[str] = []
    longest = 0.0
    for damage in damages:
        for outcome, fault in bench.attempt(damage):
            outcomes[outcome.word] += 1
            longest = max(longest, outcome.seconds)
            if fault:
                faults.append(f"{damage.name}\n{fault}")
    return {
        "kind": name,
        "inputs": len(damages),
        "outcomes": dict(sorted(outcomes.items())),
        "faults": faults,
        "longest_seconds": round(longest, 2),
        "memory_mib": (peak_memory() or 0) >> 20,
    }


if __name__ == "__main__":
    main()
