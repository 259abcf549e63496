"""Comparing runs: verdicts, seeds, devices, thresholds, errors, and a thousand runs at once."""

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


def test_a_clear_difference_and_an_unclear_one(tmp_path: Path, data: Path) -> None:
    last = write_run(tmp_path / "last", data, [1] * 50 + [0] * 50)
    dot = write_run(tmp_path / "dot", data, [1] * 51 + [0] * 49)
    best = write_run(tmp_path / "best", data, [1] * 90 + [0] * 10)
    comparison = compare([last, dot, best])
    dot_difference, best_difference = comparison.differences["dot"], comparison.differences["best"]
    assert dot_difference.verdict == "dot and last are not distinguishable: dot is 1.0 F1 ahead [0.0, 3.0]"
    assert (dot_difference.wins, dot_difference.losses, dot_difference.p_value) == (1, 0, 1.0)
    assert best_difference.verdict.startswith("best beats last by 40.0 F1 [")
    assert best_difference.verdict.endswith("]: clearly better")
    assert (best_difference.wins, best_difference.losses) == (40, 0)
    assert best_difference.p_value == pytest.approx(2 * 0.5**40)
    assert best_difference.resampled == "questions"
    assert (comparison.questions, comparison.paragraphs) == (MANY, 20)


def test_the_better_reader_is_named_first(tmp_path: Path, data: Path) -> None:
    best = write_run(tmp_path / "best", data, [1] * 90 + [0] * 10)
    last = write_run(tmp_path / "last", data, [1] * 50 + [0] * 50)
    same = write_run(tmp_path / "same", data, [1] * 90 + [0] * 10)
    differences = compare([best, last, same]).differences
    assert differences["last"].verdict.startswith("best beats last by 40.0 F1 [3")
    assert differences["last"].f1.value == pytest.approx(-40)
    assert differences["same"].verdict == "same and best are not distinguishable: same F1"


def test_equal_scores_on_different_questions_have_an_interval_and_no_winner(tmp_path: Path, data: Path) -> None:
    first = write_run(tmp_path / "p1", data, [1, 0] * 50)
    second = write_run(tmp_path / "p2", data, [0, 1] * 50)
    verdict = compare([first, second]).differences["p2"].verdict
    assert verdict.startswith("p2 and p1 are not distinguishable: same F1 [−")
    assert "beats" not in verdict
    assert "0.0 F1" not in verdict


def test_runs_that_differ_only_in_seeds_are_one_reader(tmp_path: Path, data: Path) -> None:
    rights = {"dot-seed0": [1] * 60 + [0] * 40, "dot-seed1": [1] * 70 + [0] * 30, "last-seed0": [0] * 100}
    folder = write_several(tmp_path / "all", list(rights))
    for name, right in rights.items():
        mixer, _, seed = name.partition("-seed")
        write_run(folder / name, data, right, config=config(mixer, int(seed)))
    comparison = compare([folder], baseline="last-seed0")
    dot = next(reader for reader in comparison.readers if reader.name == "dot")
    difference = comparison.differences["dot"]
    assert [run.name for run in dot.runs] == ["dot-seed0", "dot-seed1"]
    assert dot.f1.mean() == pytest.approx(0.65)
    assert dot.deviation == pytest.approx(np.std([60, 70], ddof=1))
    assert difference.resampled == "paragraphs"
    assert difference.p_value is None  # a mean of two against a single run
    assert (difference.wins, difference.losses) == (70, 0)


def test_a_reader_is_named_after_its_runs_and_not_after_their_folders(tmp_path: Path, data: Path) -> None:
    for mixer, right in (("dot", 60), ("last", 40)):
        for seed in (0, 1):
            folder = tmp_path / f"table2-seed{seed}" / mixer
            write_run(folder, data, [1] * right + [0] * (100 - right), config=config(mixer, seed))
    folders = [tmp_path / f"table2-seed{seed}" for seed in (0, 1)]
    assert [(reader.name, len(reader.runs)) for reader in compare(folders).readers] == [("dot", 2), ("last", 2)]
    for seed in (0, 1):  # another reader of the same name: then the folders distinguish them
        write_run(tmp_path / f"table3-seed{seed}" / "dot", data, [1] * 100, config=config("scalar_mix", seed))
    folders += [tmp_path / f"table3-seed{seed}" for seed in (0, 1)]
    names = {reader.name: len(reader.runs) for reader in compare(folders).readers}
    assert names == {"table2/dot": 2, "last": 2, "table3/dot": 2}


