"""Run folders written by hand, as commands leave them, for tests of the study commands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

QUESTIONS_PER_PARAGRAPH = 5


def write_data(path: Path, questions: int) -> Path:
    """A data file whose question `q7` has the answer `a7`."""
    paragraphs = []
    for begin in range(0, questions, QUESTIONS_PER_PARAGRAPH):
        numbers = range(begin, min(begin + QUESTIONS_PER_PARAGRAPH, questions))
        context = " ".join(f"a{number}" for number in numbers)
        qas = [
            {"id": f"q{number}", "question": "Which?", "is_impossible": False,
             "answers": [{"text": f"a{number}", "answer_start": context.index(f"a{number}")}]}
            for number in numbers
        ]  # fmt: skip
        paragraphs.append({"context": context, "qas": qas})
    path.write_text(json.dumps({"version": "v2.0", "data": [{"title": "t", "paragraphs": paragraphs}]}))
    return path


def write_run(
    folder: Path,
    data: Path | None,
    right: Sequence[bool | int],
    *,
    config: Mapping[str, Any] | None = None,
    cost: Mapping[str, Any] | None = None,
    state: str = "finished",
) -> Path:
    """A run that answers question `q7` correctly if `right[7]`, and with "no answer" otherwise."""
    scored = {"data": {"files": [str(data)]}} if data else {}
    files: dict[str, Any] = {
        "run.json": {"state": state, "command": "evaluate", **scored},
        "predictions.json": {f"q{n}": f"a{n}" if correct else "" for n, correct in enumerate(right)},
        "eval_results.json": {"f1": 100 * sum(map(bool, right)) / len(right), "best_f1": 90.0, "threshold": 0.5},
    }
    if config is not None:
        files["config.json"] = config
    if cost is not None:
        files["cost.json"] = cost
    write_files(folder, files)
    return folder


def write_several(folder: Path, names: Sequence[str]) -> Path:
    """The folder above several runs made by one command."""
    write_files(folder, {"run.json": {"state": "finished", "command": "train", "runs": list(names)}})
    return folder


def write_files(folder: Path, files: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
