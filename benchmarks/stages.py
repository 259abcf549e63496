"""Time everything in predict, evaluate and an evaluation of train but the encoder, against the encoder's own time.

    python benchmarks/stages.py [--quick] [--rate 5000] [--data FILE]... [--out stages.json]

The encoder is replaced by one that sleeps, as a host does while a GPU computes `rate` windows per second, and returns
noise. So the time of the peer is windows / rate, and a ratio of 1 means that nothing but the encoder takes time. Two
things are measured:

- stages: the CPU time of each stage, called one by one, per question and per window. Tokenizing is listed twice:
  `windows` is all of it, `tokenizer` the part inside the tokenizers library, which is its floor.
- predict, evaluate, train: the wall-clock time from the questions in memory to the files of the run, where stages
  overlap with the encoder, and the CPU time, which other programs on the machine affect less. Reading the file is a
  stage only; in train, questions are in windows already.

The data are those of the CS224n half of the SQuAD 2.0 dev set, HotpotQA with ten contexts per question and KorQuAD if
they are beside the checkout, else the bundled set, repeated.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lamella.config import DEFAULT_ENCODER, HEAD_OPTIONS, LearnerOptions, WindowOptions
from lamella.data.examples import Example
from lamella.data.windows.batches import Batch
from lamella.data.windows.features import Features, featurise, featurise_in_slices
from lamella.data.windows.padding import Padded, longest_first, pad
from lamella.data.windows.tokens import without_truncation
from lamella.decoding_options import DecodingOptions
from lamella.encoder.pretrained import load_tokenizer
from lamella.encoder.sources import find_encoder
from lamella.environment import library_versions
from lamella.files import write_json
from lamella.heads.head import Head
from lamella.inference.doubts import Doubts
from lamella.inference.one_pass import predict_many
from lamella.inference.predict import decode_batch, predict
from lamella.inference.prediction_files import write_predictions
from lamella.inference.questions import read_questions
from lamella.inference.several_contexts import answers_by_question, has_several_contexts
from lamella.inference.stored_logits import LogitsWriter
from lamella.inference.window_merger import WindowMerger
from lamella.models.saved import complete_head
from lamella.scoring.best_answers import null_odds_of, score_best_answers
from lamella.scoring.calibrate import threshold_report
from lamella.scoring.evaluate import score_predictions
from lamella.scoring.metrics import language_of, summarise
from lamella.training.fitting.dev_measures import DevMeasures

BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"
NAMES = ("cs224n-dev.json.gz", "hotpot-multicontext-dev.json.gz", "KorQuAD_v1.0_dev.json")
BATCH = 32
COMMANDS = ("predict", "evaluate", "train")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first 1,500 questions of each file, 3 repeats")
    parser.add_argument("--rate", type=float, default=5000, help="windows per second of the encoder")
    parser.add_argument("--data", action="append", help="a data file instead of the standard ones; repeatable")
    parser.add_argument("--out", type=Path, help="write the numbers to this json file")
    arguments = parser.parse_args()
    count, repeats = (1500, 3) if arguments.quick else (None, 5)
    files = arguments.data or [str(BESIDE / name) for name in NAMES if (BESIDE / name).is_file()] or ["demo:train"]
    reader = SleepingReader(arguments.rate)
    data = {Path(file).name: measure(file, count, repeats, reader) for file in files}
    slowest = min(
        (measured[command] for measured in data.values() for command in COMMANDS), key=lambda each: each["ratio"]
    )
    result = {
        **{key: slowest[key] for key in ("ratio", "spread", "ours", "peer")},
        "windows_per_second": arguments.rate,
        "unit": "s",
        "work": {"seconds": slowest["peer"], "of": "the encoder alone"},
        "repeats": repeats,
        "data": data,
        "versions": library_versions(),
    }
    if arguments.out:
        write_json(arguments.out, result)
    for name, measured in data.items():
        report(name, measured)
    low, high = slowest["spread"]
    print(f"stages: {slowest['ratio']:.2f} x the rate of the encoder, the slowest command ({low:.2f} to {high:.2f})")


class SleepingReader:
    """A model that takes `1 / rate` seconds per window and returns noise with a few peaks."""

    gives_text = True
    folders = ()
    training = False
    device = torch.device("cpu")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.tokenizer = load_tokenizer(find_encoder(DEFAULT_ENCODER))
        self.windows, self.decoding = WindowOptions(), DecodingOptions()
        self.head = Head(1, 8, longest=self.windows.max_seq_length, **head_options())
        generator = np.random.default_rng(0)
        self._noise = generator.normal(0, 1, 2 * BATCH * self.windows.max_seq_length + 997).astype(np.float32)
        peaks = generator.integers(0, len(self._noise), len(self._noise) // 40)
        self._noise[peaks] = generator.normal(6, 2, len(peaks))

    def noise(self, batch: Padded | Batch) -> NDArray[np.float32]:
        windows, tokens = batch.mask.shape
        begin = int(batch.windows[0]) % 997
        return self._noise[begin : begin + 2 * windows * tokens].reshape(2, windows, tokens)

    def logits(self, padded: Padded) -> NDArray[np.float32]:
        time.sleep(len(padded.windows) / self.rate)
        return self.noise(padded)

    # As a model in training, for `predict_many`.

    def encode(self, batch: Batch, layers: Sequence[int]) -> None:
        time.sleep(len(batch.windows) / self.rate)

    def __call__(self, batch: Batch, hidden: None) -> torch.Tensor:
        return torch.from_numpy(self.noise(batch))

    def eval(self) -> None: ...

    def train(self, mode: bool) -> None: ...


def head_options() -> dict[str, Any]:
    options = LearnerOptions()
    return complete_head({name: getattr(options, name) for name in HEAD_OPTIONS})


def measure(file: str, count: int | None, repeats: int, reader: SleepingReader) -> dict[str, Any]:
    """Measure the stages, the fastest of three rounds, and the commands."""
    clock = StageClock()
    with clock("read"):
        examples = list(read_questions(file, labelled=True))
    if file.startswith("demo:"):
        examples = [
            replace(example, id=f"{example.id}-{copy}")
            for copy in range(-(-(count or 6000) // len(examples)))
            for example in examples
        ]
    clock.seconds["read"] *= min(1.0, (count or len(examples)) / len(examples))
    examples = examples[:count]
    features = featurise(examples, reader.tokenizer, reader.windows)
    rounds = [time_stages(examples, features, reader) for _ in range(3)]
    stages = clock.seconds | {name: min(times[name] for times in rounds) for name in rounds[0]}
    encoder = len(features) / reader.rate
    commands = {
        name: compare(lambda run=run: run(examples, features, reader), encoder, repeats)
        for name, run in (("predict", run_predict), ("evaluate", run_evaluate), ("train", run_train))
    }
    return {
        "questions": len({example.question_id for example in examples}),
        "examples": len(examples),
        "windows": len(features),
        "stages": {
            name: {
                "us_per_example": 1e6 * seconds / len(examples),
                "us_per_window": 1e6 * seconds / len(features),
                "of_encoder": seconds / encoder,
            }
            for name, seconds in stages.items()
        },
        **commands,
    }


class StageClock:
    """Adds up the CPU seconds of stages, of all threads."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - began


