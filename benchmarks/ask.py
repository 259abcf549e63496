"""Time one question from the command line, against the minimum for any program with this encoder.

    python benchmarks/ask.py [--quick] [--out ask.json]

The peer imports torch and transformers and loads the encoder and its tokenizer, nothing else. Ours is `lamella ask`
with the bundled reader: with its graph in the cache; the first time, with an empty cache; and with a process that spins
on every core (`busy`). `cpu` are CPU seconds: they must not grow on a busy machine, where a thread that waits actively
would use the time that it is kept waiting. The processes are started in turn; the first of each kind does not count.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lamella.config import DEFAULT_ENCODER
from lamella.encoder.sources import find_encoder
from lamella.environment import library_versions
from lamella.files import write_json
from suite.programs import other_programs
from suite.work import reading_flops

TEXT = Path(__file__).parents[1] / "examples" / "titan.txt"
QUESTION = "When did the probe land on Titan?"
PEER = """
import torch, transformers
transformers.AutoTokenizer.from_pretrained({folder!r})
transformers.AutoModel.from_pretrained({folder!r})
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the numbers to this json file")
    parser.add_argument("--quick", action="store_true", help="three repeats instead of nine")
    arguments = parser.parse_args()
    repeats = 3 if arguments.quick else 9

    ask = [sys.executable, "-m", "lamella", "ask", QUESTION, "--context", str(TEXT)]
    commands = {
        "peer": [sys.executable, "-c", PEER.format(folder=str(find_encoder(DEFAULT_ENCODER).folder))],
        "ours": ask,
        "first": ask,
        "busy": ask,
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    cpu: dict[str, list[float]] = {name: [] for name in commands}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(repeats + 1):
            for name, command in commands.items():
                cache = Path(folder) / (f"first-{turn}" if name == "first" else "cache")
                with other_programs((os.cpu_count() or 1) if name == "busy" else 0):
                    began, before = time.perf_counter(), cpu_seconds()
                    environment = os.environ | {"LAMELLA_CACHE": str(cache)}
                    subprocess.run(command, check=True, capture_output=True, env=environment)
                    if turn:
                        seconds[name].append(time.perf_counter() - began)
                        cpu[name].append(cpu_seconds() - before)

    ratios = {
        name: [own / peer for own, peer in zip(times, seconds["peer"], strict=True)]
        for name, times in seconds.items()
        if name != "peer"
    }
    result: dict[str, Any] = {
        "ratio": statistics.median(ratios["ours"]),
        "spread": [min(ratios["ours"]), max(ratios["ours"])],
        "ours": statistics.median(seconds["ours"]),
        "peer": statistics.median(seconds["peer"]),
        "unit": "s",
        "work": {
            "flops": reading_flops([(QUESTION, TEXT.read_text(encoding="utf-8"))]),
            "starts": 1,
            "threads": os.cpu_count(),
            "of": "start Python with its libraries, then one pass of the encoder",
        },
        "first": statistics.median(seconds["first"]),
        "busy": statistics.median(seconds["busy"]),
        "cpu": {name: statistics.median(times) for name, times in cpu.items()},
        "load": [load, os.getloadavg()[0]],
        "repeats": repeats,
        "versions": library_versions(),
    }
    if arguments.out:
        write_json(arguments.out, result)
    for name, times in seconds.items():
        ratio = f", {statistics.median(ratios[name]):.2f} x the peer's" if name in ratios else ""
        spread = f"{min(times):.2f} to {max(times):.2f}"
        print(f"{name}: {statistics.median(times):.2f} s ({spread}), CPU {statistics.median(cpu[name]):.2f} s{ratio}")
    least, most = result["spread"]
    print(f"ask: {result['ratio']:.2f} x the time of a bare import and load ({least:.2f} to {most:.2f})")


def cpu_seconds() -> float:
    """Return the CPU seconds of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
