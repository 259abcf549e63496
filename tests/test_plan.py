"""One file that describes several runs: learners, grids, names, and which runs share a pass."""

from __future__ import annotations

from typing import Any

import pytest

from lamella.errors import ConfigError
from lamella.plan import load_plan, make_plan

FROZEN = {"encoder": {"tuning": "frozen"}}


def plan_of(**table: Any) -> Any:
    return make_plan(table, where="file")


def test_a_plain_file_is_one_run() -> None:
    plan = plan_of(learner={"mixer": "dot", "seed": 3})
    assert list(plan.runs) == ["run"]
    assert plan.varied == {"run": {}}
    assert plan.runs["run"].learner.seed == 3


def test_a_grid_is_the_product_of_its_lists_in_one_pass() -> None:
    plan = plan_of(**FROZEN, grid={"learner": {"mixer": ["last", ["scalar_mix", "compress"]], "seed": [0, 1]}})
    assert list(plan.runs) == [
        "last-seed0",
        "last-seed1",
        "scalar_mix+compress-seed0",
        "scalar_mix+compress-seed1",
    ]
    assert len(plan.passes) == 1
    assert [stage["name"] for stage in plan.runs["scalar_mix+compress-seed1"].learner.mixer] == [
        "scalar_mix",
        "compress",
    ]
    assert plan.varied["last-seed1"] == {"learner.mixer": [{"name": "last"}], "learner.seed": 1}


def test_options_of_the_pass_make_several_passes() -> None:
    plan = plan_of(**FROZEN, grid={"learner": {"seed": [0, 1]}, "training": {"order_seed": [5, 6]}})
    assert [list(one) for one in plan.passes] == [
        ["seed0-order_seed5", "seed1-order_seed5"],
        ["seed0-order_seed6", "seed1-order_seed6"],
    ]
    assert plan.varied["seed1-order_seed6"] == {"learner.seed": 1, "training.order_seed": 6}


def test_a_trained_encoder_has_a_pass_of_its_own() -> None:
    plan = plan_of(encoder={"tuning": "full"}, grid={"learner": {"learning_rate": [1e-5, 3e-5]}})
    assert [list(one) for one in plan.passes] == [["learning_rate1e-05"], ["learning_rate3e-05"]]


def test_tables_of_learners_with_and_without_names() -> None:
    plan = plan_of(**FROZEN, learner=[{"name": "plain", "mixer": "last"}, {"mixer": "dot", "learning_rate": 0.01}])
    assert list(plan.runs) == ["plain", "dot-learning_rate0.01"]


def test_a_name_gets_what_tells_its_runs_apart() -> None:
    learners = [{"name": "a", "mixer": "last"}, {"name": "b", "mixer": "dot"}]
    plan = plan_of(**FROZEN, learner=learners, grid={"learner": {"seed": [0, 1]}})
    assert list(plan.runs) == ["a-seed0", "a-seed1", "b-seed0", "b-seed1"]


def test_equal_learners_get_different_names() -> None:
    assert list(plan_of(**FROZEN, learner=[{}, {}]).runs) == ["run", "run-2"]


def test_options_of_parts_are_in_the_name() -> None:
    mixers = [{"name": "compress", "size": 4}, {"name": "compress", "size": 8}]
    plan = plan_of(**FROZEN, grid={"learner": {"mixer": mixers}})
    assert list(plan.runs) == ["compress_size4", "compress_size8"]


def test_the_fractions_of_a_pass_are_written_into_each_of_its_runs() -> None:
    plan = plan_of(**FROZEN, grid={"learner": {"fraction": [0.1, 1.0]}})
    assert {tuple(config.training.strata) for config in plan.runs.values()} == {(0.1, 1.0)}
    assert plan_of(**FROZEN).runs["run"].training.strata == []


def test_settings_reach_every_learner(tmp_path: Any) -> None:
    path = tmp_path / "run.toml"
    path.write_text('encoder.tuning = "frozen"\n[[learner]]\nmixer = "dot"\n[[learner]]\nmixer = "last"\n')
    plan = load_plan(path, ["learner.weight_decay=0.5", "grid.learner.seed=[1, 2]"])
    assert len(plan.runs) == 4
    assert {config.learner.weight_decay for config in plan.runs.values()} == {0.5}
    assert {config.learner.seed for config in plan.runs.values()} == {1, 2}


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"grid": {"learner": {"seed": 3}}}, "grid.learner.seed: expected a list of values to try. Got 3."),
        ({"grid": {"learner": {"seed": []}}}, "grid.learner.seed: expected a list of values to try. Got []."),
        ({"grid": {"lerner": {"seed": [1]}}}, "grid.lerner: expected a section of the file"),
        ({"grid": [1]}, "grid: expected tables like those of the file"),
        ({"grid": {"learner": {"seed": [-1]}}}, "learner.seed: expected at least 0. Got -1."),
        ({"grid": {"learner": {"sed": [1]}}}, "learner.sed: no such option"),
        ({"learner": [{"name": "../up"}]}, "learner.name: expected letters"),
        ({"learner": [{"name": ".."}]}, "learner.name: expected letters"),
        ({"learner": [{"name": "model"}]}, "learner.name: expected letters"),
        ({"learner": [{"name": "run.json"}]}, "learner.name: expected letters"),
        ({"learner": [{"name": 3}]}, "learner.name: expected letters"),
        ({"learner": [3]}, "learner: expected a table of options. Got 3."),
        ({"learner": []}, "learner: expected a table of options. Got []."),
        (
            {"learner": "last", "grid": {"learner": {"seed": [0, 1]}}},
            "learner: expected a table of options. Got 'last'.",
        ),
        ({"data": 3, "grid": {"data": {"workers": [0, 1]}}}, "data: expected a table of options. Got 3."),
        ({"training": {"patience": 2}}, "training.patience: needs data.dev"),
    ],
)
def test_faults_are_said_in_a_line(table: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(table, where="file")
    assert any(line.startswith(problem) for line in caught.value.problems), caught.value.problems
