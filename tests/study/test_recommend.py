"""Recommendations within a budget: the best run, what is as good and cheaper, what more would buy, and devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lamella.errors import RunError, UsageError
from lamella.study.recommend import recommend
from run_folders import write_data, write_run, write_several

# F1, trained parameters, seconds per 1,000 questions, seconds of training
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


def test_without_a_budget_the_best_run_is_chosen(folder: Path) -> None:
    chosen = recommend([folder])
    assert chosen.best.name == "huge"
    assert not chosen.bigger


def test_the_best_within_the_budget_and_among_equals_the_cheaper(folder: Path) -> None:
    chosen = recommend([folder], max_params=10_000, max_ms=5)
    assert chosen.best.name == "middle"
    assert list(chosen.cheaper) == ["small"]  # tiny is clearly worse, twin costs more
    assert chosen.cheaper["small"][1] == (
        "1,000 trained parameters instead of 5,000",
        "2.00 ms per question instead of 3.00",
        "1.0 minutes of training instead of 2.0",
    )


def test_what_a_bigger_budget_would_buy_nearest_first(folder: Path) -> None:
    chosen = recommend([folder], max_params=10_000, max_ms=5, max_train_minutes=10)
    assert {name: breaks for name, (_, breaks) in chosen.bigger.items()} == {
        "slow": ("9.00 ms per question (--max-ms 5)",),
        "huge": (
            "9,000,000 trained parameters (--max-params 10000)",
            "9.00 ms per question (--max-ms 5)",
            "100.0 minutes of training (--max-train-minutes 10)",
        ),
    }
    assert list(chosen.bigger) == ["slow", "huge"]
    assert chosen.bigger["slow"][0].verdict.startswith("slow beats middle by 10.0 F1 [")


def test_no_run_within_the_budget(folder: Path) -> None:
    with pytest.raises(
        RunError,
        match=r"expected a run within the budget, got none; the nearest is tiny: 10 trained parameters \(--max",
    ):
        recommend([folder], max_params=5)
    with pytest.raises(UsageError, match=r"--max-ms: expected 0 or more, got -1"):
        recommend([folder], max_ms=-1)


def test_unknown_costs_are_left_out_by_name(folder: Path) -> None:
    (folder / "middle" / "cost.json").unlink()
    chosen = recommend([folder], max_params=10_000, max_ms=5)
    assert (chosen.best.name, chosen.unknown) == ("twin", ("middle",))
    assert "left out: 1 reader without a recorded cost (middle)" in chosen.lines()
    (folder / "twin" / "cost.json").write_text('{"trainable_parameters": NaN, "inference_seconds_per_1000": 1}')
    chosen = recommend([folder], max_params=10_000, max_ms=5)
    assert (chosen.best.name, chosen.unknown) == ("small", ("middle", "twin"))
    for name in RUNS:
        (folder / name / "cost.json").unlink(missing_ok=True)
    with pytest.raises(RunError, match="expected a recorded cost for --max-params, got none"):
        recommend([folder], max_params=10_000)
    assert recommend([folder]).best.name == "huge"


def test_the_command(folder: Path, lamella: Any) -> None:
    budget = ["--max-params", "1e4", "--max-ms", 5, "--max-train-minutes", 10]
    code, out, err = lamella("recommend", folder, *budget)
    assert (code, err) == (0, "")
    assert out.startswith(
        "take middle: F1 80.00, 5,000 trained parameters, 3.00 ms per question, 2.0 minutes of training "
        "(on a device that is not recorded)"
    )
    code, out, _ = lamella("recommend", folder, *budget, "--json")
    content = json.loads(out)
    assert (content["best"]["name"], [reader["name"] for reader in content["bigger_budget"]]) == (
        "middle",
        ["slow", "huge"],
    )
    code, out, err = lamella("recommend", folder, "--max-params", 1)
    assert (code, out, len(err.splitlines())) == (1, "", 1)


GPU, CPU = "NVIDIA H200", "cpu, 2 threads"


@pytest.fixture
def two_devices(folder: Path) -> Path:
    """The same runs: `slow` and `huge` timed on a GPU, at a fraction of their time on the CPU; the others on a CPU."""
    for name in RUNS:
        path = folder / name / "cost.json"
        cost = json.loads(path.read_text())
        if name in ("slow", "huge"):
            cost |= {"device": GPU, "inference_seconds_per_1000": cost["inference_seconds_per_1000"] / 100}
        else:
            cost |= {"device": CPU}
        path.write_text(json.dumps(cost))
    return folder


def test_a_limit_on_time_needs_a_device_if_there_are_several(two_devices: Path, lamella: Any) -> None:
    with pytest.raises(
        UsageError,
        match=r"--max-ms: expected times from one device, got times from cpu, 2 threads \(4 readers\) and NVIDIA H200 "
        r"\(2 readers\); choose one with --device",
    ):
        recommend([two_devices], max_ms=5)
    code, out, err = lamella("recommend", two_devices, "--max-ms", 5)
    assert (code, out, len(err.splitlines())) == (2, "", 1)


def test_readers_timed_on_another_device_are_left_out_and_counted(two_devices: Path, lamella: Any) -> None:
    on_cpu = recommend([two_devices], max_ms=5, device="CPU")
    assert on_cpu.best.name == "middle"
    assert on_cpu.other_device == {"slow": GPU, "huge": GPU}
    assert not on_cpu.bigger
    assert "left out: 2 readers timed on NVIDIA H200 (slow, huge)" in on_cpu.lines()
    assert on_cpu.lines()[0].endswith("(on cpu, 2 threads)")
    assert recommend([two_devices], max_ms=5, device="h200").best.name == "huge"
    with pytest.raises(UsageError, match=r"--device: expected one of the devices .*, got 'A100'"):
        recommend([two_devices], max_ms=5, device="A100")
    code, out, _ = lamella("recommend", two_devices, "--max-ms", 5, "--device", "cpu", "--json")
    assert code == 0
    assert json.loads(out)["other_device"] == {"slow": GPU, "huge": GPU}


def test_without_a_limit_on_time_devices_may_differ_but_their_times_do_not_count(two_devices: Path) -> None:
    chosen = recommend([two_devices], max_params=10_000)
    assert chosen.best.name == "slow"
    # `twin` is as good as `middle`; with equal parameters its lower time on another device must not decide.
    for name in ("middle", "twin"):
        path = two_devices / name / "cost.json"
        cost = json.loads(path.read_text()) | {"trainable_parameters": 5_000}
        if name == "twin":
            cost |= {"device": GPU, "inference_seconds_per_1000": 0.01, "train_seconds": 1.0}
        path.write_text(json.dumps(cost))
    pair = recommend([two_devices / "middle", two_devices / "twin"])
    assert pair.best.name == "middle"
    assert not pair.cheaper
