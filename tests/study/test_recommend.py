"""Choosing within a budget: the best one, what is as good and cheaper, what more would buy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lamella.errors import RunError, UsageError
from lamella.study.recommend import recommend
from run_folders import write_data, write_run, write_several

# F1, trained parameters, seconds for 1,000 questions, seconds of training
RUNS = {
    "tiny": (70, 10, 2.0, 60),
    "small": (79, 1_000, 2.0, 60),
    "middle": (80, 5_000, 3.0, 120),
    "twin": (80, 6_000, 3.0, 120),
    "slow": (90, 5_000, 9.0, 120),
    "huge": (95, 9_000_000, 9.0, 6_000),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = write_data(tmp_path / "data.json", 100)
    for name, (f1, parameters, seconds, train) in RUNS.items():
        cost = {
            "trainable_parameters": parameters,
            "inference_seconds_per_1000": seconds,
            "train_seconds": train,
        }
        write_run(tmp_path / "all" / name, data, [1] * f1 + [0] * (100 - f1), cost=cost)
    return write_several(tmp_path / "all", list(RUNS))


def test_without_a_budget_the_best_is_taken(folder: Path) -> None:
    found = recommend([folder])
    assert found.best.name == "huge"
    assert not found.bigger


def test_the_best_within_the_budget_and_of_equals_the_cheaper(folder: Path) -> None:
    found = recommend([folder], max_params=10_000, max_ms=5)
    assert found.best.name == "middle"
    assert list(found.cheaper) == ["small"]  # tiny is clearly worse, twin costs more
    assert found.cheaper["small"][1] == (
        "1,000 trained parameters instead of 5,000",
        "2.00 ms a question instead of 3.00",
        "1.0 minutes of training instead of 2.0",
    )


def test_what_a_bigger_budget_would_buy_the_next_better_first(folder: Path) -> None:
    found = recommend([folder], max_params=10_000, max_ms=5, max_train_minutes=10)
    assert {name: breaks for name, (_, breaks) in found.bigger.items()} == {
        "slow": ("9.00 ms a question (--max-ms 5)",),
        "huge": (
            "9,000,000 trained parameters (--max-params 10000)",
            "9.00 ms a question (--max-ms 5)",
            "100.0 minutes of training (--max-train-minutes 10)",
        ),
    }
    assert list(found.bigger) == ["slow", "huge"]
    assert found.bigger["slow"][0].verdict.startswith("slow beats middle by 10.0 F1 [")


def test_no_run_within_the_budget(folder: Path) -> None:
    with pytest.raises(
        RunError, match=r"no run is within the budget; the nearest is tiny: 10 trained parameters \(--max"
    ):
        recommend([folder], max_params=5)
    with pytest.raises(UsageError, match=r"--max-ms: expected 0 or more\. Got -1"):
        recommend([folder], max_ms=-1)


def test_unknown_costs_are_left_out_by_name(folder: Path) -> None:
    (folder / "middle" / "cost.json").unlink()
    found = recommend([folder], max_params=10_000, max_ms=5)
    assert (found.best.name, found.unknown) == ("twin", ("middle",))
    (folder / "twin" / "cost.json").write_text('{"trainable_parameters": NaN, "inference_seconds_per_1000": 1}')
    found = recommend([folder], max_params=10_000, max_ms=5)
    assert (found.best.name, found.unknown) == ("small", ("middle", "twin"))
    for name in RUNS:
        (folder / name / "cost.json").unlink(missing_ok=True)
    with pytest.raises(RunError, match="no run records what --max-params limits"):
        recommend([folder], max_params=10_000)
    assert recommend([folder]).best.name == "huge"


def test_the_command(folder: Path, lamella: Any) -> None:
    budget = ["--max-params", "1e4", "--max-ms", 5, "--max-train-minutes", 10]
    code, out, err = lamella("recommend", folder, *budget)
    assert (code, err) == (0, "")
    assert out.startswith(
        "take middle: F1 80.00, 5,000 trained parameters, 3.00 ms a question, 2.0 minutes of training"
    )
    code, out, _ = lamella("recommend", folder, *budget, "--json")
    content = json.loads(out)
    assert (content["best"]["name"], [one["name"] for one in content["bigger_budget"]]) == ("middle", ["slow", "huge"])
    code, out, err = lamella("recommend", folder, "--max-params", 1)
    assert (code, out, len(err.splitlines())) == (1, "", 1)