def test_heads_on_runs_that_differ_only_in_their_seeds_are_one_reader(tmp_path: Path, data: Path) -> None:
    """`encoder.from` becomes the path of a model: with another seed, or in another folder, it is the same row."""
    bases = ["/a/bert-seed0/models/0.3", "/b/bert-seed1/models/0.3", "/a/bert-seed2/models/1", "/a/bert-seed3/model"]
    for seed, base in enumerate(bases):
        options = {**config("dot", seed), "encoder": {"name": base}}
        write_run(tmp_path / f"head-seed{seed}", data, [1] * 50 + [0] * 50, config=options)
    readers = compare([tmp_path / f"head-seed{seed}" for seed in range(4)]).readers
    assert [[run.name for run in reader.runs] for reader in readers] == [
        ["head-seed0", "head-seed1"],
        ["head-seed2"],
        ["head-seed3"],
    ]


def test_a_difference_within_the_variation_of_seeds_is_reported_as_such(tmp_path: Path, data: Path) -> None:
    folders = [
        write_run(tmp_path / name, data, [1] * right + [0] * (100 - right), config=config(name[0], seed))
        for name, right, seed in [("a0", 20, 0), ("a1", 80, 1), ("b0", 70, 0), ("b1", 75, 1)]
    ]
    difference = compare(folders).differences["b"]
    assert difference.f1.is_clear
    assert difference.verdict.endswith("better on these questions, but within the variation between seeds")
    assert difference.p_value is not None


