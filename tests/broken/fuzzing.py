"""A coverage-guided fuzzer: it keeps inputs that reach new lines of the package, and changes them further.

It traces the lines itself, in Python, so that no compiler is needed; that allows hundreds of inputs per second. It
finds what needs several changes at once, which `damage.py` never makes.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from broken.data_kinds import DOCUMENTS, ROWS, TITAN, csv_text
from broken.json_damage import JSON_VALUES
from broken.oracle import alarm
from tiny_reader import save_tiny_bert, save_tiny_checkpoint, save_tiny_reader

WORDS = [
    *(text.encode() for text in JSON_VALUES.values() if len(text) < 100),
    *(f'"{key}": '.encode() for key in ("data", "paragraphs", "qas", "qa", "context", "contents", "question", "id")),
    *(f'"{key}": '.encode() for key in ("answers", "answer", "answer_start", "text", "is_impossible", "group")),
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\u", b"\n", b"\r\n", b"\t", b";", b"\xef\xbb\xbf", b"\x1f\x8b\x08"),
]
RUN_FILE = b"""
[data]
train = ["demo:train", { file = "demo:dev", weight = 2, negatives = 0.5 }]
dev = "demo:dev"

[encoder]
name = "all-MiniLM-L6-v2"
tuning = { name = "lora", rank = 4 }

[training]
epochs = 1
save_at = [0.5]

