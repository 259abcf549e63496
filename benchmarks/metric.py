"""Time scoring a dev set of SQuAD's size, against the same definitions written as plain loops.

    python benchmarks/metric.py [--quick] [--out metric.json]

The peer is the plain-loop form of the official definitions, which `tests/numbers/test_metrics.py` checks the metric
against. Both score the same synthetic set: half the questions unanswerable, about four answers to each of the others.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lamella.data.examples import Answer, Context, Example
from lamella.files import write_json
from lamella.scoring.metrics import score
from lamella.version import __version__


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--quick", action="store_true", help="1,200 questions, 15 repeats")
    arguments.add_argument("--out", type=Path, help="write the numbers to this json file")
    options = arguments.parse_args()
    count, repeats = (1200, 15) if options.quick else (12000, 7)

    examples, predictions, odds = synthetic_set(count)
    plain = plain_definitions()
    agree(score(examples, predictions, null_odds=odds), plain.plain_score(examples, predictions, odds))
    pairs = [
        (
            seconds(lambda: score(examples, predictions, null_odds=odds)),
            seconds(lambda: plain.plain_score(examples, predictions, odds)),
        )
        for _ in range(repeats)  # in turn, so that load affects both alike
    ]
    ratios = [peer / ours for ours, peer in pairs]
    result = {
        "questions": count,
        "repeats": repeats,
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "ours": statistics.median(ours for ours, _ in pairs),
        "peer": statistics.median(peer for _, peer in pairs),
        "unit": "s",
        "work": {"bytes": text_bytes(examples, predictions), "of": "read the answers once"},
        "versions": {"lamella": __version__, "numpy": np.__version__, "python": platform.python_version()},
    }
    if options.out:
        write_json(options.out, result)
    print(f"{count} questions, {repeats} repeats: {result['ours']:.3f} s ours, {result['peer']:.3f} s plain loops")
    print(f"metric: {result['ratio']:.1f} x as fast ({min(ratios):.1f} to {max(ratios):.1f})")


def synthetic_set(count: int) -> tuple[list[Example], dict[str, str], dict[str, float]]:
    """Make questions whose annotators agree about as often as SQuAD's: four answers, two different texts."""
    generator = random.Random(0)
    vocabulary = ["the", "a", "of", "in"] * 20 + [f"Word{number}" for number in range(3000)]
    examples, predictions, odds = [], {}, {}
    for number in range(count):
        words = generator.choices(vocabulary, k=120)
        begin = generator.randrange(110)
        wide, narrow = " ".join(words[begin : begin + generator.randint(2, 6)]), words[begin]
        golds = [wide, wide, wide + ",", narrow][: generator.randint(3, 4)] if number % 2 else []
        examples.append(Example(f"q{number}", "?", Context(" ".join(words)), tuple(Answer(gold, 0) for gold in golds)))
        near = " ".join(words[max(begin - 1, 0) : begin + 3])
        predictions[f"q{number}"] = generator.choice(["", wide, near, near, narrow])
        odds[f"q{number}"] = generator.gauss(-1.0 if golds else 1.0, 2.0)
    return examples, predictions, odds


def plain_definitions() -> Any:
    """Load the test module with the plain loops by its path: tests are not a package."""
    path = Path(__file__).resolve().parents[1] / "tests" / "numbers" / "test_metrics.py"
    spec = importlib.util.spec_from_file_location("plain_definitions", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text_bytes(examples: list[Example], predictions: dict[str, str]) -> int:
    golds = (answer.text for example in examples for answer in example.answers)
    return sum(len(text.encode()) for texts in (golds, predictions.values()) for text in texts)


def agree(ours: dict[str, float], peer: dict[str, float]) -> None:
    """Check that both give the same numbers: a faster wrong answer is no result."""
    for key, value in peer.items():
        if abs(ours[key] - value) > 1e-9:
            raise SystemExit(f"{key} differs: {ours[key]} ours, {value} plain loops")


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