def test_a_single_seed_is_taken_to_vary_like_those_that_it_is_compared_with(tmp_path: Path, data: Path) -> None:
    """Seeds with 65, 70 and 75: their mean has a standard error of 2.9 points, its difference from one seed 5.8."""

    def write(name: str, right: int, seed: int = 0) -> Path:
        spread = [20 * (number % 5) + number // 5 < right for number in range(MANY)]  # over all paragraphs
        return write_run(tmp_path / name, data, spread, config=config(name[0], seed))

    seeds = [write("b0", 65, 0), write("b1", 70, 1), write("b2", 75, 2)]
    for right, within in ((62, True), (58, False)):
        single = write(f"a{right}", right)
        for folders in ([single, *seeds], [*seeds, single]):
            (difference,) = compare(folders).differences.values()
            assert abs(difference.f1.value) == pytest.approx(70 - right)
            assert difference.is_clear
            assert difference.within_seeds is within


def test_a_repeated_run_is_not_a_second_seed(tmp_path: Path, data: Path) -> None:
    folders = [write_run(tmp_path / name, data, [1] * 100, config=config("dot")) for name in ("a", "b")]
    assert [reader.name for reader in compare(folders).readers] == ["a", "b"]


def test_a_run_named_like_the_seeds_of_another_reader_keeps_its_name(tmp_path: Path, data: Path) -> None:
    rights = {"dot-seed0": (60, 0), "dot-seed1": (70, 1), "dot": (90, 0)}
    folders = [
        write_run(tmp_path / name, data, [1] * right + [0] * (100 - right), config=config("dot", seed))
        for name, (right, seed) in rights.items()
    ]
    comparison = compare(folders)
    assert [(reader.name, len(reader.runs)) for reader in comparison.readers] == [("dot-seed0", 2), ("dot", 1)]
    assert list(comparison.differences) == ["dot"]
    assert comparison.differences["dot"].verdict.startswith("dot beats dot-seed0 by 25.0 F1 [")


def test_seeds_are_named_after_the_run_without_a_number(tmp_path: Path, data: Path) -> None:
    folders = [
        write_run(tmp_path / name, data, [1] * 100, config=config("dot", seed))
        for name, seed in (("dot-seed1", 1), ("dot", 0))
    ]
    last = write_run(tmp_path / "last", data, [1] * 100, config=config("last"))
    assert [(reader.name, len(reader.runs)) for reader in compare([*folders, last]).readers] == [
        ("dot", 2),
        ("last", 1),
    ]


@pytest.mark.parametrize(
    ("questions", "verdict"),
    [
        (5, "1 and 0: too few questions to judge; 1 is 100.0 F1 ahead [100.0, 100.0]"),
        (6, "1 beats 0 by 100.0 F1 [100.0, 100.0]: clearly better"),
    ],
)
def test_a_handful_of_questions_is_too_few_to_judge(tmp_path: Path, questions: int, verdict: str) -> None:
    data = write_data(tmp_path / "few.json", questions)
    best, worst = (write_run(tmp_path / str(right), data, [right] * questions) for right in (1, 0))
    difference = compare([worst, best]).differences["1"]
    assert difference.verdict == verdict
    assert difference.to_dict()["clear"] is (questions == 6)


def test_the_number_of_questions_is_written_in_the_singular_for_one(tmp_path: Path) -> None:
    data = write_data(tmp_path / "one.json", 1)
    folders = [write_run(tmp_path / name, data, [1]) for name in "ab"]
    assert compare(folders).lines()[0] == "1 question about 1 paragraph; baseline: a"


def test_seeds_on_a_few_paragraphs_are_too_few_to_judge(tmp_path: Path) -> None:
    data = write_data(tmp_path / "few.json", 25)  # in 5 paragraphs
    folders = [
        write_run(tmp_path / f"{name}{seed}", data, [right] * 25, config=config(name, seed))
        for name, right in (("a", 0), ("b", 1))
        for seed in (0, 1)
    ]
    assert (
        compare(folders)
        .differences["b"]
        .verdict.startswith("b and a: too few paragraphs to judge; b is 100.0 F1 ahead")
    )


def test_fronts_hold_the_readers_that_nothing_cheaper_equals(tmp_path: Path, data: Path) -> None:
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
    comparison = compare(folders)
    fronts = {front.cost: front.readers for front in comparison.fronts}
    assert fronts["trainable_parameters"] == ("cheap", "good")
    assert fronts["train_seconds"][:2] == ("worse", "cheap")
    assert "inference_seconds_per_1000" not in fronts
    assert "not ranked by parameters: 1 reader (unknown), whose cost is not recorded" in str(comparison)


GPU, CPU = "NVIDIA H200", "cpu, 2 threads"


@pytest.fixture
def two_devices(tmp_path: Path, data: Path) -> list[Path]:
    """Two readers timed on a GPU and two on a CPU; by time alone, the GPU would always win."""
    return [
        write_run(
            tmp_path / name,
            data,
            [1] * right + [0] * (100 - right),
            cost={"device": device, "trainable_parameters": parameters, "inference_seconds_per_1000": seconds},
        )
        for name, right, device, parameters, seconds in [
            ("gpu-small", 60, GPU, 10, 0.1),
            ("gpu-large", 80, GPU, 20, 0.2),
            ("cpu-small", 50, CPU, 10, 10.0),
            ("cpu-large", 70, CPU, 20, 20.0),
        ]
    ]


def test_times_of_different_devices_are_never_ranked_together(two_devices: list[Path]) -> None:
    comparison = compare(two_devices)
    fronts = {(front.cost, front.device): front.readers for front in comparison.fronts}
    assert fronts == {
        ("trainable_parameters", None): ("gpu-small", "gpu-large"),
        ("inference_seconds_per_1000", GPU): ("gpu-small", "gpu-large"),
        ("inference_seconds_per_1000", CPU): ("cpu-small", "cpu-large"),
    }
    lines = comparison.lines()
    assert lines[2] == f"times measured on 2 devices ({GPU}; {CPU}): compare within one only"
    assert "device" in lines[4].split()
    assert GPU in next(line for line in lines[5:] if line.startswith("gpu-small"))
    assert CPU in next(line for line in lines[5:] if line.startswith("cpu-small"))
    assert f"best F1 by ms/question on {CPU}: cpu-small, cpu-large" in lines
    assert [row["device"] for row in comparison.to_dict()["runs"]] == [GPU, GPU, CPU, CPU]


def test_seeds_timed_on_different_devices_have_no_mean_time(tmp_path: Path, data: Path) -> None:
    folders = [
        write_run(
            tmp_path / f"{mixer}-seed{seed}",
            data,
            [1] * 100,
            config=config(mixer, seed),
            cost={"device": device, "train_seconds": 5.0, "trainable_parameters": 7},
        )
        for mixer, seed, device in [("dot", 0, GPU), ("dot", 1, CPU), ("last", 0, CPU)]
    ]
    comparison = compare(folders)
    dot = comparison.readers[0].to_dict()
    assert (dot["train_seconds"], dot["device"], dot["trainable_parameters"]) == (None, None, 7)
    assert "not ranked by train s: 1 reader (dot), whose cost is not recorded or comes from several devices" in str(
        comparison
    )


def test_the_device_of_a_reader_is_that_of_its_timed_seeds(tmp_path: Path, data: Path) -> None:
    costs = [{"train_seconds": 100.0, "device": "gpu"}, {"device": "cpu"}]
    folders = [
        write_run(
            tmp_path / f"{name}{seed}", data, [1] * right + [0] * (100 - right), config=config(name, seed), cost=cost
        )
        for name, right in (("a", 50), ("b", 70))
        for seed, cost in enumerate(costs)
    ]
    (front,) = [front for front in compare(folders).fronts if front.cost == "train_seconds"]
    assert (front.device, front.readers) == ("gpu", ("b",))


def test_one_device_is_named_in_the_head(tmp_path: Path, data: Path) -> None:
    cost = {"device": CPU, "train_seconds": 5.0}
    folders = [write_run(tmp_path / name, data, [1] * 100, cost=cost) for name in "ab"]
    assert compare(folders).lines()[2] == f"times measured on {CPU}"


def test_the_thresholds_of_the_scores_are_named_in_the_head(tmp_path: Path, data: Path) -> None:
    lines = compare([write_run(tmp_path / name, data, [1] * 100) for name in "ab"]).lines()
    assert lines[1] == "EM and F1 at each run's own threshold"
    assert "threshold" in lines[3].split()


def test_a_comparison_converts_to_rows_for_a_data_frame(tmp_path: Path, data: Path) -> None:
    last = write_run(tmp_path / "last", data, [1] * 50 + [0] * 50)
    best = write_run(tmp_path / "best", data, [1] * 90 + [0] * 10, cost={"trainable_parameters": 1234})
    comparison = compare([last, best])
    first, second = comparison.rows()
    assert list(first) == list(second)
    assert (first["name"], first["f1"], first["trainable_parameters"]) == ("best", pytest.approx(90), 1234)
    assert first["f1_difference"] == pytest.approx(40)
    assert first["f1_difference_low"] < 40 < first["f1_difference_high"]
    assert first["clear"] is True
    assert (second["name"], second["f1_difference"], second["clear"]) == ("last", None, None)
    assert str(comparison) == "\n".join(comparison.lines())
    assert json.loads(json.dumps(comparison.to_dict()))["baseline"] == "last"


def test_a_single_folder_of_runs_can_be_passed_as_a_path(tmp_path: Path, data: Path) -> None:
    for name in "ab":
        write_run(tmp_path / "all" / name, data, [1] * 100)
    assert [reader.name for reader in compare(tmp_path / "all").readers] == ["a", "b"]
    assert [reader.name for reader in compare(str(tmp_path / "all")).readers] == ["a", "b"]


def test_runs_that_cannot_be_compared(tmp_path: Path, data: Path) -> None:
    first = write_run(tmp_path / "first", data, [1] * 100)
    with pytest.raises(UsageError, match=r"expected at least two readers, got only first"):
        compare([first])
    with pytest.raises(RunError, match="expected the questions of"):
        compare([first, write_run(tmp_path / "short", data, [1] * 90)])
    second = write_run(tmp_path / "second", data, [1] * 100)
    with pytest.raises(
        UsageError, match=r"--baseline: expected the name or folder of one of the runs \(first, second\), got 'third'"
    ):
        compare([first, second], baseline="third")


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
    assert (code, out, len(err.splitlines())) == (2, "", 1)


def test_a_thousand_runs_compare_in_seconds(tmp_path: Path) -> None:
    """Ten of them are better. The baseline is exactly as good as the others are on average: a lucky baseline would seem
    to beat hundreds of its equals, since all comparisons share it.
    """
    data = write_data(tmp_path / "data.json", 500)
    rng = np.random.default_rng(0)
    rights = {f"r{n}": (rng.random(500) < (0.7 if n < 10 else 0.5)).tolist() for n in range(1000)}
    folders = [
        write_run(tmp_path / name, data, right) for name, right in {"half": [False, True] * 250, **rights}.items()
    ]
    began = time.process_time()
    comparison = compare(folders)
    assert time.process_time() - began < 10
    clear = [name for name, difference in comparison.differences.items() if difference.f1.is_clear]
    assert clear[:10] == [f"r{n}" for n in range(10)]
    assert len(clear) < 50
    assert any(line.startswith("1000 comparisons share one baseline") for line in comparison.lines())