[grid.learner]
mixer = ["last", { name = "scalar_mix" }]
seed = [0, 1]
"""


@dataclass
class Fuzzer:
    """Runs a function on changed inputs; `run` gets the path of a file with the input."""

    run: Callable[[Path], object]
    inputs: list[bytes]
    path: Path
    seed: int = 0
    lines: set[tuple[str, int]] = field(default_factory=set)
    faults: dict[str, bytes] = field(default_factory=dict)  # by the last line of the traceback
    tried: int = 0
    longest: float = 0.0

    def fuzz(self, seconds: float) -> None:
        """Try inputs for some seconds of processor time."""
        choose, end = random.Random(self.seed), time.process_time() + seconds
        for data in list(self.inputs):
            self._try(data)
        while time.process_time() < end:
            data = choose.choice(self.inputs)
            for _ in range(choose.choice((1, 1, 2, 4, 8))):
                data = change(data, self.inputs, choose)
            if self._try(data[:100_000]):
                self.inputs.append(data)

    def _try(self, data: bytes) -> bool:
        """Run the function on an input; return whether it reached new lines."""
        from lamella.errors import LamellaError

        self.path.write_bytes(data)
        reached: set[tuple[str, int]] = set()
        began = time.perf_counter()
        try:
            with alarm(60):
                sys.settrace(_tracer(reached))
                try:
                    self.run(self.path)
                finally:
                    sys.settrace(None)
        except LamellaError as error:
            if "\n" in str(error) and not hasattr(error, "problems"):
                self.faults[f"a message of several lines: {error}"] = data
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.faults["".join(traceback.format_exception(error)[-2:])] = data
        self.tried += 1
        self.longest = max(self.longest, time.perf_counter() - began)
        new = not reached <= self.lines
        self.lines |= reached
        return new


def change(data: bytes, others: Sequence[bytes], choose: random.Random) -> bytes:
    """Return an input with one change: bytes removed, repeated, replaced or taken from another input."""
    begin = choose.randrange(len(data) + 1)
    end = min(len(data), begin + choose.choice((0, 1, 1, 2, 4, 16, 64)))
    match choose.randrange(6):
        case 0:
            return data[:begin] + data[end:]
        case 1:
            return data[:end] + data[begin:]
        case 2:
            return data[:begin] + bytes([choose.randrange(256)]) + data[end:]
        case 3:
            other = choose.choice(others)
            place = choose.randrange(len(other) + 1)
            return data[:begin] + other[place : place + choose.randrange(1, 200)] + data[end:]
        case _:
            return data[:begin] + choose.choice(WORDS) + data[end:]


def _tracer(reached: set[tuple[str, int]]) -> Callable[[FrameType, str, Any], Any]:
    """Return a trace function that collects the lines of the package."""

    def trace_lines(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            reached.add((frame.f_code.co_filename, frame.f_lineno))
        return trace_lines

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return trace_lines(frame, event, argument) if "/lamella/" in frame.f_code.co_filename else None

    return trace


def formats_fuzzer(folder: Path) -> Fuzzer:
    """Return a fuzzer of data files: read, check, repair and write."""
    from lamella.data.file_formats.formats import read
    from lamella.data.file_formats.writers import write

    def run(path: Path) -> None:
        found = read(path)
        write(found.examples, folder / "written.json")
        again = read(folder / "written.json")
        assert len(again.examples) == len(found.examples), "examples were lost"

    seeds = [json.dumps(document).encode() for document in DOCUMENTS.values()]
    seeds += [csv_text(delimiter).encode() for delimiter in ",;\t"]
    seeds += ["".join(json.dumps(row) + "\n" for row in ROWS).encode()]
    return Fuzzer(run, seeds, folder / "data")


def models_fuzzer(folder: Path) -> Fuzzer:
    """Return a fuzzer of the config.json of a saved model, which is loaded without torch."""
    return _model_file_fuzzer(folder, "reader/config.json")


def encoders_fuzzer(folder: Path) -> Fuzzer:
    """Return a fuzzer of the config.json of the encoder below a saved model."""
    return _model_file_fuzzer(folder, "encoder/config.json")


def tokenizers_fuzzer(folder: Path) -> Fuzzer:
    """Return a fuzzer of the tokenizer of a saved model."""
    return _model_file_fuzzer(folder, "reader/tokenizer.json")


def checkpoints_fuzzer(folder: Path) -> Fuzzer:
    """Return a fuzzer of the config.json of a question answering model of transformers, which torch loads."""
    from lamella.models.loading import load_model

    checkpoint = save_tiny_checkpoint(folder / "checkpoint")

    def run(path: Path) -> None:
        load_model(checkpoint, backend="torch", device="cpu")

    return Fuzzer(run, [(checkpoint / "config.json").read_bytes()], checkpoint / "config.json")


def weights_fuzzer(folder: Path) -> Fuzzer:
    """Return a fuzzer of the weights of a saved model whose hash fits them, as a person who means harm would make."""
    from lamella.inference.reader import Reader
    from lamella.models.loading import load_model

    reader = _tiny_reader(folder)
    config = json.loads((reader / "config.json").read_bytes())

    def run(path: Path) -> None:
        fitting = {**config, "weights_sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        (reader / "config.json").write_text(json.dumps(fitting))
        Reader(load_model(reader, backend="onnx", few_questions=True)).ask("Who discovered Titan?", TITAN)

    return Fuzzer(run, [(reader / "model.safetensors").read_bytes()], reader / "model.safetensors")


def run_files_fuzzer(folder: Path) -> Fuzzer:
    """Return a fuzzer of run files with several runs, which are planned and not trained."""
    from lamella.sweep.sweep_plan import plan_lines, read_sweep

    def run(path: Path) -> None:
        plan_lines(read_sweep([path], folder / "out"), folder / "out")

    return Fuzzer(run, [RUN_FILE], folder / "run.toml")


def _model_file_fuzzer(folder: Path, file: str) -> Fuzzer:
    """Return a fuzzer of a file in the folders of a saved model and its encoder; the model answers a question."""
    from lamella.inference.reader import Reader
    from lamella.models.loading import load_model

    reader = _tiny_reader(folder)

    def run(path: Path) -> None:
        Reader(load_model(reader, backend="onnx", few_questions=True)).ask("Who discovered Titan?", TITAN)

    return Fuzzer(run, [(folder / file).read_bytes()], folder / file)


def _tiny_reader(folder: Path) -> Path:
    save_tiny_bert(folder / "encoder")
    return save_tiny_reader(folder / "reader", folder / "encoder")


FUZZERS = {
    "formats": formats_fuzzer,
    "run files": run_files_fuzzer,
    "models": models_fuzzer,
    "weights": weights_fuzzer,
    "tokenizers": tokenizers_fuzzer,
    "encoders": encoders_fuzzer,
    "checkpoints": checkpoints_fuzzer,
}