def time_stages(examples: Sequence[Example], features: Features, reader: SleepingReader) -> dict[str, float]:
    clock = StageClock()
    tokenizer, windows, decoding = reader.tokenizer, reader.windows, reader.decoding
    with clock("windows"):
        for _ in featurise_in_slices(examples, tokenizer, windows):
            pass
    texts = list(dict.fromkeys(example.context.text for example in examples))
    questions = list(dict.fromkeys(example.question for example in examples))
    plain = without_truncation(tokenizer)
    with clock("tokenizer"):
        for begin in range(0, len(texts), 1000):
            plain.encode_batch(texts[begin : begin + 1000], add_special_tokens=False)
        plain.encode_batch_fast(questions, add_special_tokens=False)
    doubts = Doubts(tokenizer, windows)
    with clock("doubts"):
        doubts.add(features)
    merger, writer, measures = WindowMerger(decoding), LogitsWriter(reader), DevMeasures(reader)  # type: ignore[arg-type]
    for indices in longest_first(features.lengths, BATCH):
        with clock("pad"):
            padded = pad(features, indices)
        logits = reader.noise(padded)
        with clock("decode"):
            spans = decode_batch(reader, padded, logits)
        with clock("merge"):
            merger.add(features, spans)
        with clock("keep logits"):
            writer.add(features, padded, logits)
        with clock("dev loss"):
            measures.add(features, padded, None, logits)  # type: ignore[arg-type]  # no layer weights
    with clock("rank"):
        predictions = merger.predictions(examples)
    language = language_of(examples)
    odds = {id: prediction.null_odds for id, prediction in predictions.items()}
    with clock("score answers"):
        scores = score_best_answers(examples, predictions, language=language)
    with clock("thresholds"):
        summarise(scores, null_odds=odds, threshold=0.0)
        threshold_report(decoding, examples, scores, null_odds_of(examples, predictions), gives_text=True)
    if has_several_contexts(examples):
        with clock("answers by question"):
            answers_by_question(reader, examples, predictions)
    with tempfile.TemporaryDirectory() as folder:
        with clock("write"):
            write_predictions(Path(folder), reader, predictions, examples)
        with clock("write logits"):
            writer.write(Path(folder))
    return clock.seconds


