"""Run all benchmarks with small settings, each beside its peer, and make the page of the results.

    python benchmarks/bench.py [NAME ...] [--results results/benchmarks] [--page docs/benchmarks.md]

Each benchmark writes one json file to the folder of results: `ratio` with its `spread`, `ours`, `peer` and their
`unit`; `floor`, which is what the `work` that nobody can avoid takes on this machine, and our `share` of it. The limits
of the machine are measured first. `others` is the mean number of cores that other programs used meanwhile, and `load`
the load average before and after: a result is marked on the page if others used more than a tenth of a core.

With --page and no NAME, nothing is run: the page is made from the files alone. A folder within that of the results has
the results of another machine, which the page shows after those of the first.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lamella.cores import busy_seconds
from lamella.files import read_json, write_json, write_text
from limits import describe
from suite.catalogue import BENCHMARKS, Benchmark
from suite.page import page
from suite.work import floor

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "benchmarks"
LIMITS = "limits"


def main() -> None:
    names = [LIMITS, *(each.name for each in BENCHMARKS)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or more of: {', '.join(names)}; default: all")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the json files (default: %(default)s)")
    parser.add_argument("--page", type=Path, help="write the page of the results to this file")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(names):
        parser.error(f"expected names among {', '.join(names)}, got {', '.join(sorted(unknown))}")
    failed = [] if arguments.page and not arguments.names else run_all(arguments.names or names, arguments.results)
    if arguments.page:
        if not (arguments.results / f"{LIMITS}.json").is_file():
            sys.exit(f"bench: {arguments.results}: expected {LIMITS}.json, found none; run it without --page first.")
        write_text(arguments.page, page(arguments.results))
    if failed:
        sys.exit(f"bench: failed: {', '.join(failed)}; their results are unchanged")


def run_all(names: Sequence[str], folder: Path) -> list[str]:
    """Run benchmarks one after the other; return the names of those that failed."""
    failed, began = [], time.perf_counter()
    there = folder / f"{LIMITS}.json"
    elsewhere = there.is_file() and machine(read_json(there)) != machine(describe())
    if elsewhere and LIMITS not in names:
        sys.exit(f"bench: {folder} has results of another machine; give another folder (--results) or no NAME.")
    if elsewhere:
        for each in BENCHMARKS:
            (folder / f"{each.name}.json").unlink(missing_ok=True)
    if LIMITS in names or not there.is_file():
        print(f"{LIMITS} …", flush=True)
        write_json(there, measured([sys.executable, str(HERE / "limits.py")]))
    limits = read_json(there)
    for benchmark in (each for each in BENCHMARKS if each.name in names):
        print(f"{benchmark.name} …", flush=True)
        try:
            result = run(benchmark, limits)
        except subprocess.CalledProcessError as error:
            print(f"{benchmark.name}: {(error.stderr or 'no message').strip().splitlines()[-1]}", file=sys.stderr)
            failed.append(benchmark.name)
            continue
        write_json(folder / f"{benchmark.name}.json", result)
        low, high = result["spread"]
        print(f"  {result['ratio']:.2f} ({low:.2f} to {high:.2f}), {result['seconds']:.0f} s", flush=True)
    print(f"bench: {(time.perf_counter() - began) / 60:.1f} minutes")
    return failed


def run(benchmark: Benchmark, limits: dict[str, Any]) -> dict[str, Any]:
    """Run a benchmark; return its numbers with its floor."""
    command = [sys.executable, str(HERE / benchmark.file), *benchmark.arguments, "--quick"]
    result = measured(command)
    return {**result, **floor(result, limits), "arguments": [*benchmark.arguments, "--quick"]}


def machine(limits: dict[str, Any]) -> list[Any]:
    """Return what tells one machine from another."""
    return [limits[key] for key in ("cores", "machine", "processor", "instructions")]


def measured(command: Sequence[str]) -> dict[str, Any]:
    """Run a script; return what it wrote, and how much other programs used the cores meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "numbers.json"
        load, busy, own, began = os.getloadavg()[0], busy_seconds(), child_seconds(), time.perf_counter()
        subprocess.run([*command, "--out", str(out)], check=True, capture_output=True, text=True)
        seconds = time.perf_counter() - began
        others = max(0.0, busy_seconds() - busy - child_seconds() + own) / seconds
        return {**read_json(out), "others": others, "load": [load, os.getloadavg()[0]], "seconds": seconds}


def child_seconds() -> float:
    """Return the CPU seconds of all processes that were started here and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
