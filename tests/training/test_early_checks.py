"""What needs no model is checked before the encoder is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lamella import runs
from lamella.errors import LamellaError
from lamella.plan import make_plan
from lamella.training import prepare
from lamella.training.run import train_plan


@pytest.fixture(autouse=True)
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*arguments: object, **more: object) -> None:
        pytest.fail("the encoder was loaded before the mistake was reported")

    monkeypatch.setattr(prepare, "load_encoder", loaded)


def plan_of(**sections: dict[str, Any]) -> Any:
    given: dict[str, dict[str, Any]] = {"data": {"train": "demo:train", "dev": "demo:dev"}}
    return make_plan({**given, **sections}, where="test")


@pytest.mark.parametrize(
    ("sections", "options", "message"),
    [
        ({}, {}, "out: already holds a run"),
        ({"data": {"train": "nowhere.json"}}, {"overwrite": True}, "nowhere.json: no such file; data.train names it."),
        (
            {"data": {"train": "demo:train", "dev": ["demo:dev", "gone.json"]}},
            {"overwrite": True},
            "gone.json: no such file; data.dev names it.",
        ),
        ({"data": {"dev": "demo:dev"}}, {"overwrite": True}, "data.train: is required"),
        ({"learner": {"task": "answerability"}, "training": {"metric": "f1"}}, {"overwrite": True}, "gives no text"),
        ({"encoder": {"tuning": "full"}}, {"overwrite": True, "cache": Path("cache")}, "expected frozen"),
        ({"learner": {"distil": {"name": "stored", "runs": ["out"]}}}, {"overwrite": True}, "which this run reads"),
    ],
    ids=str,
)
def test_a_mistake_is_reported_before_anything_is_loaded(
    sections: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with runs.new_run(Path("out"), "train"):
        pass
    with pytest.raises(LamellaError) as caught:
        train_plan(plan_of(**sections), Path("out"), **options)
    assert message in str(caught.value)
    assert runs.run_state(Path("out")) == "finished"


def test_a_mistake_in_a_later_pass_is_reported_before_the_first(tmp_path: Path) -> None:
    grid = {"data": {"train": ["demo:train", "nowhere.json"]}}
    with pytest.raises(LamellaError, match="nowhere"):
        train_plan(plan_of(grid=grid), tmp_path / "out")
    assert not (tmp_path / "out").exists()