def run_predict(examples: Sequence[Example], features: Features, reader: SleepingReader) -> None:
    with tempfile.TemporaryDirectory() as folder:
        doubts = Doubts(reader.tokenizer, reader.windows)
        predictions = predict(reader, examples, batch_size=BATCH, doubts=doubts)
        doubts.warn()
        write_predictions(Path(folder), reader, predictions, examples)


def run_evaluate(examples: Sequence[Example], features: Features, reader: SleepingReader) -> None:
    with tempfile.TemporaryDirectory() as folder:
        predictions = predict(reader, examples, batch_size=BATCH)
        score_predictions(reader, examples, predictions, language=language_of(examples))
        write_predictions(Path(folder), reader, predictions, examples)


def run_train(examples: Sequence[Example], features: Features, reader: SleepingReader) -> None:
    """Do as the bookkeeping of a training run does at an evaluation whose model is kept."""
    models: Any = [reader]
    with tempfile.TemporaryDirectory() as folder:
        measures = [DevMeasures(reader)]  # type: ignore[arg-type]
        (predictions,) = predict_many(models, features, batch_size=BATCH, measures=measures)
        score_predictions(reader, examples, predictions, language=language_of(examples))
        write_predictions(Path(folder), reader, predictions, examples)


def compare(work: Callable[[], None], encoder: float, repeats: int) -> dict[str, Any]:
    seconds, cpu_seconds = [], []
    for _ in range(repeats):
        began, cpu_began = time.perf_counter(), time.process_time()
        work()
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu_began)
    ratios = [encoder / each for each in seconds]
    return {
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "ours": statistics.median(seconds),
        "peer": encoder,
        "cpu_seconds": statistics.median(cpu_seconds),
    }


def report(name: str, measured: dict[str, Any]) -> None:
    print(f"{name}: {measured['examples']:,} questions in context, {measured['windows']:,} windows")
    for stage, cost in measured["stages"].items():
        print(
            f"  {stage:<20} {cost['us_per_example']:7.1f} µs per question {cost['us_per_window']:7.1f} µs per window "
            f"{cost['of_encoder']:6.0%} of the encoder"
        )
    for command in COMMANDS:
        result = measured[command]
        low, high = result["spread"]
        print(
            f"  {command}: {result['ours']:.2f} s, the encoder alone {result['peer']:.2f} s: {result['ratio']:.2f} x "
            f"({low:.2f} to {high:.2f}); {result['cpu_seconds']:.2f} s of CPU time"
        )


if __name__ == "__main__":
    main()
