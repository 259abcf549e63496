"""Runs of rows of published tables, written by hand: each gets chosen questions wrong, and the others right."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lamella.inference.questions import read_questions
from run_folders import write_files

PARAGRAPHS, QUESTIONS = 60, 4  # half of the questions have no answer
TOTAL = PARAGRAPHS * QUESTIONS


def write_articles(path: Path) -> Path:
    """Write articles of five paragraphs with four questions each; every other question has no answer."""
    paragraphs = []
    for number in range(PARAGRAPHS):
        words = [f"w{number}x{place}" for place in range(QUESTIONS)]
        qas = [
            {"id": f"q{number:02}-{place}", "question": "Which?", "is_impossible": place % 2 == 1,
             "answers": [] if place % 2 else [{"text": word, "answer_start": sum(map(len, words[:place])) + place}]}
            for place, word in enumerate(words)
        ]  # fmt: skip
        paragraphs.append({"context": " ".join(words), "qas": qas})
    articles = [{"title": f"t{begin}", "paragraphs": paragraphs[begin : begin + 5]} for begin in range(0, 60, 5)]
    path.write_text(json.dumps({"version": "v2.0", "data": articles}))
    return path


def write_row(
    folder: Path,
    data: Path,
    wrong: Iterable[int],
    *,
    seed: int = 0,
    cost: dict[str, Any] | None = None,
    encoder: str = "tiny",
    **learner: Any,
) -> Path:
    """Write a run that gets every question right at threshold 0, except those with the numbers in `wrong`."""
    wrong, nbest, odds, texts = set(wrong), {}, {}, {}
    for number, example in enumerate(read_questions(str(data), labelled=True)):
        text = example.answers[0].text if example.answers else example.context.text.split()[0]
        abstains = (not example.answers) != (number in wrong)
        null = 2.0 if abstains else -2.0
        nbest[example.id] = [
            {"text": candidate, "probability": 0.5, "score": score, "start": 0, "end": len(candidate)}
            for candidate, score in ((text, 0.0), ("", null))
        ]
        odds[example.id], texts[example.id] = null, "" if abstains else text
    options = {"seed": seed, "mixer": [{"name": "last"}], **learner}
    config = {
        "data": {"train": ["/private/train.json"], "dev": [str(data)]},
        "encoder": {"name": f"/private/{encoder}"},
        "learner": options,
    }
    write_files(
        folder,
        {
            "run.json": {"state": "finished", "command": "train", "ended": "2026-01-01T10:00:00+00:00"},
            "config.json": config,
            "cost.json": {
                "trainable_parameters": 1000,
                "train_seconds": 60.0,
                "device": "cpu, 1 thread",
                **(cost or {}),
            },
            "nbest_predictions.json": nbest,
            "null_odds.json": odds,
            "predictions.json": texts,
        },
    )
    return folder
