"""A real encoder learns: it memorises a few questions, and it improves on the bundled dev set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from doubles import write_short_questions

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo.toml"


def evaluations(run: Path) -> list[dict[str, Any]]:
    history = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    return [record for record in history if "f1" in record]


def test_a_fully_tuned_encoder_memorises_4_questions(lamella: Any, tmp_path: Path) -> None:
    data = write_short_questions(tmp_path / "short.jsonl")
    fast = ("training.epochs=10", "training.evaluate_every=10", "training.batch_size=4", "learner.learning_rate=3e-4")
    assert_memorised(lamella, tmp_path / "run", data, 4, *fast)


@pytest.mark.slow
def test_a_fully_tuned_encoder_memorises_32_questions(lamella: Any, tmp_path: Path) -> None:
    assert_memorised(lamella, tmp_path / "run", "demo:train", 32)


def assert_memorised(lamella: Any, out: Path, data: object, questions: int, *more: str) -> None:
    changes = [
        f"data.train={data}",
        f"data.dev={data}",
        f"data.max_train_samples={questions}",
        f"data.max_eval_samples={questions}",
        "training.epochs=14",
        "training.evaluate_every=14",
        "training.precision=fp32",
        *more,
    ]
    settings = [word for change in changes for word in ("--set", change)]
    code, _, err = lamella("train", DEMO, "--out", out, *settings)
    assert (code, err) == (0, "")
    results = json.loads((out / "eval_results.json").read_text())
    assert results["total"] == questions
    assert 0 < results["HasAns_total"] < questions
    assert results["exact"] >= 95
    assert results["HasAns_exact"] >= 95


@pytest.mark.slow
def test_the_demo_run_improves_over_its_epochs(lamella: Any, tmp_path: Path) -> None:
    """A reader that never answers has F1 33.3 on the bundled dev set: a third of its questions have no answer."""
    code, _, err = lamella("train", DEMO, "--out", tmp_path / "run")
    assert (code, err) == (0, "")
    scores = evaluations(tmp_path / "run")
    first, last = scores[0], scores[-1]
    assert max(score["f1"] for score in scores) > 100 / 3 + 1
    assert last["f1"] > first["f1"]
    assert last["HasAns_f1"] > first["HasAns_f1"] + 5
    assert last["best_f1"] > first["best_f1"]
