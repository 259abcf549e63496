"""Run folders as records: several at once, what is left out, and which questions they were scored on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lamella.errors import RunError, UnreadableError, UsageError
from lamella.study.records import read_runs, read_scored
from run_folders import write_data, write_files, write_run, write_several


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data.json", 10)


def test_a_folder_of_several_runs_stands_for_those_that_are_finished(tmp_path: Path, data: Path) -> None:
    folder = write_several(tmp_path / "many", ["a", "b", "c"])
    write_run(folder / "a", data, [1] * 10, cost={"trainable_parameters": 5})
    write_run(folder / "b", data, [0] * 10, state="failed")
    found = read_runs([folder, folder / "a"])
    assert [run.name for run in found.runs] == ["a"]
    assert found.runs[0].cost == {"trainable_parameters": 5}
    assert found.left_out == {str(folder / "b"): "failed", str(folder / "c"): "not begun"}


def test_a_folder_that_only_holds_runs_stands_for_them_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("run-10", "run-9"):
        write_run(tmp_path / "all" / name, None, [1])
    write_run(tmp_path / "all" / "run-11", None, [1], state="failed")
    found = read_runs([tmp_path / "all"])
    assert [run.name for run in found.runs] == ["run-9", "run-10"]
    assert found.left_out == {str(tmp_path / "all" / "run-11"): "failed"}
    everything = read_runs([tmp_path / "all"], unfinished=True).runs
    assert [(run.name, run.state) for run in everything[1:]] == [("run-10", "finished"), ("run-11", "failed")]


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path, data: Path) -> None:
    folders = [write_run(tmp_path / place / "run", data, [1] * 10) for place in ("x", "y")]
    assert [run.name for run in read_runs(folders).runs] == ["x/run", "y/run"]


def test_what_is_no_finished_run_is_refused(tmp_path: Path, data: Path) -> None:
    with pytest.raises(RunError, match=r"expected a run folder, with run\.json"):
        read_runs([tmp_path / "nowhere"])
    with pytest.raises(RunError, match=r"expected a finished run\. It is interrupted"):
        read_runs([write_run(tmp_path / "r", data, [1] * 10, state="interrupted")])
    folder = write_run(tmp_path / "list", data, [1] * 10)
    (folder / "predictions.json").write_text("[]")
    with pytest.raises(UnreadableError, match=r"predictions\.json: expected one JSON object. Found list"):
        read_scored(read_runs([folder]).runs)
    (folder / "predictions.json").unlink()
    with pytest.raises(RunError, match=r"predictions\.json: expected the answers of a run"):
        read_scored(read_runs([folder]).runs)


def test_a_run_may_have_answered_the_first_questions_only(tmp_path: Path, data: Path) -> None:
    config = {"data": {"dev": [str(data)]}}
    records = read_runs([write_run(tmp_path / "r", None, [1, 0, 1], config=config)]).runs
    examples, (scores,) = read_scored(records)
    assert [one.id for one in examples] == ["q0", "q1", "q2"]
    assert scores.exact.tolist() == [1, 0, 1]


def test_other_questions_are_refused_with_their_ids(tmp_path: Path, data: Path) -> None:
    first, other = write_run(tmp_path / "first", data, [1] * 10), write_run(tmp_path / "other", data, [1] * 8)
    with pytest.raises(RunError, match=r"other: expected the questions .* only first answers 2 of them \(q8, q9\)"):
        read_scored(read_runs([first, other]).runs)
    more = write_run(tmp_path / "more", data, [1] * 12)
    with pytest.raises(RunError, match=r"answers 2 questions that are not in .* such as q10; give the file"):
        read_scored(read_runs([more]).runs)


def test_the_data_must_be_known(tmp_path: Path, data: Path) -> None:
    records = read_runs([write_run(tmp_path / "r", None, [1] * 10)]).runs
    with pytest.raises(UsageError, match="give the file with --data"):
        read_scored(records)
    assert len(read_scored(records, str(data))[0]) == 10


def test_the_seeds_are_no_option(tmp_path: Path, data: Path) -> None:
    configs = [{"learner": {"seed": seed, "mixer": "dot"}, "training": {"order_seed": 1}} for seed in (0, 1)]
    runs = read_runs([write_run(tmp_path / str(n), data, [1] * 10, config=one) for n, one in enumerate(configs)]).runs
    assert runs[0].options == runs[1].options == {"learner": {"mixer": "dot"}, "training": {}}
    assert [run.seeds for run in runs] == [(0, 1), (1, 1)]
    assert json.loads((runs[0].folder / "config.json").read_text()) == configs[0]


def test_what_gives_no_texts_is_left_out_of_a_folder_and_refused_by_name(tmp_path: Path, data: Path) -> None:
    for name in ("a", "told"):
        write_run(tmp_path / "all" / name, data, [1] * 10)
    (tmp_path / "all" / "told" / "predictions.json").rename(tmp_path / "all" / "told" / "null_odds.json")
    found = read_runs([tmp_path / "all"], needs="predictions.json")
    assert [run.name for run in found.runs] == ["a"]
    assert found.left_out == {str(tmp_path / "all" / "told"): "has no predictions.json"}
    with pytest.raises(RunError, match=r"told: has no predictions.json; it tells whether there is an answer, and no"):
        read_runs([tmp_path / "all" / "told"], needs="predictions.json")


def test_an_analysis_beside_the_runs_is_none_of_them(tmp_path: Path, data: Path, lamella: Any) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / "all" / name, data, [1] * 10)
    write_files(tmp_path / "all" / "analysis", {"run.json": {"state": "finished", "command": "analyse"}})
    assert [run.name for run in read_runs([tmp_path / "all"], unfinished=True).runs] == ["a", "b"]
    assert lamella("compare", tmp_path / "all")[0] == 0
    code, _, err = lamella("report", tmp_path / "all" / "analysis", "--out", tmp_path / "report.html")
    assert (code, err.count("\n")) == (1, 1)
    assert "analysis: expected a run. It holds an analysis of some." in err


@pytest.mark.parametrize("wrong", [None, 3, ["a"]])
def test_an_answer_that_is_no_text_is_named_with_its_file(tmp_path: Path, data: Path, wrong: Any) -> None:
    folder = write_run(tmp_path / "r", data, [1] * 10)
    write_files(folder, {"predictions.json": {**{f"q{n}": "" for n in range(10)}, "q3": wrong}})
    with pytest.raises(UnreadableError, match=r"r/predictions.json: expected a text for question q3\. Got"):
        read_scored(read_runs([folder]).runs)


def test_options_that_are_none_are_said_to_be_damaged(tmp_path: Path, data: Path) -> None:
    with pytest.raises(
        UnreadableError, match=r"config\.json: expected the options of a run, by section; it is damaged"
    ):
        read_runs([write_run(tmp_path / "r", data, [1] * 10, config={"learner": 3})])


def test_data_that_has_moved_can_be_given(tmp_path: Path, data: Path) -> None:
    records = read_runs([write_run(tmp_path / "r", tmp_path / "gone.json", [1] * 10)]).runs
    with pytest.raises(
        UnreadableError, match=r"gone.json: no such file\. It is what .*r was scored on; .* with --data"
    ):
        read_scored(records)
    assert len(read_scored(records, str(data))[0]) == 10


def test_the_same_ids_on_other_texts_are_refused(tmp_path: Path, data: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(data.read_text().replace("Which?", "Whose?"))
    (tmp_path / "copy.json").write_text(data.read_text())
    first, second, moved, copied = (
        write_run(tmp_path / name, file, [1] * 10)
        for name, file in {"a": data, "b": other, "c": tmp_path / "gone.json", "d": tmp_path / "copy.json"}.items()
    )
    assert len(read_scored(read_runs([first, moved, copied]).runs)[1]) == 3
    both = read_runs([first, second]).runs
    with pytest.raises(
        RunError, match=r"b: was scored on .*other.json\. There q0 is another question than in .*data.json"
    ):
        read_scored(both)
    assert len(read_scored(both, str(data))[1]) == 2
