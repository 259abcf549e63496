"""Reports of published tables: verdicts on runs with known differences, missing rows, misprints, seeds, mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lamella.inference.questions import read_questions
from run_folders import write_files

Lamella = Callable[..., tuple[int, str, str]]
PARAGRAPHS, QUESTIONS = 60, 4  # half of the questions have no answer
TOTAL = PARAGRAPHS * QUESTIONS


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Articles of five paragraphs with four questions each; every other question has no answer."""
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
    path = tmp_path_factory.mktemp("data") / "dev.json"
    path.write_text(json.dumps({"version": "v2.0", "data": articles}))
    return path


def write_row(
    folder: Path, data: Path, wrong: Iterable[int], *, seed: int = 0, cost: dict[str, Any] | None = None, **learner: Any
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
        "encoder": {"name": "/private/tiny"},
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


def verdicts(lamella: Lamella, id: str, runs: Sequence[Path], out: Path) -> dict[str, str]:
    """The verdicts of a page, by the text of the finding."""
    code, printed, err = lamella("report", "--paper", id, *runs, "--out", out, "--overwrite", "--json")
    assert code == 0, err
    tables = json.loads(printed)["tables"]
    return {finding["finding"]: finding["verdict"] for table in tables for finding in table["findings"]}


def test_each_verdict_occurs(tmp_path: Path, data: Path, lamella: Lamella) -> None:
    runs, page = tmp_path / "pce-table2", tmp_path / "page.md"
    write_row(runs / "dot", data, range(30))
    write_row(runs / "albert", data, range(90))
    write_row(runs / "weighted", data, [*range(4, 90), *range(90, 100)])
    write_row(runs / "bert", data, range(40))
    code, printed, err = lamella("report", "--paper", "pce-table2", runs, "--out", page, "--json")
    assert (code, err) == (0, "")
    (table,) = json.loads(printed)["tables"]
    pairs = {
        (pair["better"], pair["worse"], pair["metric"]): pair
        for finding in table["findings"]
        for pair in finding["comparisons"]
    }
    ahead = pairs["dot", "albert", "f1"]
    assert (ahead["verdict"], ahead["ours"]) == ("same sign and clear", pytest.approx(25.0))
    assert ahead["published"] == pytest.approx(0.317)
    assert pairs["albert", "bert", "f1"]["verdict"] == "reversed"
    leaning = pairs["albert", "weighted", "f1"]
    assert leaning["verdict"] == "same sign"
    assert leaning["interval"][0] < 0 < leaning["ours"]
    assert [finding["verdict"] for finding in table["findings"]] == [
        "same sign and clear", "same sign and clear", "same sign", "reversed"
    ]  # fmt: skip
    write_row(tmp_path / "again" / "albert", data, range(90))
    write_row(tmp_path / "again" / "dot", data, [*range(5, 90), *range(90, 95)])
    found = verdicts(lamella, "pce-table2", [tmp_path / "again"], page)
    assert found["Dot-product attention over the layers beats the last layer."] == "not distinguishable"
    assert found["Readers on ALBERT beat BERT."] == "not run"
