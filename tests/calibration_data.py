"""Questions to tune a threshold on, made so that it helps a reader that has learned little or nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lamella.data.examples import Answer, Example
from lamella.data.file_formats.formats import read
from lamella.data.file_formats.writers import write
from lamella.inference.predict import predict
from lamella.inference.protocols import QAModel


def split_articles(folder: Path) -> list[Example]:
    """Write `train.json` and `dev.json`, and return the questions about other articles, to tune on."""
    examples = read("demo:train").examples
    first = examples[0].context.title
    write([example for example in examples if example.context.title == first][:8], folder / "train.json")
    write(read("demo:dev").examples[::8], folder / "dev.json")
    return [example for example in examples if example.context.title != first]


def answered_by(model: QAModel, examples: Sequence[Example]) -> list[Example]:
    """The questions as the reader would answer them with a right threshold: half of them not at all."""
    predictions = predict(model, examples)
    middle = np.median([prediction.null_odds for prediction in predictions.values()])
    best = {id: (found.best_span, found.null_odds > middle) for id, found in predictions.items()}
    assert all(span.text and model.decoding.null_score_diff_threshold < middle for span, _ in best.values())
    return [
        replace(example, answers=() if withheld else (Answer(span.text, span.begin_char),))
        for example in examples
        for span, withheld in [best[example.id]]
    ]


def write_tuning_files(model: QAModel, examples: Sequence[Example], folder: Path) -> dict[str, Path]:
    """Write a small and a large file that a threshold helps this reader on."""
    written = {}
    for name, questions in {"tuning": examples[::6], "many": examples[:220]}.items():
        written[name] = folder / f"{name}.json"
        write(answered_by(model, questions), written[name])
    return written


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def decoding_of(run: Path) -> Any:
    return read_json(run / "model" / "config.json")["decoding"]
