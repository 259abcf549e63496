"""A sweep makes the rows that are not trained, copies and ensembles, once the runs that they are made from are done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from doubles import save_tiny_encoder
from lamella import runs
from lamella.errors import RunError
from lamella.files import read_json
from lamella.study.compare import compare
from lamella.sweep.derived_cost import add_members, add_training
from lamella.sweep.sweep import run_sweep
from lamella.sweep.sweep_plan import read_sweep
from outcomes import outcome
from run_files import write_run_file

pytestmark = pytest.mark.usefixtures("one_thread", "on_cpu", "read_once")
Lamella = Callable[..., tuple[int, str, str]]
ROWS = ["bert", "head", "bert@0.5", "bert@1", "both"]
RUNS = """
[[run]]
name = "bert"
encoder.tuning = "bitfit"
[[run]]
name = "head"
encoder = { from = "bert@0.5", tuning = "frozen" }
"""
DERIVED = """
[derived]
copies = ["bert@0.5", "bert@1"]
[[derived.ensembles]]
name = "both"
members = ["head", "bert@0.5"]
how = "max"
"""


def quiet(line: str) -> None:
    pass


def write(path: Path, encoder: Path, more: str) -> Path:
    """Write a run file of one epoch."""
    write_run_file(path, f'name = "{encoder}"', more, training='save_at = [0.5, 1]\nkeep = "last"')
    path.write_text(path.read_text().replace("max_steps = 4", "epochs = 1"))
    return path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("derived") / "tiny", num_hidden_layers=1)


@pytest.fixture(scope="module")
def file(encoder: Path) -> Path:
    return write(encoder.parent / "rows.toml", encoder, RUNS + DERIVED)


@pytest.fixture(scope="module")
def swept(file: Path) -> Path:
    """A sweep that is done; tests change copies of it."""
    out = file.parent / "swept"
    rows = run_sweep(read_sweep([file], out), out, log=quiet)
    assert [(row.run, row.state, row.error) for row in rows] == [(name, "finished", None) for name in ROWS]
    return out


def test_derived_rows_are_result_folders_of_the_sweep(file: Path, swept: Path, lamella: Lamella) -> None:
    last, copy = outcome(swept / "bert"), outcome(swept / "bert@1")
    for name in ("predictions.json", "null_odds.json"):
        assert copy[name] == last[name]  # `keep = "last"`: the copy at the end is the model
    assert read_json(swept / "bert@1" / runs.COST)["device"] == read_json(swept / "bert" / runs.COST)["device"]
    assert copy["null_odds.json"] != outcome(swept / "bert@0.5")["null_odds.json"]
    scores = {name: read_json(swept / name / runs.RESULTS) for name in ROWS}
    assert set(scores["both"]["gains"]) == {"head", "0.5"}
    assert read_json(swept / "both" / runs.RUN)["data"] == read_json(swept / "bert@1" / runs.RUN)["data"]
    summary = read_json(swept / runs.SUMMARY)["runs"]
    assert [row["run"] for row in summary] == ROWS
    assert {reader.name for reader in compare([swept]).readers} == set(ROWS)
    code, out, _ = lamella("sweep", file, "--out", swept, "--list")
    assert code == 0
    assert out.splitlines()[0] == "2 runs in 2 passes, 3 derived rows, 5 done"
    assert out.splitlines()[-2:] == ["copies: bert@0.5 (done), bert@1 (done)", "ensembles: both (done)"]
    code, out, _ = lamella("sweep", file, "--out", swept, "--list", "--json")
    assert json.loads(out) == {"passes": [["bert"], ["head"]], "derived": ["bert@0.5", "bert@1", "both"]}


def test_derived_rows_cost_what_their_runs_cost(swept: Path) -> None:
    bert, half, head, both = (read_json(swept / name / runs.COST) for name in ("bert", "bert@0.5", "head", "both"))
    assert half["trainable_parameters"] == bert["trainable_parameters"]
    assert half["train_seconds"] == pytest.approx(bert["train_seconds"] / 2)
    assert read_json(swept / "bert@1" / runs.COST)["train_seconds"] == pytest.approx(bert["train_seconds"])
    assert half["windows_per_second"] == bert["windows_per_second"]
    assert both["trainable_parameters"] == bert["trainable_parameters"] + head["trainable_parameters"]
    assert both["train_seconds"] == pytest.approx(bert["train_seconds"] / 2 + head["train_seconds"])
    answering = "inference_seconds_per_1000"
    assert both[answering] == pytest.approx(bert[answering] + head[answering])
    assert both["device"] == bert["device"]


def test_the_time_of_a_copy_is_the_recorded_one_where_the_run_was_evaluated(swept: Path, tmp_path: Path) -> None:
    shutil.copytree(swept / "bert", tmp_path / "bert")
    shutil.copytree(swept / "bert@0.5", tmp_path / "bert@0.5")
    with (tmp_path / "bert" / runs.HISTORY).open("a") as history:
        history.write(json.dumps({"event": "evaluation", "step": 5, "epoch": 0.5, "seconds": 0.125, "f1": 0.0}) + "\n")
    add_training(tmp_path / "bert@0.5", tmp_path / "bert", 0.5)
    assert read_json(tmp_path / "bert@0.5" / runs.COST)["train_seconds"] == pytest.approx(0.125)
    cost = read_json(tmp_path / "bert" / runs.COST)
    (tmp_path / "bert" / runs.COST).write_text(json.dumps({**cost, "device": "another"}))
    add_members(tmp_path / "bert@0.5", [(tmp_path / "bert", None), (swept / "head", None)])
    assert "train_seconds" not in read_json(tmp_path / "bert@0.5" / runs.COST)  # no time is a sum over two devices


def test_a_repeated_sweep_makes_only_what_is_missing_or_older_than_its_runs(
    file: Path, swept: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(swept, out)
    (out / "both").rename(tmp_path / "moved")
    assert [row.run for row in run_sweep(read_sweep([file], out), out, log=quiet) if not row.skipped] == ["both"]
    record = read_json(out / "bert@1" / runs.RUN)
    (out / "bert@1" / runs.RUN).write_text(json.dumps({**record, "started": "2000-01-01T00:00:00+00:00"}))
    assert [row.run for row in run_sweep(read_sweep([file], out), out, log=quiet) if not row.skipped] == ["bert@1"]

    file = write(tmp_path / "other.toml", file.parent / "tiny", RUNS + DERIVED.replace('"max"', '"mean"'))
    with pytest.raises(RunError, match=r"this ensemble has how = 'max', got 'mean'\. Choose another"):
        run_sweep(read_sweep([file], out), out, log=quiet)


def test_derived_rows_of_a_failed_run_are_blocked(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    rows = run_sweep(read_sweep([file], out, [f"encoder.name={tmp_path / 'nowhere'}"]), out, log=quiet)
    assert [(row.run, row.state) for row in rows[2:]] == [(name, "blocked") for name in ROWS[2:]]
    assert rows[2].error == "is made from bert"


def test_one_sweep_with_seeds_gives_a_published_table(tmp_path: Path, encoder: Path, lamella: Lamella) -> None:
    """The seeds of a trained row, of a head on it, of its copy and of an ensemble are averaged."""
    names = {"head": "a386-skip-at-0.3", "bert@0.5": "bert@0.3", "both": "ensemble-at-0.3", "[0.5, 1]": "[0.3, 1]"}
    file = write(tmp_path / "rows.toml", encoder, RUNS + DERIVED)
    for old, new in names.items():
        file.write_text(file.read_text().replace(old, new))
    out = tmp_path / "bertvision-span"
    sweep = read_sweep([file], out, seeds=[0, 4])
    assert sweep.derived["ensemble-at-0.3-seed4"].needs == {"a386-skip-at-0.3-seed4", "bert-seed4"}
    assert {row.error for row in run_sweep(sweep, out, log=quiet)} == {None}
    assert read_json(out / "bert@0.3-seed4" / runs.RUN)["model"]["name"] == str(out / "bert-seed4" / "models" / "0.3")
    expected = {"bert", "a386-skip-at-0.3", "bert@0.3", "bert@1", "ensemble-at-0.3"}
    for folder in (out, tmp_path / "kept"):
        if folder != out:
            assert lamella("compare", out, "--keep", folder)[0] == 0
        assert {reader.name: len(reader.runs) for reader in compare([folder]).readers} == dict.fromkeys(expected, 2)
        assert lamella("report", folder, "--out", tmp_path / f"runs-{folder.name}.md")[0] == 0
        assert ", by way of bert@0.3 |" in (tmp_path / f"runs-{folder.name}.md").read_text()
        page = ("report", "--paper", "bertvision-table3", folder, "--out", tmp_path / f"{folder.name}.md", "--json")
        code, printed, err = lamella(*page)
        assert code == 0, err
        rows = {row["run"]: row for row in json.loads(printed)["tables"][0]["rows"]}
        assert {name for name, row in rows.items() if row["seeds"] == 2} == expected - {"bert", "bert@1"}


@pytest.mark.parametrize(
    ("derived", "message"),
    [
        ('copies = ["bert"]', "derived.copies: expected a run and an epoch, as in \"bert@0.3\", got 'bert'"),
        ('copies = ["bert@0.7"]', "expected an epoch of training.save_at of bert (0.5, 1), got '0.7'"),
        ('copies = ["none@1"]', "derived row none@1: expected the run 'none', but it is neither in this sweep nor in"),
        ('copies = ["bert@1", "bert@1"]', "expected a single row named bert@1, got another"),
        ('copy = ["bert@1"]', "derived.copy: no such option"),
        (
            '[[derived.ensembles]]\nname = "model"\nmembers = ["bert", "head"]',
            "derived.ensembles.name: expected a folder",
        ),
        ('[[derived.ensembles]]\nname = "x"\nmembers = ["bert"]', "derived.ensembles[0].members: expected"),
        ('[[derived.ensembles]]\nname = "head"\nmembers = ["bert", "head"]', "expected a single row named head"),
    ],
)
def test_a_wrong_row_is_one_line(tmp_path: Path, encoder: Path, lamella: Lamella, derived: str, message: str) -> None:
    file = write(tmp_path / "rows.toml", encoder, f"{RUNS}\n[derived]\n{derived}")
    code, _, err = lamella("sweep", file, "--out", tmp_path / "out")
    assert code in (1, 2)
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_train_refuses_derived_rows_unless_a_run_is_chosen(file: Path, tmp_path: Path, lamella: Lamella) -> None:
    code, _, err = lamella("train", file, "--out", tmp_path / "out")
    assert code == 2
    assert "got [derived] rows too, which only sweep makes" in err
    assert lamella("train", file, "--run", "bert", "--out", tmp_path / "out")[0] == 0
