"""One file that describes several runs: learners, grids, named runs, and which of them share a pass."""

from __future__ import annotations

from typing import Any

import pytest

from lamella.errors import ConfigError, UnknownNameError, UsageError
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
    assert [list(configs) for configs in plan.passes] == [
        ["seed0-order_seed5", "seed1-order_seed5"],
        ["seed0-order_seed6", "seed1-order_seed6"],
    ]
    assert plan.varied["seed1-order_seed6"] == {"learner.seed": 1, "training.order_seed": 6}


def test_a_trained_encoder_has_its_own_pass() -> None:
    plan = plan_of(encoder={"tuning": "full"}, grid={"learner": {"learning_rate": [1e-5, 3e-5]}})
    assert [list(configs) for configs in plan.passes] == [["learning_rate1e-05"], ["learning_rate3e-05"]]


def test_tables_of_learners_with_and_without_names() -> None:
    plan = plan_of(**FROZEN, learner=[{"name": "plain", "mixer": "last"}, {"mixer": "dot", "learning_rate": 0.01}])
    assert list(plan.runs) == ["plain", "dot-learning_rate0.01"]


def test_runs_of_one_name_get_the_options_in_which_they_differ() -> None:
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


def test_overrides_reach_every_learner(tmp_path: Any) -> None:
    path = tmp_path / "run.toml"
    path.write_text('encoder.tuning = "frozen"\n[[learner]]\nmixer = "dot"\n[[learner]]\nmixer = "last"\n')
    plan = load_plan(path, ["learner.weight_decay=0.5", "grid.learner.seed=[1, 2]"])
    assert len(plan.runs) == 4
    assert {config.learner.weight_decay for config in plan.runs.values()} == {0.5}
    assert {config.learner.seed for config in plan.runs.values()} == {1, 2}


TABLE = """
[encoder]
tuning = "frozen"
[learner]
seed = 3
[[run]]
name = "top1"
encoder.tuning = { name = "top_k", k = 1 }
[[run]]
name = "less-data"
[run.grid.learner]
fraction = [0.5, 1.0]
[[run]]
name = "plain"
"""


def test_named_runs_are_the_file_with_their_options_on_top(tmp_path: Any) -> None:
    path = tmp_path / "table.toml"
    path.write_text(TABLE)
    plan = load_plan(path)
    assert plan.named
    assert list(plan.runs) == ["top1", "less-data-fraction0.5", "less-data-fraction1", "plain"]
    assert {config.learner.seed for config in plan.runs.values()} == {3}
    assert plan.runs["top1"].encoder.tuning == {"name": "top_k", "k": 1}
    assert plan.runs["plain"].encoder.tuning == {"name": "frozen"}
    # The fractions of one run table leave the batches of the other runs alone.
    assert [config.training.strata for config in plan.runs.values()] == [[], [0.5, 1.0], [0.5, 1.0], []]
    assert [list(configs) for configs in plan.passes] == [
        ["top1"],
        ["less-data-fraction0.5", "less-data-fraction1"],
        ["plain"],
    ]
    assert plan.varied["plain"]["encoder.tuning"] == {"name": "frozen"}


def test_overrides_go_on_top_of_named_runs(tmp_path: Any) -> None:
    path = tmp_path / "table.toml"
    path.write_text(TABLE)
    runs = load_plan(path, ["learner.seed=5", "encoder.tuning=bitfit"]).runs
    assert {(config.learner.seed, config.encoder.tuning["name"]) for config in runs.values()} == {(5, "bitfit")}
    assert load_plan(path, ["encoder.tuning.k=2"], only=["top1"]).runs["top1"].encoder.tuning["k"] == 2


def test_named_runs_can_be_selected(tmp_path: Any) -> None:
    path = tmp_path / "table.toml"
    path.write_text(TABLE)
    assert list(load_plan(path, only=["plain", "top1"]).runs) == ["top1", "plain"]
    with pytest.raises(UnknownNameError, match=r"run 'top' does not exist\. Did you mean 'top1'\?"):
        load_plan(path, only=["top"])
    path.write_text('[data]\ntrain = "demo:train"\ndev = "demo:dev"\n[grid.learner]\nseed = [0, 1]\n')
    with pytest.raises(UsageError, match=r"expected \[\[run\]\] tables to choose 'seed0' from, found none"):
        load_plan(path, only=["seed0"])


def test_runs_on_one_frozen_encoder_share_a_pass_across_run_tables() -> None:
    plan = plan_of(**FROZEN, run=[{"name": "a", "learner": {"seed": 1}}, {"name": "b", "learner": {"seed": 2}}])
    assert [list(configs) for configs in plan.passes] == [["a", "b"]]


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"grid": {"learner": {"seed": 3}}}, "grid.learner.seed: expected a list of values to try, got 3."),
        ({"grid": {"learner": {"seed": []}}}, "grid.learner.seed: expected a list of values to try, got []."),
        ({"grid": {"lerner": {"seed": [1]}}}, "grid.lerner: expected a section of the file"),
        ({"grid": [1]}, "grid: expected tables named like the file's sections"),
        ({"grid": {"learner": {"seed": [-1]}}}, "learner.seed: expected at least 0, got -1."),
        ({"grid": {"learner": {"sed": [1]}}}, "learner.sed: no such option"),
        ({"grid": {"a\nb": [1]}}, r"grid.a\nb: expected a section of the file"),
        ({"grid": {"learner": {"a\nb": 1}}}, r"grid.learner.a\nb: expected a list of values to try, got 1."),
        ({"learner": [{"name": "../up"}]}, "learner.name: expected a folder name"),
        ({"learner": [{"name": ".."}]}, "learner.name: expected a folder name"),
        ({"learner": [{"name": "model"}]}, "learner.name: expected a folder name"),
        ({"learner": [{"name": "run.json"}]}, "learner.name: expected a folder name"),
        ({"learner": [{"name": 3}]}, "learner.name: expected a folder name"),
        ({"learner": [3]}, "learner: expected a table of options, got 3."),
        ({"learner": []}, "learner: expected a table of options, got []."),
        (
            {"learner": "last", "grid": {"learner": {"seed": [0, 1]}}},
            "learner: expected a table of options, got 'last'.",
        ),
        ({"data": 3, "grid": {"data": {"workers": [0, 1]}}}, "data: expected a table of options, got 3."),
        ({"training": {"patience": 2}}, "training.patience: needs data.dev"),
        ({"run": {"name": "a"}}, "run: expected [[run]] tables, each with a name and its options, got {'name': 'a'}."),
        ({"run": []}, "run: expected [[run]] tables"),
        ({"run": [{"learner": {"seed": 1}}]}, "run.name: expected a folder name"),
        ({"run": [{"name": "model"}]}, "run.name: expected a folder name"),
        ({"run": [{"name": "a"}, {"name": "a"}]}, "run.name: expected different names, got 'a' 2 times."),
        ({"run": [{"name": "a", "learner": {"sed": 1}}]}, "run a: learner.sed: no such option"),
        (
            {"run": [{"name": "a", "grid": {"learner": {"seed": [0, 1]}}}, {"name": "a-seed1"}]},
            "run a-seed1: another run has the name a-seed1 too.",
        ),
    ],
)
def test_every_problem_is_one_line(table: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(table, where="file")
    assert any(line.startswith(problem) for line in caught.value.problems), caught.value.problems
