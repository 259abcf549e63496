"""Measure how time and memory grow: with windows, layers and heads, with the length of a context, with the runs.

    python benchmarks/growth.py [CURVE ...] [--quick] [--out growth.json]

Curves; without any, all of them are measured:

- heads: seconds of training steps of 1 to 64 heads in one pass of the frozen all-MiniLM-L6-v2.
- windows: the same for eight heads, by the number of windows in a step.
- layers: the same for one head, by the layers of an encoder of the same width with random weights.
- contexts: one question about a text of 1 kB to 10 MB, from the text to the n-best list, with an encoder that costs
  nothing: seconds, and the peak memory of the process beyond that of the shortest text.
- compare, report, list: `lamella compare`, `lamella report` and `lamella sweep --list` by the number of runs.

The `exponent` of a curve is the slope of log(seconds) over log(size) between its last two points: 1 is linear growth.
`ratio` is the time of 64 passes with one head each, divided by the time of one pass with 64.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fanout import EIGHT, train
from lamella.config import DEFAULT_ENCODER, RunConfig, TrainingOptions
from lamella.data.dataset import load_examples
from lamella.data.windows.features import Features, featurise
from lamella.encoder.pretrained import LoadedEncoder
from lamella.environment import library_versions
from lamella.files import write_json, write_text
from lamella.models.base_encoder import load_encoder
from lamella.scoring.cost import peak_memory
from lamella.testing.tiny import tiny_encoder
from suite.work import encoder_flops

ROOT = Path(__file__).resolve().parents[1]
HEADS, WINDOWS, LAYERS = (1, 4, 16, 64), (4, 16, 64), (1, 3, 6, 12)
CONTEXTS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
RUNS = (10, 100, 1000)
MINILM = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536, "max_position_embeddings": 512}
QUESTIONS = 100  # of a run

Points = dict[int, dict[str, Any]]  # by size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", nargs="*", metavar="CURVE", help=f"one or more of: {', '.join(CURVES)}")
    parser.add_argument("--out", type=Path, help="write the numbers to this json file")
    parser.add_argument("--quick", action="store_true", help="2 repeats instead of 5")
    parser.add_argument("--context", type=int, help=argparse.SUPPRESS)  # measure one text, in a process of its own
    arguments = parser.parse_args()
    if unknown := set(arguments.curves) - set(CURVES):
        parser.error(f"expected curves among {', '.join(CURVES)}, got {', '.join(sorted(unknown))}")
    if arguments.context:
        print(json.dumps(read_context(arguments.context)))
        return
    repeats = 2 if arguments.quick else 5
    curves = {}
    for name in arguments.curves or CURVES:
        points = CURVES[name](repeats)
        curves[name] = {"points": {str(size): point for size, point in points.items()}, "exponent": exponent(points)}
        text = ", ".join(f"{size:,}: {point['seconds']:.3g} s" for size, point in points.items())
        print(f"{name}: {text}; exponent {curves[name]['exponent']:.2f}", flush=True)
    result = {**(summary(curves["heads"]) if "heads" in curves else {}), "curves": curves, "repeats": repeats}
    if arguments.out:
        write_json(arguments.out, {**result, "versions": library_versions()})
    if "heads" in curves:
        low, high = result["spread"]
        print(f"growth: 64 heads in one pass: {result['ratio']:.1f} x as fast as 64 passes ({low:.1f} to {high:.1f})")


def summary(heads: dict[str, Any]) -> dict[str, Any]:
    """Return one pass with the most heads against as many passes with one."""
    most = max(HEADS)
    alone, together = heads["points"]["1"], heads["points"][str(most)]
    ratios = [most * one / many for one, many in zip(alone["times"], together["times"], strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "ours": together["seconds"],
        "peer": most * alone["seconds"],
        "unit": "s",
        "work": {
            "flops": together["flops"],
            "threads": torch.get_num_threads(),
            "of": "the products of the encoder, once",
        },
    }


def exponent(points: Points) -> float:
    (small, before), (large, after) = list(points.items())[-2:]
    return math.log(after["seconds"] / before["seconds"]) / math.log(large / small)


# Curves


def by_heads(repeats: int) -> Points:
    base, features = minilm()
    learners = [each.model_copy(update={"seed": seed}) for seed in range(max(HEADS) // len(EIGHT)) for each in EIGHT]
    batch = 8
    jobs = {count: lambda count=count: train(learners[:count], base, features, steps(batch)) for count in HEADS}
    flops = batch * encoder_flops(features.lengths) / len(features)
    return {size: {**point, "flops": flops} for size, point in measure(jobs, repeats).items()}


def by_windows(repeats: int) -> Points:
    base, features = minilm()
    return measure(
        {count: lambda count=count: train(EIGHT, base, features, steps(count)) for count in WINDOWS}, repeats
    )


def by_layers(repeats: int) -> Points:
    jobs: dict[int, Callable[[], object]] = {}
    for count in LAYERS:
        base = tiny_encoder("bert", num_hidden_layers=count, **MINILM)
        features = cut(base)
        jobs[count] = lambda base=base, features=features: train(EIGHT[:1], base, features, steps(8))
    return measure(jobs, repeats)


def by_contexts(repeats: int) -> Points:
    points: Points = {}
    for size in CONTEXTS:
        command = [sys.executable, __file__, "--context", str(size)]
        runs = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(repeats)]
        times = [run["seconds"] for run in runs]
        mib = statistics.median(run["mib"] for run in runs)
        points[size] = {"seconds": statistics.median(times), "times": times, "mib": mib, "windows": runs[0]["windows"]}
    least = points[CONTEXTS[0]]["mib"]
    return {size: {**point, "mib": max(0.0, point["mib"] - least)} for size, point in points.items()}


def by_runs(*arguments: str) -> Callable[[int], Points]:
    """Return the curve of a command on a folder of runs."""

    def curve(repeats: int) -> Points:
        with tempfile.TemporaryDirectory() as name:
            jobs = {}
            for count in RUNS:
                folder = Path(name) / str(count)
                made_runs(folder, count)
                given = [each.format(folder=folder, out=Path(name)) for each in arguments]
                jobs[count] = lambda given=given: command(given)
            return measure(jobs, repeats)

    return curve


def listed_runs(repeats: int) -> Points:
    with tempfile.TemporaryDirectory() as name:
        jobs = {}
        for count in RUNS:
            file = Path(name) / f"{count}.toml"
            write_text(
                file, f'[data]\ntrain = "demo:train"\ndev = "demo:dev"\n[grid.learner]\nseed = {list(range(count))}\n'
            )
            jobs[count] = lambda file=file: command(["sweep", str(file), "--out", str(Path(name) / "out"), "--list"])
        return measure(jobs, repeats)


CURVES: dict[str, Callable[[int], Points]] = {
    "heads": by_heads,
    "windows": by_windows,
    "layers": by_layers,
    "contexts": by_contexts,
    "compare": by_runs("compare", "{folder}"),
    "report": by_runs("report", "{folder}", "--out", "{out}/report.html", "--overwrite"),
    "list": listed_runs,
}


# Work


def minilm() -> tuple[LoadedEncoder, Features]:
    base = load_encoder(DEFAULT_ENCODER)
    return base, cut(base)


def cut(base: LoadedEncoder) -> Features:
    return featurise(load_examples(["demo:train"]).examples, base.tokenizer, RunConfig().windows)


def steps(windows: int) -> TrainingOptions:
    """Return the options of a single step with this number of windows."""
    return TrainingOptions(
        max_steps=1, batch_size=windows, precision="fp32", evaluate_every=1000, checkpoint_every=1000
    )


def command(arguments: Sequence[str]) -> None:
    subprocess.run([sys.executable, "-m", "lamella", *arguments], check=True, capture_output=True)


def measure(jobs: dict[int, Callable[[], object]], repeats: int) -> Points:
    """Time the jobs in turn, by size; the first run of the smallest warms up."""
    next(iter(jobs.values()))()
    times: dict[int, list[float]] = {size: [] for size in jobs}
    for _ in range(repeats):
        for size, job in jobs.items():
            began = time.perf_counter()
            job()
            times[size].append(time.perf_counter() - began)
    return {size: {"seconds": statistics.median(own), "times": own} for size, own in times.items()}


def read_context(size: int) -> dict[str, Any]:
    """Answer a question about a text of this size with an encoder that costs nothing; return time and peak memory."""
    from lamella.data.examples import Context, Example
    from lamella.inference.predict import predict
    from stages import BATCH, SleepingReader

    texts: Iterator[str] = itertools.cycle(
        {example.context.text: None for example in load_examples(["demo:train"]).examples}
    )
    parts, length = [], 0
    while length < size:
        parts.append(next(texts)[: size - length])
        length += len(parts[-1]) + 1
    reader, example = SleepingReader(math.inf), Example("q", "When was it found?", Context(" ".join(parts)), ())
    began = time.perf_counter()
    predict(reader, [example], batch_size=BATCH)
    seconds = time.perf_counter() - began
    peak = (peak_memory() or 0) / 2**20  # before the windows are counted
    return {"seconds": seconds, "mib": peak, "windows": len(featurise([example], reader.tokenizer, reader.windows))}


def made_runs(folder: Path, count: int) -> None:
    """Write run folders as the tests of reports do, about questions that half of the runs answer."""
    path = ROOT / "tests" / "made_runs.py"
    spec = importlib.util.spec_from_file_location("made_runs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    questions = [(f"q{n}", *module.QUESTIONS[n % len(module.QUESTIONS)][1:]) for n in range(QUESTIONS)]
    for run in range(count):
        answers = {id: answer or "" if (place + run) % 2 else "" for place, (id, _, _, answer) in enumerate(questions)}
        share = 1 - run / (2 * count)  # of the training data; runs that differ in their seed alone are one reader
        module.make_run(folder / f"run-{run}", fraction=share, questions=questions, predictions=answers)


if __name__ == "__main__":
    main()
