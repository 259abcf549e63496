"""Run folders as records: several at once, runs that are left out, and the questions they were scored on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lamella.errors import RunError, UnreadableError, UsageError
from lamella.study.records import read_records, score_records
from run_folders import write_data, write_files, write_run, write_several


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data.json", 10)


def test_a_folder_of_several_runs_means_the_finished_ones(tmp_path: Path, data: Path) -> None:
    folder = write_several(tmp_path / "many", ["a", "b", "c"])
    write_run(folder / "a", data, [1] * 10, cost={"trainable_parameters": 5})
    write_run(folder / "b", data, [0] * 10, state="failed")
    selection = read_records([folder, folder / "a"])
    assert [run.name for run in selection.records] == ["a"]
    assert selection.records[0].cost == {"trainable_parameters": 5}
    assert selection.left_out == {str(folder / "b"): "failed", str(folder / "c"): "not started"}


def test_a_plain_folder_of_runs_means_all_of_them_in_natural_order(tmp_path: Path) -> None:
    for name in ("run-10", "run-9"):
        write_run(tmp_path / "all" / name, None, [1])
    write_run(tmp_path / "all" / "run-11", None, [1], state="failed")
    selection = read_records([tmp_path / "all"])
    assert [run.name for run in selection.records] == ["run-9", "run-10"]
    assert selection.left_out == {str(tmp_path / "all" / "run-11"): "failed"}
    everything = read_records([tmp_path / "all"], unfinished=True).records
    assert [(run.name, run.state) for run in everything[1:]] == [("run-10", "finished"), ("run-11", "failed")]


def test_runs_with_the_same_name_get_their_parent_folders(tmp_path: Path, data: Path) -> None:
    folders = [write_run(tmp_path / place / "run", data, [1] * 10) for place in ("x", "y")]
    assert [run.name for run in read_records(folders).records] == ["x/run", "y/run"]


def test_anything_but_a_finished_run_is_an_error(tmp_path: Path, data: Path) -> None:
    with pytest.raises(UnreadableError, match=r"nowhere: no such folder"):
        read_records([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"expected a run folder with run\.json"):
        read_records([tmp_path / "empty"])
    with pytest.raises(RunError, match=r"expected a finished run, got one that is interrupted"):
        read_records([write_run(tmp_path / "r", data, [1] * 10, state="interrupted")])
    folder = write_run(tmp_path / "list", data, [1] * 10)
    (folder / "predictions.json").write_text("[]")
    with pytest.raises(UnreadableError, match=r"predictions\.json: expected one JSON object, got list"):
        score_records(read_records([folder]).records)
    (folder / "predictions.json").unlink()
    with pytest.raises(RunError, match=r"predictions\.json: expected the answers of a run"):
        score_records(read_records([folder]).records)


def test_a_run_may_have_answered_only_the_first_questions(tmp_path: Path, data: Path) -> None:
    config = {"data": {"dev": [str(data)]}}
    records = read_records([write_run(tmp_path / "r", None, [1, 0, 1], config=config)]).records
    examples, (scores,) = score_records(records)
    assert [example.id for example in examples] == ["q0", "q1", "q2"]
    assert scores.exact.tolist() == [1, 0, 1]


def test_different_questions_are_an_error_with_their_ids(tmp_path: Path, data: Path) -> None:
    first, shorter = write_run(tmp_path / "first", data, [1] * 10), write_run(tmp_path / "shorter", data, [1] * 8)
    with pytest.raises(
        RunError, match=r"shorter: expected the questions of .* got 2 questions answered only by first \(q8, q9\)"
    ):
        score_records(read_records([first, shorter]).records)
    more = write_run(tmp_path / "more", data, [1] * 12)
    with pytest.raises(RunError, match=r"got 2 to others, such as q10; pass the file"):
        score_records(read_records([more]).records)


def test_the_data_must_be_known(tmp_path: Path, data: Path) -> None:
    records = read_records([write_run(tmp_path / "r", None, [1] * 10)]).records
    with pytest.raises(UsageError, match="pass the file with --data"):
        score_records(records)
    assert len(score_records(records, str(data))[0]) == 10


def test_options_have_full_names(tmp_path: Path, data: Path) -> None:
    configs = [{"learner": {"seed": seed, "mixer": "dot"}, "training": {"order_seed": 1}} for seed in (0, 1)]
    runs = read_records(
        [write_run(tmp_path / str(n), data, [1] * 10, config=config) for n, config in enumerate(configs)]
    ).records
    assert runs[1].options == {"learner.seed": 1, "learner.mixer": "dot", "training.order_seed": 1}
    assert [run.seeds for run in runs] == [(0, 1), (1, 1)]
    assert json.loads((runs[0].folder / "config.json").read_text()) == configs[0]


def test_a_classifier_needs_no_texts_and_a_run_without_answers_is_left_out(tmp_path: Path, data: Path) -> None:
    for name in ("a", "classifier", "unscored"):
        write_run(tmp_path / "all" / name, data, [1] * 10)
    texts = tmp_path / "all" / "classifier" / "predictions.json"
    texts.rename(texts.with_name("null_odds.json"))
    unscored = tmp_path / "all" / "unscored"
    (unscored / "predictions.json").unlink()
    selection = read_records([tmp_path / "all"], requires="predictions.json")
    assert {run.name: run.task for run in selection.records} == {"a": "span", "classifier": "answerability"}
    assert selection.left_out == {str(unscored): "has no predictions.json"}
    with pytest.raises(RunError, match=r"expected a run with predictions.json, got none; the run was not scored"):
        read_records([unscored], requires="predictions.json")


def test_an_analysis_beside_the_runs_is_skipped(tmp_path: Path, data: Path, lamella: Any) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / "all" / name, data, [1] * 10)
    write_files(tmp_path / "all" / "analysis", {"run.json": {"state": "finished", "command": "analyse"}})
    assert [run.name for run in read_records([tmp_path / "all"], unfinished=True).records] == ["a", "b"]
    assert lamella("compare", tmp_path / "all")[0] == 0
    code, _, err = lamella("report", tmp_path / "all" / "analysis", "--out", tmp_path / "report.html")
    assert (code, err.count("\n")) == (1, 1)
    assert "analysis: expected a run, got an analysis of runs." in err


@pytest.mark.parametrize("wrong", [None, 3, ["a"]])
def test_an_answer_that_is_not_a_text_is_an_error_with_its_file(tmp_path: Path, data: Path, wrong: Any) -> None:
    folder = write_run(tmp_path / "r", data, [1] * 10)
    write_files(folder, {"predictions.json": {**{f"q{n}": "" for n in range(10)}, "q3": wrong}})
    with pytest.raises(UnreadableError, match=r"r/predictions.json: expected a text for question q3, got"):
        score_records(read_records([folder]).records)


def test_options_without_sections_are_reported_as_damaged(tmp_path: Path, data: Path) -> None:
    with pytest.raises(
        UnreadableError, match=r"config\.json: expected the options of a run, by section; the file is damaged"
    ):
        read_records([write_run(tmp_path / "r", data, [1] * 10, config={"learner": 3})])


def test_moved_data_can_be_passed(tmp_path: Path, data: Path) -> None:
    records = read_records([write_run(tmp_path / "r", tmp_path / "gone.json", [1] * 10)]).records
    with pytest.raises(
        UnreadableError, match=r"gone.json: no such file\. The run .*r was scored on it; .* with --data"
    ):
        score_records(records)
    assert len(score_records(records, str(data))[0]) == 10


def test_equal_ids_with_different_texts_are_an_error(tmp_path: Path, data: Path) -> None:
    edited = tmp_path / "edited.json"
    edited.write_text(data.read_text().replace("Which?", "Whose?"))
    (tmp_path / "copy.json").write_text(data.read_text())
    first, second, moved, copied = (
        write_run(tmp_path / name, file, [1] * 10)
        for name, file in {"a": data, "b": edited, "c": tmp_path / "gone.json", "d": tmp_path / "copy.json"}.items()
    )
    assert len(score_records(read_records([first, moved, copied]).records)[1]) == 3
    both = read_records([first, second]).records
    with pytest.raises(
        RunError, match=r"b: expected the same questions as .*a, but q0 differs between .*edited.json and .*data.json"
    ):
        score_records(both)
    assert len(score_records(both, str(data))[1]) == 2
