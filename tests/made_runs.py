"""Run folders with models, histories and costs, written by hand for tests of reports."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Question = tuple[str, str, str, str | None]  # id, question, context, answer

TITAN = "In 2005 the probe Huygens landed on Titan, a moon of Saturn. It sent pictures for an hour and a half."
QUESTIONS: list[Question] = [
    ("q0", "What landed on Titan?", TITAN, "Huygens"),
    ("q1", "What was the probe called?", TITAN, "Huygens"),
    ("q2", "Who landed on the Moon?", TITAN, None),
    ("q3", "Who built the rings?", TITAN, None),
    ("q4", "When did the probe land?", TITAN, "2005"),
    ("q5", "How long did it send pictures?", TITAN, "an hour and a half"),
]


def make_run(
    folder: Path,
    *,
    mixer: str = "scalar_mix",
    seed: int = 0,
    fraction: float = 1.0,
    scores: Mapping[str, float] | None = None,
    questions: Sequence[Question] = QUESTIONS,
    predictions: Mapping[str, str] | None = None,
    na_prob: Mapping[str, float] | None = None,
    weights: tuple[Any, Any] | None = None,
    normalise: str = "none",
    cost: Mapping[str, Any] | None = None,
    steps: int = 20,
    evaluations: int = 2,
    data: Path | None = None,
    state: str = "finished",
) -> None:
    """Write a run folder as `train` leaves it; its dev questions are in `dev.json` beside it, or in the file `data`."""
    data = data or folder.with_name("dev.json")
    folder.mkdir(parents=True)
    if not data.exists():
        _write(data, _squad(questions))
    if predictions is None:
        predictions = {id: answer or "" for id, _, _, answer in questions}
    if na_prob is None:
        na_prob = {id: 0.9 - 0.1 * row / len(predictions) if not text else 0.2 + 0.1 * row / len(predictions)
                   for row, (id, text) in enumerate(predictions.items())}  # fmt: skip
    scores = scores or {"exact": 40.0, "f1": 50.0, "best_f1": 55.0, "HasAns_f1": 60.0, "NoAns_f1": 40.0, "ece": 3.0}
    times = {"started": "2026-01-01T10:00:00+00:00", "ended": "2026-01-01T10:01:00+00:00"}
    _write(folder / "run.json", {"state": state, "command": "train", **times})
    learner = {"mixer": [{"name": mixer}], "seed": seed, "fraction": fraction, "learning_rate": 0.01}
    _write(
        folder / "config.json",
        {"data": {"dev": [str(data)]}, "learner": learner, "training": {"metric": "f1", "epochs": 3.0}},
    )
    _write(folder / "eval_results.json", {"step": steps, "epoch": 3.0, **scores})
    _write(folder / "predictions.json", predictions)
    _write(folder / "na_prob.json", na_prob)
    _write(folder / "null_odds.json", {id: math.log((p + 1e-6) / (1 - p + 1e-6)) for id, p in na_prob.items()})
    if cost is not None:
        _write(folder / "cost.json", cost)
    records: list[dict[str, Any]] = [
        {"event": "step", "step": step, "epoch": 3 * step / steps, "loss": 5 * 0.9 ** (20 * step / steps) + 0.01 * seed}
        for step in range(1, steps + 1)
    ]
    for number in range(1, evaluations + 1):
        so_far = {name: value * number / evaluations for name, value in scores.items()}
        records.append(
            {
                "event": "evaluation",
                "step": steps * number // evaluations,
                "epoch": 3 * number / evaluations,
                **so_far,
                "seconds": 2.0 * number,
                "dev_loss": 4 / number,
            }
        )
    (folder / "history.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if weights is not None:
        from safetensors.numpy import save_file

        w, gamma = (np.asarray(values, dtype=np.float32) for values in weights)
        (folder / "model").mkdir()
        config = {"lamella": 1, "head": {"mixer": [{"name": "scalar_mix", "normalise": normalise}]}}
        _write(folder / "model" / "config.json", config)
        tensors = {"head.stages.0.w": w, "head.stages.0.gamma": gamma}
        save_file(tensors, folder / "model" / "model.safetensors")


def _squad(questions: Sequence[Question]) -> dict[str, Any]:
    paragraphs = []
    for id, question, context, answer in questions:
        answers = [] if answer is None else [{"text": answer, "answer_start": context.index(answer)}]
        entry = {"id": id, "question": question, "answers": answers, "is_impossible": answer is None}
        paragraphs.append({"context": context, "qas": [entry]})
    return {"version": "v2.0", "data": [{"title": "Titan", "paragraphs": paragraphs}]}


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
