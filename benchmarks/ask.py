"""Time one question from the command line, against the minimum for any program with this encoder.

    python benchmarks/ask.py [--quick] [--out ask.json]

The peer imports torch and transformers and loads the encoder and its tokenizer, nothing else. Ours is `lamella ask`
with the bundled reader, and with the same reader exported to ONNX, which needs no torch (skipped without the extra
`onnx`). The processes are started in turn; the first of each kind does not count.
"""

from __future__ import annotations

import argparse
import importlib.util
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

    with tempfile.TemporaryDirectory() as folder:
        ask = [sys.executable, "-m", "lamella", "ask", QUESTION, "--context", str(TEXT)]
        commands = {
            "peer": [sys.executable, "-c", PEER.format(folder=str(find_encoder(DEFAULT_ENCODER).folder))],
            "torch": ask,
        }
        if importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnx"):
            exported = str(Path(folder) / "exported")
            subprocess.run([sys.executable, "-m", "lamella", "export", "default", "--onnx", exported], check=True)
            commands["onnx"] = [*ask, "--model", exported]
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(repeats + 1):
            for name, command in commands.items():
                began = time.perf_counter()
                subprocess.run(command, check=True, capture_output=True)
                if turn:
                    seconds[name].append(time.perf_counter() - began)

    ratios = {
        name: [own / peer for own, peer in zip(times, seconds["peer"], strict=True)]
        for name, times in seconds.items()
        if name != "peer"
    }
    result: dict[str, Any] = {
        "ratio": statistics.median(ratios["torch"]),
        "spread": [min(ratios["torch"]), max(ratios["torch"])],
        "ours": statistics.median(seconds["torch"]),
        "peer": statistics.median(seconds["peer"]),
        "unit": "s",
        "ratio_of_onnx": statistics.median(ratios["onnx"]) if "onnx" in ratios else None,
        "repeats": repeats,
        "versions": library_versions(),
    }
    if arguments.out:
        write_json(arguments.out, result)
    for name, times in seconds.items():
        ratio = f", {statistics.median(ratios[name]):.2f} x the peer's" if name in ratios else ""
        print(f"{name}: {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f}){ratio}")
    least, most = result["spread"]
    print(f"ask: {result['ratio']:.1f} x the time of a bare import and load ({least:.1f} to {most:.1f})")


if __name__ == "__main__":
    main()
