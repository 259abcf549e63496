"""Measure how many questions per second a Reader answers, against the question answering pipeline of transformers 4.

    python benchmarks/inference.py [--quick] [--out inference.json]
    python benchmarks/inference.py --model FOLDER --data FILE [--questions 1000] [--out inference.json]

The peer is the pipeline of transformers 4.57, the last version that had one, in its own environment (created in
`.peers/` on first use, which takes minutes and needs the network). Both answer the same questions with the same weights
on the same cores, with the pipeline's options: the peer one by one, ours in batches of similar length. The Reader runs
the model with torch in fp32, with torch in bf16 if the CPU supports it, and with onnxruntime in fp32 and int8.

By default, the model is the bundled encoder, trained to memorise the questions that it is asked (also created in
`.peers/`): it knows the answers, so any loss from a faster variant is visible. With --model and --data, the model must
be one that transformers can express (see `lamella export --as-transformers`).

`ratio` belongs to the fastest variant whose F1 is within 0.5 of fp32's. Answers are compared one by one with
the peer's, separately for contexts that fit into one window and for longer ones.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lamella.config import DEFAULT_ENCODER
from lamella.data.examples import Example
from lamella.data.windows.features import featurise
from lamella.encoder.device import choose_precision
from lamella.environment import library_versions
from lamella.export.onnx_export import export_onnx
from lamella.export.transformers_checkpoint import save_as_transformers
from lamella.files import write_json
from lamella.inference.questions import read_questions
from lamella.inference.reader import Reader
from lamella.scoring.metrics import language_of, score

ROOT = Path(__file__).resolve().parents[1]
PREPARED = ROOT / ".peers"
PEER = Path(__file__).with_name("peers") / "pipeline.py"
PACKAGES = ("torch==2.13.0", "transformers==4.57.6")
MEMORISED = 128  # questions
WITHIN = 0.5  # F1 that a faster variant may lose

Answers = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the numbers to this json file")
    parser.add_argument("--quick", action="store_true", help="96 questions, 2 repeats")
    parser.add_argument("--model", help="a model folder; default: one that has memorised the questions")
    parser.add_argument("--data", help="questions to ask, with their answers; default: the bundled ones")
    parser.add_argument("--questions", type=int, help="number of questions")
    parser.add_argument("--batch", type=int, default=16, help="windows per batch")
    arguments = parser.parse_args()
    if (arguments.model is None) != (arguments.data is None):
        parser.error("expected --model and --data together")

    peer_python = prepare_peer()
    model = Path(arguments.model) if arguments.model else prepare_model()
    folders = prepare_forms(model, PREPARED / ("given" if arguments.model else "memorised"))
    most = arguments.questions or (96 if arguments.quick else MEMORISED if arguments.data is None else 600)
    everything = read_questions(arguments.data or "demo:train", labelled=True)
    examples = some_of(everything, most) if arguments.data else list(everything[:MEMORISED][:most])
    readers = load_readers(folders, arguments.batch)
    repeats = 2 if arguments.quick else 5
    with Peer(peer_python, folders["torch"], examples) as peer:
        seconds: dict[str, list[float]] = {name: [] for name in ["peer", *readers]}
        answers: dict[str, Answers] = {}
        for _ in range(repeats):  # in turn, so that load affects all alike
            answers["peer"], taken = peer.answer()
            seconds["peer"].append(taken)
            for name, reader in readers.items():
                answers[name], taken = answer(reader, examples)
                seconds[name].append(taken)
    result = summary(examples, readers["torch fp32"], seconds, answers) | {
        "questions": len(examples),
        "repeats": repeats,
        "batch_size": arguments.batch,
        "threads": torch.get_num_threads(),
        "data": Path(arguments.data).name if arguments.data else "demo:train, memorised",
        "versions": library_versions(),
        "peer_versions": peer.facts,
    }
    if arguments.out:
        write_json(arguments.out, result)
    for name, variant in result["variants"].items():
        print(
            f"{name:<11} {variant['per_second']:6.1f} questions/s, {variant['ratio']:.1f} x the pipeline's "
            f"({variant['spread'][0]:.1f} to {variant['spread'][1]:.1f}); F1 {variant['f1']:.2f}; "
            f"answers equal to the pipeline's: "
            f"{variant['equal_single']:.1%} in one window, {variant['equal_several']:.1%} in several"
        )
    print(f"pipeline    {result['peer']:6.1f} questions/s; F1 {result['peer_f1']:.2f}")
    print(
        f"inference: {result['ratio']:.1f} x the questions per second of the pipeline with {result['fastest']} "
        f"({result['spread'][0]:.1f} to {result['spread'][1]:.1f})"
    )


def summary(
    examples: list[Example], plain: Reader, seconds: dict[str, list[float]], answers: dict[str, Answers]
) -> dict[str, Any]:
    """Return the speed of every variant, its agreement with the peer and its F1."""
    features = featurise(examples, plain.model.tokenizer, plain.model.windows)
    single = np.bincount(features.example, minlength=len(examples)) == 1
    variants = {}
    for name in [name for name in seconds if name != "peer"]:
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
    good = [name for name, variant in variants.items() if variant["f1"] >= variants["torch fp32"]["f1"] - WITHIN]
    fastest = max(good, key=lambda name: variants[name]["ratio"])
    return {
        "ratio": variants[fastest]["ratio"],
        "spread": variants[fastest]["spread"],
        "fastest": fastest,
        "ours": variants[fastest]["per_second"],
        "peer": len(examples) / statistics.median(seconds["peer"]),
        "unit": "questions/s",
        "peer_f1": f1(examples, answers["peer"]),
        "variants": variants,
    }


def place(answer: dict[str, Any]) -> tuple[int, int]:
    return answer["start"], answer["end"]


def f1(examples: list[Example], answers: Answers) -> float:
    texts = {example.id: answer["answer"] for example, answer in zip(examples, answers, strict=True)}
    return float(score(examples, texts, language=language_of(examples))["f1"])


def answer(reader: Reader, examples: list[Example]) -> tuple[Answers, float]:
    questions, contexts = [example.question for example in examples], [example.context.text for example in examples]
    began = time.perf_counter()
    answers = reader(question=questions, context=contexts, handle_impossible_answer=True)
    return answers, time.perf_counter() - began


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

    def answer(self) -> tuple[Answers, float]:
        assert self.process.stdin is not None
        print("again", file=self.process.stdin, flush=True)
        reply = self._line()
        return reply["answers"], reply["seconds"]

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer process ended; run it to see why: {' '.join(self.command)}")
        reply: dict[str, Any] = json.loads(line)
        return reply


def load_readers(folders: dict[str, Path], batch: int) -> dict[str, Reader]:
    variants: dict[str, Reader] = {}
    variants["torch fp32"] = Reader.load(
        folders["torch"], device="cpu", precision="fp32", backend="torch", batch_size=batch
    )
    if choose_precision("auto", torch.device("cpu")) == "bf16":
        variants["torch bf16"] = Reader.load(folders["torch"], device="cpu", precision="bf16", batch_size=batch)
    threads = torch.get_num_threads()
    for name in ("onnx", "onnx int8"):
        variants[name] = Reader.load(folders[name], batch_size=batch, threads=threads)
    for reader in variants.values():
        reader.ask("Who?", "Nobody at all.")
    return variants


def some_of(examples: Sequence[Example], count: int) -> list[Example]:
    return [examples[number] for number in np.random.default_rng(0).permutation(len(examples))[:count]]


def prepare_peer() -> Path:
    """Create an environment with the last transformers that had the pipeline; return its interpreter."""
    folder = PREPARED / "transformers-4.57"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        print("creating the peer's environment, once", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-qq", *PACKAGES], check=True)
        (folder / "ready").touch()
    return python


def prepare_model() -> Path:
    """Train a reader that memorises the first bundled questions; return its run folder."""
    run = PREPARED / "memorised-run"
    if not (run / "model" / "config.json").exists():
        print("memorising the questions, once", flush=True)
        settings = {
            "data.max_train_samples": MEMORISED,
            "data.dev": [],
            "encoder.name": DEFAULT_ENCODER,
            "training.epochs": 14,
        }
        subprocess.run(
            [sys.executable, "-m", "lamella", "train", str(ROOT / "configs" / "demo.toml"), "--out", str(run)]
            + ["--overwrite"] * run.exists()
            + [f"--set={key}={json.dumps(value)}" for key, value in settings.items()],
            check=True,
        )
    return run


def prepare_forms(model: Path, folder: Path) -> dict[str, Path]:
    """Export the model for each variant, again whenever the model has changed; return the folders."""
    folders = {name: folder / name.replace(" ", "-") for name in ("torch", "onnx", "onnx int8")}
    stamp = folder / "made-of.txt"
    weights = sorted(model.rglob("model.safetensors"))
    identity = f"{model.resolve()} {[file.stat().st_mtime_ns for file in weights]}"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != identity:
        print("exporting the model, once", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        save_as_transformers(model, folders["torch"])
        export_onnx(folders["torch"], folders["onnx"])
        export_onnx(folders["torch"], folders["onnx int8"], int8=True)
        stamp.write_text(identity, encoding="utf-8")
    return folders


if __name__ == "__main__":
    main()
