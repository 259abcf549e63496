"""Comparing runs: verdicts, seeds, fronts, refusals, and a thousand runs at once."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamella.errors import RunError, UsageError
from lamella.study.compare import compare
from run_folders import write_data, write_run, write_several

MANY = 100


def config(mixer: str, seed: int = 0) -> dict[str, Any]:
    return {"learner": {"mixer": mixer, "seed": seed}, "training": {"order_seed": 0}}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data.json", MANY)


def test_a_clear_difference_and_one_that_is_not(tmp_path: Path, data: Path) -> None:
    last = write_run(tmp_path / "last", data, [1] * 50 + [0] * 50)
    dot = write_run(tmp_path / "dot", data, [1] * 51 + [0] * 49)
    best = write_run(tmp_path / "best", data, [1] * 90 + [0] * 10)
    found = compare([last, dot, best])
    assert found.against["dot"].verdict == "dot beats last by 1.0 F1 [0.0, 3.0]: not distinguishable"
    assert (found.against["dot"].won, found.against["dot"].lost, found.against["dot"].p) == (1, 0, 1.0)
    assert found.against["best"].verdict.startswith("best beats last by 40.0 F1 [")
    assert found.against["best"].verdict.endswith("]: clearly better")
    assert (found.against["best"].won, found.against["best"].lost) == (40, 0)
    assert found.against["best"].p == pytest.approx(2 * 0.5**40)
    assert found.against["best"].resampled == "questions"
    assert (found.questions, found.paragraphs) == (MANY, 20)


def test_the_better_one_is_named_first(tmp_path: Path, data: Path) -> None:
    best = write_run(tmp_path / "best", data, [1] * 90 + [0] * 10)
    last = write_run(tmp_path / "last", data, [1] * 50 + [0] * 50)
    same = write_run(tmp_path / "same", data, [1] * 90 + [0] * 10)
    found = compare([best, last, same])
    assert found.against["last"].verdict.startswith("best beats last by 40.0 F1 [3")
    assert found.against["last"].f1.value == pytest.approx(-40)
    assert found.against["same"].verdict == "same equals best: not distinguishable"


def test_runs_that_differ_in_seeds_are_one_reader(tmp_path: Path, data: Path) -> None:
    rights = {"dot-seed0": [1] * 60 + [0] * 40, "dot-seed1": [1] * 70 + [0] * 30, "last-seed0": [0] * 100}
    folder = write_several(tmp_path / "all", list(rights))
    for name, right in rights.items():
        mixer, _, seed = name.partition("-seed")
        write_run(folder / name, data, right, config=config(mixer, int(seed)))
    found = compare([folder], baseline="last-seed0")
    dot = next(one for one in found.contenders if one.name == "dot")
    assert [run.name for run in dot.runs] == ["dot-seed0", "dot-seed1"]
    assert dot.f1.mean() == pytest.approx(0.65)
    assert dot.deviation == pytest.approx(np.std([60, 70], ddof=1))
    assert found.against["dot"].resampled == "paragraphs"
    assert found.against["dot"].p is None  # a mean of two against one
    assert (found.against["dot"].won, found.against["dot"].lost) == (70, 0)


def test_a_difference_within_the_seeds_is_called_that(tmp_path: Path, data: Path) -> None:
    folders = [
        write_run(tmp_path / name, data, [1] * right + [0] * (100 - right), config=config(name[0], seed))
        for name, right, seed in [("a0", 20, 0), ("a1", 80, 1), ("b0", 70, 0), ("b1", 75, 1)]
    ]
    found = compare(folders)
    assert found.against["b"].f1.is_clear
    assert found.against["b"].verdict.endswith("better on these questions, but not by more than the seeds differ")
    assert found.against["b"].p is not None


def test_a_run_made_twice_is_not_two_seeds(tmp_path: Path, data: Path) -> None:
    folders = [write_run(tmp_path / name, data, [1] * 100, config=config("dot")) for name in ("a", "b")]
    found = compare(folders)
    assert [one.name for one in found.contenders] == ["a", "b"]


def test_a_run_that_is_called_as_the_seeds_of_another_keeps_its_name(tmp_path: Path, data: Path) -> None:
    rights = {"dot-seed0": (60, 0), "dot-seed1": (70, 1), "dot": (90, 0)}
    folders = [
        write_run(tmp_path / name, data, [1] * right + [0] * (100 - right), config=config("dot", seed))
        for name, (right, seed) in rights.items()
    ]
    found = compare(folders)
    assert [(one.name, len(one.runs)) for one in found.contenders] == [("dot-seed0", 2), ("dot", 1)]
    assert list(found.against) == ["dot"]
    assert found.against["dot"].verdict.startswith("dot beats dot-seed0 by 25.0 F1 [")


def test_seeds_of_which_the_first_came_without_a_number_have_its_name(tmp_path: Path, data: Path) -> None:
    folders = [
        write_run(tmp_path / name, data, [1] * 100, config=config("dot", seed))
        for name, seed in (("dot-seed1", 1), ("dot", 0))
    ]
    other = write_run(tmp_path / "last", data, [1] * 100, config=config("last"))
    assert [(one.name, len(one.runs)) for one in compare([*folders, other]).contenders] == [("dot", 2), ("last", 1)]


@pytest.mark.parametrize(("questions", "told"), [(5, "too few questions to tell"), (6, "clearly better")])
def test_a_handful_of_questions_tells_nothing(tmp_path: Path, questions: int, told: str) -> None:
    data = write_data(tmp_path / "few.json", questions)
    best, worst = (write_run(tmp_path / str(one), data, [one] * questions) for one in (1, 0))
    found = compare([worst, best]).against["1"]
    assert found.verdict == f"1 beats 0 by 100.0 F1 [100.0, 100.0]: {told}"
    assert found.to_json()["clear"] is (questions == 6)


def test_seeds_on_a_few_paragraphs_tell_nothing(tmp_path: Path) -> None:
    data = write_data(tmp_path / "few.json", 25)  # in 5 paragraphs
    folders = [
        write_run(tmp_path / f"{name}{seed}", data, [right] * 25, config=config(name, seed))
        for name, right in (("a", 0), ("b", 1))
        for seed in (0, 1)
    ]
    assert compare(folders).against["b"].verdict.endswith("too few paragraphs to tell")


def test_fronts_hold_what_nothing_cheaper_equals(tmp_path: Path, data: Path) -> None:
    folders = [
        write_run(tmp_path / name, data, [1] * right + [0] * (100 - right), cost=cost)
        for name, right, cost in [
            ("cheap", 40, {"trainable_parameters": 10, "train_seconds": 5.0}),
            ("worse", 30, {"trainable_parameters": 20, "train_seconds": 1.0}),
            ("good", 60, {"trainable_parameters": 30, "train_seconds": 9.0}),
            ("equal", 60, {"trainable_parameters": 40, "train_seconds": 9.0}),
            ("unknown", 90, {}),
        ]
    ]
    fronts = compare(folders).fronts
    assert fronts["trainable_parameters"] == ("cheap", "good")
    assert fronts["train_seconds"][:2] == ("worse", "cheap")
    assert fronts["inference_seconds_per_1000"] == ()


def test_refusals(tmp_path: Path, data: Path) -> None:
    one = write_run(tmp_path / "one", data, [1] * 100)
    with pytest.raises(UsageError, match=r"expected two readers or more\. Got one alone"):
        compare([one])
    with pytest.raises(RunError, match="expected the questions of"):
        compare([one, write_run(tmp_path / "short", data, [1] * 90)])
    two = write_run(tmp_path / "two", data, [1] * 100)
    with pytest.raises(
        UsageError, match=r"--baseline three: expected one of the runs or its folder\. There are one, two"
    ):
        compare([one, two], baseline="three")


def test_the_command_prints_a_table_and_a_sentence_or_json(tmp_path: Path, data: Path, lamella: Any) -> None:
    last = write_run(tmp_path / "last", data, [1] * 50 + [0] * 50)
    best = write_run(tmp_path / "best", data, [1] * 90 + [0] * 10, cost={"trainable_parameters": 1234})
    code, out, err = lamella("compare", best, "--baseline", last)
    assert (code, err) == (0, "")
    assert "1,234" in out
    assert "best beats last by 40.0 F1 [" in out
    code, out, _ = lamella("compare", last, best, "--json")
    content = json.loads(out)
    assert content["baseline"] == "last"
    assert content["runs"][1]["against_baseline"]["clear"] is True
    assert content["runs"][1]["f1"] == pytest.approx(90)
    code, out, err = lamella("compare", last, tmp_path / "nowhere")
    assert (code, out, len(err.splitlines())) == (1, "", 1)


def test_a_thousand_runs_compare_in_seconds(tmp_path: Path) -> None:
    """Ten of them are better. The baseline is exactly as good as the others are on average: a lucky one would seem to
    beat hundreds of its equals, since all comparisons share it.
    """
    data = write_data(tmp_path / "data.json", 500)
    rng = np.random.default_rng(0)
    rights = {f"r{n}": (rng.random(500) < (0.7 if n < 10 else 0.5)).tolist() for n in range(1000)}
    folders = [
        write_run(tmp_path / name, data, right) for name, right in {"half": [False, True] * 250, **rights}.items()
    ]
    began = time.perf_counter()
    found = compare(folders)
    assert time.perf_counter() - began < 10
    clear = [name for name, one in found.against.items() if one.f1.is_clear]
    assert clear[:10] == [f"r{n}" for n in range(10)]
    assert len(clear) < 50
    assert any(line.startswith("1000 comparisons share one baseline") for line in found.lines())
