"""Measure how many questions per second a Reader answers, against the question answering pipeline of transformers 4.

    python benchmarks/inference.py [--quick] [--out inference.json]
    python benchmarks/inference.py --data FILE [--model MODEL] [--questions 300] [--out inference.json]

The peer is the pipeline of transformers 4.57, the last version that had one, in its own environment (created in
`.peers/` on first use, which takes minutes and needs the network). Both answer the same questions with the same weights
on the same cores, with the pipeline's options: the peer one by one, ours in batches of similar length. The Reader is
loaded as a user loads it (`auto`), in int8, and with torch in fp32 and, on a CPU with instructions for it, in bf16.
`alone_ms` are the milliseconds of a question that is asked alone.

The model is the reader `default`, or one that transformers can express (see `lamella export --as-transformers`).
Without --data, the questions are the bundled ones.

`ratio` belongs to `auto`. Answers are compared one by one with
the peer's, separately for contexts that fit into one window and for longer ones.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from lamella.data.examples import Example
from lamella.data.windows.features import featurise
from lamella.encoder.device import has_bf16_products
from lamella.encoder.sources import DEFAULT_READER
from lamella.environment import library_versions
from lamella.export.transformers_checkpoint import save_as_transformers
from lamella.files import write_json
from lamella.inference.questions import read_questions
from lamella.inference.reader import Reader
from lamella.models.names import find_model
from lamella.models.onnx_model import OnnxModel
from lamella.scoring.metrics import language_of, score
from suite.work import encoder_flops

ROOT = Path(__file__).resolve().parents[1]
PREPARED = ROOT / ".peers"
PEER = Path(__file__).with_name("peers") / "pipeline.py"
CONSTRAINTS = PEER.with_name("transformers-4.57.txt")
ALONE = 32  # questions that are also asked alone

# How each variant is loaded; `torch fp32` is what the others are compared with.
VARIANTS: dict[str, dict[str, Any]] = {
    "auto": {},
    "int8": {"precision": "int8"},
    "torch fp32": {"precision": "fp32", "backend": "torch"},
    **({"torch bf16": {"precision": "bf16"}} if has_bf16_products() else {}),
}

Answers = list[dict[str, Any]]
Times = dict[str, list[float]]  # by variant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the numbers to this json file")
    parser.add_argument("--quick", action="store_true", help="64 questions, 2 repeats")
    parser.add_argument("--model", default=DEFAULT_READER, help="a model; default: the bundled reader")
    parser.add_argument("--data", help="questions to ask, with their answers; default: the bundled ones")
    parser.add_argument("--questions", type=int, help="number of questions")
    parser.add_argument("--batch", type=int, default=16, help="windows per batch")
    arguments = parser.parse_args()

    peer_python = prepare_peer()
    checkpoint = prepare_checkpoint(arguments.model)
    everything = read_questions(arguments.data or "demo:dev", labelled=True)
    examples = some_of(everything, arguments.questions or (64 if arguments.quick else 300))
    readers = {
        name: Reader.load(arguments.model, device="cpu", batch_size=arguments.batch, **options)
        for name, options in VARIANTS.items()
    }
    repeats = 2 if arguments.quick else 5
    names = ["peer", *readers]
    seconds, processor, alone = ({name: [] for name in names} for _ in range(3))
    answers: dict[str, Answers] = {}
    load = [os.getloadavg()[0]]
    with Peer(peer_python, checkpoint, examples) as peer:
        for reader in readers.values():
            ask(reader, examples[:1])
        for _ in range(repeats):  # in turn, so that load affects all alike
            answers["peer"], *times = peer.answer()
            for table, taken in zip((seconds, processor), times, strict=True):
                table["peer"].append(taken)
            for name, reader in readers.items():
                began, cpu = time.perf_counter(), time.process_time()
                answers[name] = ask(reader, examples)
                seconds[name].append(time.perf_counter() - began)
                processor[name].append(time.process_time() - cpu)
            for example in examples[:ALONE]:
                for name, reader in readers.items():
                    began = time.perf_counter()
                    ask(reader, [example])
                    alone[name].append(time.perf_counter() - began)
    alone["peer"] = [taken / len(examples) for taken in seconds["peer"]]
    result = summary(examples, readers, seconds, answers)
    for name, row in result["variants"].items():
        row["cpu_ms"] = 1000 * statistics.median(processor[name]) / len(examples)
        row["alone_ms"] = 1000 * statistics.median(alone[name])
    result |= {
        "questions": len(examples),
        "repeats": repeats,
        "batch_size": arguments.batch,
        "threads": torch.get_num_threads(),
        "load": [*load, os.getloadavg()[0]],
        "model": str(arguments.model),
        "data": Path(arguments.data).name if arguments.data else "demo:dev",
        "versions": library_versions(),
        "peer_versions": peer.facts,
    }
    if arguments.out:
        write_json(arguments.out, result)
    for name, row in result["variants"].items():
        print(
            f"{name:<11} {row['per_second']:6.1f} questions/s, {row['ratio']:.1f} x the pipeline's "
            f"({row['spread'][0]:.1f} to {row['spread'][1]:.1f}); {row['cpu_ms']:.0f} ms of CPU time per question; "
            f"{row['alone_ms']:.0f} ms alone; F1 {row['f1']:.2f}; answers equal to the pipeline's: "
            f"{row['equal_single']:.1%} in one window, {row['equal_several']:.1%} in several"
        )
    print(
        f"inference: {result['ratio']:.1f} x the questions per second of the pipeline with auto "
        f"({result['spread'][0]:.1f} to {result['spread'][1]:.1f})"
    )


def summary(
    examples: list[Example], readers: dict[str, Reader], seconds: Times, answers: dict[str, Answers]
) -> dict[str, Any]:
    """Return the speed of every variant, its agreement with the peer and its F1."""
    auto = readers["auto"].model
    features = featurise(examples, auto.tokenizer, auto.windows)
    single = np.bincount(features.example, minlength=len(examples)) == 1
    variants = {}
    for name in seconds:
        ratios = [its / mine for its, mine in zip(seconds["peer"], seconds[name], strict=True)]
        equal = np.array([place(a) == place(b) for a, b in zip(answers[name], answers["peer"], strict=True)])
        variants[name] = {
            "per_second": len(examples) / statistics.median(seconds[name]),
            "ratio": statistics.median(ratios),
            "spread": [min(ratios), max(ratios)],
            "equal_single": float(equal[single].mean()) if single.any() else 1.0,
            "equal_several": float(equal[~single].mean()) if (~single).any() else 1.0,
            "several_windows": int((~single).sum()),
            "f1": f1(examples, answers[name]),
        }
    for name, reader in readers.items():
        model = cast(Any, reader.model)
        variants[name] |= {"backend": "onnx" if isinstance(model, OnnxModel) else "torch", "precision": model.precision}
    return {
        "ratio": variants["auto"]["ratio"],
        "spread": variants["auto"]["spread"],
        "ours": variants["auto"]["per_second"],
        "peer": variants["peer"]["per_second"],
        "unit": "questions/s",
        "work": {
            "flops": encoder_flops(features.lengths) / len(examples),
            "precision": variants["auto"]["precision"],
            "threads": torch.get_num_threads(),
            "of": "the products of the encoder",
        },
        "variants": variants,
    }


def place(answer: dict[str, Any]) -> tuple[int, int]:
    return answer["start"], answer["end"]


def f1(examples: list[Example], answers: Answers) -> float:
    texts = {example.id: answer["answer"] for example, answer in zip(examples, answers, strict=True)}
    return float(score(examples, texts, language=language_of(examples))["f1"])


def ask(reader: Reader, examples: Sequence[Example]) -> Answers:
    questions, contexts = [example.question for example in examples], [example.context.text for example in examples]
    answers: Answers = reader(question=questions, context=contexts, handle_impossible_answer=True)
    return answers


class Peer:
    """The pipeline in its own process, which waits while others work."""

    def __init__(self, python: Path, model: Path, examples: list[Example]) -> None:
        questions = PREPARED / "questions.json"
        questions.write_text(
            json.dumps([[example.question, example.context.text] for example in examples]), encoding="utf-8"
        )
        self.command = [str(python), str(PEER), str(model), str(questions)]

    def __enter__(self) -> Peer:
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.facts = self._line()
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()

    def answer(self) -> tuple[Answers, float, float]:
        """Return its answers, the seconds it took, and its CPU seconds."""
        assert self.process.stdin is not None
        print("again", file=self.process.stdin, flush=True)
        reply = self._line()
        return reply["answers"], reply["seconds"], reply["cpu"]

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer process ended; run it to see why: {' '.join(self.command)}")
        reply: dict[str, Any] = json.loads(line)
        return reply


def some_of(examples: Sequence[Example], count: int) -> list[Example]:
    return [examples[number] for number in np.random.default_rng(0).permutation(len(examples))[:count]]


def prepare_peer() -> Path:
    """Create an environment with the last transformers that had the pipeline; return its interpreter."""
    folder = PREPARED / CONSTRAINTS.stem
    python, ready = folder / "bin" / "python", folder / "ready"
    constraints = CONSTRAINTS.read_text(encoding="utf-8")
    if not ready.exists() or ready.read_text(encoding="utf-8") != constraints:
        print("creating the peer's environment, once", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "-qq", "-c", str(CONSTRAINTS)]
        subprocess.run([*pip, "torch", "transformers"], check=True)
        ready.write_text(constraints, encoding="utf-8")
    return python


def prepare_checkpoint(model: str) -> Path:
    """Write the model as a checkpoint of transformers, again whenever it has changed; return the folder."""
    folder, stamp = PREPARED / "checkpoint", PREPARED / "checkpoint-of.txt"
    source = find_model(model).folder
    identity = f"{source.resolve()} {[file.stat().st_mtime_ns for file in sorted(source.glob('model.safetensors'))]}"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != identity:
        shutil.rmtree(folder, ignore_errors=True)
        save_as_transformers(model, folder)
        stamp.write_text(identity, encoding="utf-8")
    return folder


if __name__ == "__main__":
    main()
