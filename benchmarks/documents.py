"""Time the index of a folder of documents and a question about it, against reading the same passages alone.

    python benchmarks/documents.py [--quick] [--files 1000] [--kind txt] [--out documents.json]

The files have 20 kB of text each: paragraphs of made-up words, which are as frequent as words are (Zipf). `index` is
`lamella index` of the whole folder, `again` the same after one file has changed. `ask` is `lamella ask --in` with the
index, `memory` without it. The peer is `lamella ask` with the passages that `ask` reads, as files of their own. `cpu`
are CPU seconds of the command and its children. `ratio` is the CPU time of `ask` divided by the peer's; these two are
run in turn.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from lamella import Documents
from lamella.documents.index_file import INDEX
from lamella.environment import library_versions
from lamella.files import write_json
from suite.work import reading_flops

SIZE = 20_000  # characters of a file
WORDS = 50_000
LETTERS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "st", "tr", "pl")
PASSAGES = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the numbers to this json file")
    parser.add_argument("--quick", action="store_true", help="50 files, 3 repeats instead of 5")
    parser.add_argument("--files", type=int, default=1000, help="how many files")
    parser.add_argument("--kind", choices=("txt", "html"), default="txt", help="kind of the files")
    arguments = parser.parse_args()
    count, repeats = (50, 3) if arguments.quick else (arguments.files, 5)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "documents"
        words = write_documents(folder, count, arguments.kind)
        question = f"Where is the {words[400]} {words[3000]} {words[20000]} of {words[1000]}?"
        command = [sys.executable, "-m", "lamella"]
        ask = [*command, "ask", question, "--in", str(folder), "--passages", str(PASSAGES)]
        rows = {"memory": measure(ask), "index": measure([*command, "index", str(folder)])}
        measure(ask)  # not counted: reads the index from the disk
        documents = Documents(folder)
        contexts, texts = [], []
        for number, passage in enumerate(documents.rank(question, PASSAGES)):
            path = Path(name) / f"{number}.txt"
            contexts.append(documents.texts[passage.text][passage.begin : passage.end])
            path.write_text(contexts[-1], encoding="utf-8")
            texts += ["--context", str(path)]
        pairs = [(measure(ask), measure([*command, "ask", question, *texts])) for _ in range(repeats)]
        rows["ask"], rows["peer"] = (median(runs) for runs in zip(*pairs, strict=True))
        ratios = [ours / peer for (ours, _), (peer, _) in pairs]
        (folder / f"1.{arguments.kind}").write_text("Something else is written here now.", encoding="utf-8")
        rows["again"] = measure([*command, "index", str(folder)])
        record = {
            "ratio": statistics.median(ratios),
            "spread": [min(ratios), max(ratios)],
            "ours": rows["ask"][0],
            "peer": rows["peer"][0],
            "unit": "CPU s",
            "work": {
                "flops": reading_flops([(question, context) for context in contexts]),
                "starts": 1,
                "of": "start Python with its libraries, then the products of the encoder",
            },
            "repeats": repeats,
            "files": count,
            "kind": arguments.kind,
            "characters": SIZE * count,
            "passages": len(documents.passages),
            "index_bytes": (folder / INDEX).stat().st_size,
            "cpu": {key: round(cpu, 2) for key, (cpu, _) in rows.items()},
            "seconds": {key: round(seconds, 2) for key, (_, seconds) in rows.items()},
            "ask_minus_peer_cpu": round(rows["ask"][0] - rows["peer"][0], 2),
            "load": round(os.getloadavg()[0], 1),
            "versions": library_versions(),
        }
    if arguments.out:
        write_json(arguments.out, record)
    for name, (cpu, seconds) in rows.items():
        print(f"{name}: {cpu:.2f} CPU s, {seconds:.2f} s")
    low, high = record["spread"]
    print(f"documents: {record['ratio']:.2f} x the CPU time of reading the same passages ({low:.2f} to {high:.2f})")


def write_documents(folder: Path, count: int, kind: str) -> list[str]:
    """Write files of paragraphs, and return the words, the most frequent first."""
    folder.mkdir()
    chosen = random.Random(0)
    words = list(
        dict.fromkeys("".join(chosen.choice(LETTERS) + chosen.choice("aeiou") for _ in range(4)) for _ in range(WORDS))
    )
    weights = list(accumulate(1 / (place + 10) for place in range(len(words))))
    for number in range(count):
        paragraphs = []
        while sum(map(len, paragraphs)) < SIZE:
            sentences = [
                " ".join(chosen.choices(words, cum_weights=weights, k=15)).capitalize() + "." for _ in range(5)
            ]
            paragraphs.append(" ".join(sentences))
        text = "".join(f"<p>{part}</p>" for part in paragraphs) if kind == "html" else "\n\n".join(paragraphs)
        (folder / f"{number}.{kind}").write_text(text, encoding="utf-8")
    return words


def median(runs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the median CPU seconds and the median seconds."""
    cpu, seconds = zip(*runs, strict=True)
    return statistics.median(cpu), statistics.median(seconds)


def measure(command: list[str]) -> tuple[float, float]:
    """Return the CPU seconds and the seconds of a command."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, seconds


if __name__ == "__main__":
    main()
