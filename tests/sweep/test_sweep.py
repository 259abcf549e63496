"""Sweeps train the remaining runs, share passes, respect dependencies, and continue after a failed run."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from doubles import record_weights, save_tiny_encoder
from lamella import runs
from lamella.data.demo import data_path
from lamella.data.file_formats.formats import read
from lamella.data.file_formats.writers import write as write_examples
from lamella.errors import ConfigError, LamellaError, RunError, UsageError
from lamella.files import read_json, write_json
from lamella.plan import load_plan
from lamella.run_file import read_table
from lamella.study.records import read_records
from lamella.sweep.engine import PASSES
from lamella.sweep.sweep import RunOutcome, run_sweep
from lamella.sweep.sweep_plan import read_sweep
from lamella.training.fitting import bookkeeping
from lamella.training.run import train_plan
from outcomes import outcome
from run_files import write_run_file

pytestmark = pytest.mark.usefixtures("one_thread", "on_cpu", "read_once")
PAPERS = Path(__file__).resolve().parents[2] / "configs" / "papers"
Lamella = Callable[..., tuple[int, str, str]]


class Killed(BaseException):
    """Simulates a kill: nothing is written after it."""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("sweep") / "tiny", num_hidden_layers=1)


def write(path: Path, encoder: Path | None, more: str = "", **encoder_options: str) -> Path:
    """Write a run file with a few steps."""
    options = {"name": str(encoder)} if encoder else {}
    lines = [f'{key} = "{value}"' for key, value in {**options, **encoder_options}.items()]
    return write_run_file(path, "\n".join(lines), more, training="save_at = [0.1]")


def quiet(line: str) -> None:
    pass


def names_of_passes(paths: list[Path], out: Path) -> list[list[str]]:
    return [list(job.configs) for job in read_sweep(paths, out).jobs]


@pytest.mark.parametrize("table", sorted(PAPERS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_table_of_the_papers_is_a_sweep(table: Path, tmp_path: Path) -> None:
    sweep = read_sweep([table], tmp_path / "out")
    finished: set[str] = set()
    for job in sweep.jobs:
        assert job.needs <= finished
        finished |= set(job.configs)
        if len(job.configs) > 1:
            assert {config.encoder.tuning["name"] for config in job.configs.values()} == {"frozen"}
    assert finished == set(sweep.runs)
    shutil.copytree(PAPERS / "base", tmp_path / "folder" / "base")
    shutil.copy(table, tmp_path / "folder")
    assert sweep.runs == read_sweep([tmp_path / "folder"], tmp_path / "out").runs
    assert not (tmp_path / "out").exists()


def test_sharing_a_pass_does_not_change_the_options_of_a_run(tmp_path: Path) -> None:
    """Sharing a pass must not change what is trained: learners of less data cut batches for themselves only."""
    table = PAPERS / "bertvision-span.toml"
    sweep = read_sweep([table], tmp_path)
    alone = {}
    for run in read_table(table)["run"]:
        alone |= load_plan(table, only=[run["name"]]).runs
    assert sweep.runs == alone
    assert {name: config for job in sweep.jobs for name, config in job.configs.items()} == sweep.runs


def test_a_grid_of_frozen_readers_shares_a_pass_and_of_tuned_ones_none(tmp_path: Path, encoder: Path) -> None:
    grid = '[grid.learner]\nseed = [0, 1]\n[grid.encoder]\ntuning = ["frozen", "full"]\n'
    file = write(tmp_path / "grid.toml", encoder, grid)
    passes = names_of_passes([file], tmp_path / "out")
    assert passes == [["frozen-seed0", "frozen-seed1"], ["full-seed0"], ["full-seed1"]]


def test_a_sweep_gives_the_same_runs_as_train(tmp_path: Path, encoder: Path) -> None:
    grid = '[learner]\nlearning_rate = 1e-3\n[grid.learner]\nmixer = ["last", "dot"]\n'
    files = [
        write(tmp_path / "heads.toml", encoder, grid, tuning="frozen"),
        write(
            tmp_path / "mean.toml", encoder, '[learner]\nlearning_rate = 1e-3\nmixer = "scalar_mix"', tuning="frozen"
        ),
        write(tmp_path / "tuned.toml", encoder),
    ]
    out = tmp_path / "out"
    sweep = read_sweep(files, out)
    assert [len(job.configs) for job in sweep.jobs] == [3, 1]
    lines: list[str] = []
    rows = run_sweep(sweep, out, log=lines.append)
    assert lines
    assert not any(PASSES in line for line in lines), "folders of its own"
    assert [(row.run, row.state, row.skipped) for row in rows] == [
        ("heads-last", "finished", False),
        ("heads-dot", "finished", False),
        ("mean", "finished", False),
        ("tuned", "finished", False),
    ]
    for file in files:
        train_plan(load_plan(file), tmp_path / "alone" / file.stem)
    for name, alone in {"heads-dot": "heads/dot", "mean": "mean", "tuned": "tuned"}.items():
        trained_alone, swept = outcome(tmp_path / "alone" / alone), outcome(out / name)
        for file in ("predictions.json", "model/config.json", "config.json", "eval_results.json"):
            assert trained_alone[file] == swept[file]
    summary = read_json(out / runs.SUMMARY)
    assert [run["run"] for run in summary["runs"]] == list(sweep.runs)
    assert summary["varied"] == ["encoder.tuning", "learner.learning_rate", "learner.mixer"]
    assert all("f1" in run["scores"] for run in summary["runs"])
    assert runs.run_state(out) == "finished"
    assert not list((out / PASSES).glob("*"))


def test_a_run_that_starts_from_another_comes_after_it(tmp_path: Path, encoder: Path) -> None:
    files = [
        write(tmp_path / "a-second.toml", None, tuning="frozen", **{"from": "first@0.1"}),
        write(tmp_path / "b-third.toml", None, tuning="frozen", **{"from": "first"}),
        write(tmp_path / "first.toml", encoder),
    ]
    assert names_of_passes([tmp_path], tmp_path / "out") == [["first"], ["a-second"], ["b-third"]]
    rows = run_sweep(read_sweep(files, tmp_path / "out"), tmp_path / "out", log=quiet)
    assert [row.error for row in rows] == [None] * 3
    base = read_json(tmp_path / "out" / "a-second" / runs.CONFIG)["encoder"]["name"]
    assert Path(base) == tmp_path / "out" / "first" / "models" / "0.1"


def test_a_warm_start_comes_after_the_run_that_it_starts_from(tmp_path: Path, encoder: Path) -> None:
    """Options inherited from that run are not a difference when the sweep is repeated."""
    start = f'[learner]\nstart = "{tmp_path / "out" / "first"}"'
    files = [
        write(tmp_path / "a-second.toml", None, start),
        write(tmp_path / "first.toml", encoder, tuning="bitfit"),
    ]
    assert names_of_passes(files, tmp_path / "out") == [["first"], ["a-second"]]
    for _ in range(2):
        rows = run_sweep(read_sweep(files, tmp_path / "out"), tmp_path / "out", log=quiet)
        assert [row.error for row in rows] == [None] * 2
    config = read_json(tmp_path / "out" / "a-second" / runs.CONFIG)
    assert config["encoder"]["tuning"] == {"name": "bitfit"}


def test_an_override_that_makes_runs_alike_is_noted(tmp_path: Path, lamella: Lamella) -> None:
    def notes(table: str, *settings: str) -> list[str]:
        file = PAPERS / f"{table}.toml"
        given = [word for setting in settings for word in ("--set", setting)]
        code, _, err = lamella("sweep", file, *given, "--out", tmp_path / "out", "--list")
        assert code == 0, err
        return [line.removeprefix(f"note: {file}: ") for line in err.splitlines()]

    assert notes("pce-table2", "encoder.name=tiny") == [
        "--set encoder.name replaces 'google-bert/bert-base-uncased' of bert-no-fine-tuning and bert: "
        "the runs no longer differ in it"
    ]
    assert notes("korquad-base", "encoder.name=tiny", "training.epochs=1") == [
        "--set encoder.name replaces 'google-bert/bert-base-multilingual-cased' of mbert: "
        "the runs no longer differ in it",
        "mbert and koelectra-5e-5-dropout-0.1 have the same options now, and give the same reader",
    ]
    assert notes("bertvision-span", "encoder.name=tiny") == []  # the heads follow the run that they start from
    assert notes("korquad-base") == []


def test_every_run_is_trained_once_per_seed(tmp_path: Path, encoder: Path, lamella: Lamella) -> None:
    """Heads on a frozen encoder share its pass over all seeds; heads on a tuned run read the run with their seed."""
    heads = "\n".join(f'[[run]]\nname = "{name}"\nlearner.mixer = "{name}"\n' for name in ("last", "dot"))
    tuned = '[[run]]\nname = "tuned"\nencoder.tuning = "full"\n[[run]]\nname = "top"\nencoder.from = "tuned@0.1"\n'
    file, out = write(tmp_path / "list.toml", encoder, heads + tuned, tuning="frozen"), tmp_path / "out"
    code, listed, _ = lamella("sweep", file, "--out", out, "--seeds", "0,3", "--list")
    assert code == 0
    assert listed.splitlines() == [
        "8 runs in 5 passes",
        f"1. {encoder}, frozen: last-seed0, last-seed3, dot-seed0, dot-seed3",
        f"2. {encoder}, full: tuned-seed0",
        f"3. {encoder}, full: tuned-seed3",
        "4. tuned-seed0@0.1, frozen: top-seed0",
        "5. tuned-seed3@0.1, frozen: top-seed3",
    ]
    sweep = read_sweep([file], out, seeds=[0, 3])
    assert {name: config.learner.seed for name, config in sweep.runs.items()} == {
        name: int(name[-1]) for name in sweep.runs
    }
    assert [row.state for row in run_sweep(sweep, out, log=quiet)] == ["finished"] * 8
    assert all(row.skipped for row in run_sweep(read_sweep([file], out, seeds=[0, 3]), out, log=quiet))
    assert Path(read_json(out / "top-seed3" / runs.CONFIG)["encoder"]["name"]) == out / "tuned-seed3" / "models" / "0.1"


def test_seeds_that_conflict_with_the_run_file_are_one_line(tmp_path: Path, encoder: Path, lamella: Lamella) -> None:
    out = tmp_path / "out"
    grid = write(tmp_path / "grid.toml", encoder, "[grid.learner]\nseed = [0, 1]")
    plain = write(tmp_path / "plain.toml", encoder)
    path = write(tmp_path / "path.toml", encoder, f'[learner]\nstart = "{out / "plain"}"')
    for arguments, message in (
        ((grid, "--seeds", "0,1"), "grid.toml: expected runs of one learner.seed to train with --seeds, got 0, 1"),
        ((plain, "--seeds", "0,1", "--set", "learner.seed=2"), "expected --seeds or --set learner.seed, got both"),
        ((plain, path, "--seeds", "0,1"), "path.toml: run path reads"),
        ((plain, "--seeds", "0,0"), "expected different whole numbers, as in 0,1,2, got '0,0'"),
        ((plain, "--seeds", "0-2"), "expected different whole numbers, as in 0,1,2, got '0-2'"),
    ):
        code, _, err = lamella("sweep", *arguments, "--out", out)
        assert code in (1, 2)
        assert message in err
        assert err.count("\n") == 1
    assert not out.exists()


def test_runs_that_start_from_one_another_are_an_error(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "a.toml", None, **{"from": "b"}),
        write(tmp_path / "b.toml", None, **{"from": "a"}),
    ]
    with pytest.raises(UsageError, match=r"the runs a, b start from one another in a circle"):
        read_sweep(files, tmp_path / "out")
    with pytest.raises(
        UsageError, match=r"a\.toml: expected the run 'b' to start from, but it is neither in this sweep"
    ):
        read_sweep(files[:1], tmp_path / "out")


def test_a_student_waits_for_its_teacher_and_shares_no_pass_with_it(tmp_path: Path, encoder: Path) -> None:
    teacher = tmp_path / "out" / "z-teacher"
    files = [
        write(
            tmp_path / "student.toml",
            encoder,
            f'[learner]\ndistil = {{ name = "teacher", models = ["{teacher}"] }}',
            tuning="frozen",
        ),
        write(tmp_path / "z-teacher.toml", encoder, tuning="frozen"),
    ]
    assert names_of_passes(files, tmp_path / "out") == [["z-teacher"], ["student"]]


def test_a_failed_run_blocks_only_the_runs_that_start_from_it(tmp_path: Path, encoder: Path, lamella: Lamella) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    write(folder / "bad.toml", tmp_path / "nowhere")
    write(folder / "child.toml", None, **{"from": "bad"})
    write(folder / "good.toml", encoder)
    code, out, err = lamella("sweep", folder, "--out", tmp_path / "out")
    assert code == 1
    assert err.count("\n") == 1
    assert "2 of 3 runs failed" in err
    lines = {line.split()[0]: line for line in out.splitlines()[-4:]}
    assert lines["run"].split() == ["run", "state", "F1", "seconds", "error"]
    assert "nowhere" in lines["bad"]
    assert lines["child"].split()[1] == "blocked"
    assert lines["good"].split()[1] == "finished"
    assert runs.run_state(tmp_path / "out") == "failed"

    save_tiny_encoder(tmp_path / "nowhere")
    code, out, _ = lamella("sweep", folder, "--out", tmp_path / "out", "--json")
    assert code == 0
    rows = {row["run"]: row for row in json.loads(out)["runs"]}
    assert {name: row["state"] for name, row in rows.items()} == dict.fromkeys(("bad", "child", "good"), "finished")
    assert {name: row["skipped"] for name, row in rows.items()} == {"bad": False, "child": False, "good": True}


def test_an_error_of_any_kind_affects_only_its_run(
    tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [write(tmp_path / "a.toml", encoder), write(tmp_path / "b.toml", encoder)]
    whole = bookkeeping.Bookkeeper.evaluate

    def broken(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.folders["a" if "a" in self.folders else "b"].name == "a":
            raise RuntimeError("the device\nis gone")
        return whole(self, *arguments, **options)

    monkeypatch.setattr(bookkeeping.Bookkeeper, "evaluate", broken)
    rows = run_sweep(read_sweep(files, tmp_path / "out"), tmp_path / "out", log=quiet)
    assert [(row.state, row.error) for row in rows] == [("failed", "the device is gone"), ("finished", None)]


@pytest.mark.parametrize("tuning", ["full", "frozen"])
def test_a_repeated_sweep_resumes_where_it_was_killed(
    tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch, tuning: str
) -> None:
    file = write(tmp_path / "grid.toml", encoder, "[grid.learner]\nseed = [0, 1]", tuning=tuning)
    run_sweep(read_sweep([file], tmp_path / "whole"), tmp_path / "whole", log=quiet)

    out, saved = tmp_path / "out", bookkeeping.save_checkpoint
    times = 0

    def killed(path: Path, learners: Any, *arguments: Any, **options: Any) -> None:
        nonlocal times
        saved(path, learners, *arguments, **options)
        times += learners[-1].name == "seed1"
        if times == 2:
            raise Killed

    monkeypatch.setattr(bookkeeping, "save_checkpoint", killed)
    monkeypatch.setattr(runs, "write_json", _dies_with(write_json, lambda: times == 2))
    with pytest.raises(Killed):
        run_sweep(read_sweep([file], out), out, log=quiet)
    monkeypatch.undo()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    messages: list[str] = []
    rows = run_sweep(read_sweep([file], out), out, log=messages.append)
    assert [row.state for row in rows] == ["finished"] * 2
    assert [row.skipped for row in rows] == [tuning == "full", False]
    assert any(line.startswith("resuming after step 2 of 4") for line in messages)
    for name in ("seed0", "seed1"):
        assert outcome(out / name) == outcome(tmp_path / "whole" / name)

    again = run_sweep(read_sweep([file], out), out, log=messages.append)
    assert all(row.skipped and row.scores for row in again)


def _dies_with(write: Callable[..., None], dead: Callable[[], bool]) -> Callable[..., None]:
    def write_or_die(*arguments: Any) -> None:
        if dead():
            raise Killed
        write(*arguments)

    return write_or_die


def test_a_run_with_different_options_is_neither_skipped_nor_replaced(tmp_path: Path, encoder: Path) -> None:
    file, out = write(tmp_path / "one.toml", encoder), tmp_path / "out"
    run_sweep(read_sweep([file], out), out, log=quiet)
    before = outcome(out)
    with pytest.raises(RunError, match=r"this run began with learner\.seed = 0, got 3"):
        run_sweep(read_sweep([file], out, ["learner.seed=3"]), out, log=quiet)
    assert outcome(out) == before


def test_a_run_made_from_different_files_is_not_skipped(tmp_path: Path) -> None:
    """Files of the same names: edited data, a replaced encoder, a start that was trained further."""
    encoder, data = save_tiny_encoder(tmp_path / "tiny"), tmp_path / "train.json"
    shutil.copy(data_path("demo:train"), data)
    first, out = write(tmp_path / "first.toml", encoder), tmp_path / "out"
    own = [f"data.train=['{data}']", "data.max_train_samples=4"]
    run_sweep(read_sweep([first], tmp_path / "before", own), tmp_path / "before", log=quiet)
    start = tmp_path / "before" / "first" / "model"
    second = write(tmp_path / "second.toml", encoder, f'[learner]\nstart = "{start}"')

    def sweep_again() -> list[RunOutcome]:
        return run_sweep(read_sweep([second], out, own), out, log=quiet)

    assert [row.skipped for row in sweep_again()] == [False]
    before = outcome(out)
    for file, message in (
        (data, "train.json"),
        (start / "model.safetensors", r"the start '.*model'"),
        (encoder / "model.safetensors", r"the encoder '.*tiny'"),
    ):
        assert [row.skipped for row in sweep_again()] == [True]
        content = file.read_bytes()
        change(file)
        with pytest.raises(
            RunError, match=rf"second: expected .*{message} with sha256 .*, which this run was made with, got"
        ):
            sweep_again()
        file.write_bytes(content)
    assert outcome(out) == before


@pytest.mark.parametrize(
    ("teacher", "distil"),
    [("before/first", 'name = "teacher"\nmodels = ["{}"]'), ("logits", 'name = "stored"\nruns = ["{}"]')],
)
def test_a_run_whose_teacher_was_replaced_is_not_skipped(
    tmp_path: Path, lamella: Callable[..., tuple[int, str, str]], teacher: str, distil: str
) -> None:
    encoder, out = save_tiny_encoder(tmp_path / "tiny", num_hidden_layers=1), tmp_path / "out"
    first = write(tmp_path / "first.toml", encoder)
    write_examples(read("demo:train").examples[:8], tmp_path / "taught.json")  # those that the run files train on
    run_sweep(read_sweep([first], tmp_path / "before"), tmp_path / "before", log=quiet)
    model, logits = tmp_path / "before" / "first", tmp_path / "logits"

    def predict() -> None:
        call = ("predict", tmp_path / "taught.json", "--model", model, "--keep-logits", "--out", logits, "--overwrite")
        assert lamella(*call)[0] == 0

    def sweep_again() -> list[RunOutcome]:
        return run_sweep(read_sweep([second], out), out, log=quiet)

    predict()
    second = write(tmp_path / "second.toml", encoder, f"[learner.distil]\n{distil.format(tmp_path / teacher)}")
    assert [row.skipped for row in sweep_again()] == [False]
    assert [row.skipped for row in sweep_again()] == [True]
    facts = read_json(out / "second" / runs.MODEL / "config.json")["facts"]["teachers"]
    assert [teacher["model"] for teacher in facts] == ["first"]
    change(model / runs.MODEL / "model.safetensors")
    predict()
    with pytest.raises(
        RunError, match=rf"second: expected the teacher '.*{teacher}' with sha256 .*, which this run was made with, got"
    ):
        sweep_again()
    shutil.rmtree(tmp_path / teacher)  # a missing teacher cannot be checked
    assert [row.skipped for row in sweep_again()] == [True]


def test_a_run_whose_encoder_file_was_rewritten_is_skipped(tmp_path: Path) -> None:
    encoder, out = save_tiny_encoder(tmp_path / "tiny"), tmp_path / "out"
    file = write(tmp_path / "one.toml", encoder)
    run_sweep(read_sweep([file], out), out, log=quiet)
    weights = encoder / "model.safetensors"
    save_file(load_file(weights), weights, metadata={"format": "pt", "saved": "again"})
    assert [row.skipped for row in run_sweep(read_sweep([file], out), out, log=quiet)] == [True]


def change(file: Path) -> None:
    """Change the content of a file so that it can still be read."""
    if file.suffix == ".json":
        file.write_text(file.read_text() + "\n")
    else:
        tensors = load_file(file)
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
        record_weights(file.parent)


def test_a_folder_keeps_the_runs_of_earlier_sweeps(tmp_path: Path, encoder: Path) -> None:
    out = tmp_path / "out"
    for name in ("one", "two"):
        file = write(tmp_path / f"{name}.toml", encoder)
        run_sweep(read_sweep([file], out, ["training.max_steps=1"]), out, log=quiet)
    assert [run.name for run in read_records([out]).records] == ["one", "two"]


def test_invalid_sweeps_are_one_message_each(tmp_path: Path, encoder: Path) -> None:
    file = write(tmp_path / "one.toml", encoder)
    (tmp_path / "list.toml").write_text('runs = ["one.toml", "two.toml"]')
    (tmp_path / "none.toml").write_text("runs = []")
    (tmp_path / "mixed.toml").write_text('runs = ["one.toml"]\n[data]\ntrain = "demo:train"')
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "one.toml").write_text(file.read_text())
    (tmp_path / "model.toml").write_text(file.read_text())
    cases: list[tuple[list[str], type[LamellaError], str]] = [
        (["list.toml"], LamellaError, "lists two.toml, but there is no such file"),
        (["none.toml"], ConfigError, "expected run files, got an empty list"),
        (["mixed.toml"], ConfigError, "expected a list of run files and no other key"),
        (["empty"], UsageError, r"expected run files \(\*\.toml\), got none"),
        (["nowhere.toml"], LamellaError, "no such file"),
        (["one.toml", "other/one.toml"], UsageError, "expected a single run named one, got another from"),
        (["model.toml"], UsageError, "rename the file"),
    ]
    for names, kind, words in cases:
        with pytest.raises(kind, match=words):
            read_sweep([tmp_path / name for name in names], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    train_plan(load_plan(file), tmp_path / "trained")
    with pytest.raises(RunError, match="expected the folder of a sweep, got a run of train"):
        run_sweep(read_sweep([file], tmp_path / "trained"), tmp_path / "trained", log=quiet)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("keep me")
    with pytest.raises(RunError, match="is not empty and not a run folder"):
        run_sweep(read_sweep([file], tmp_path / "mine"), tmp_path / "mine", log=quiet)


@pytest.mark.parametrize("option", ["--address", "--cpus-per-run", "--gpus-per-run", "--retries"])
def test_options_of_ray_are_refused_without_it(tmp_path: Path, lamella: Lamella, option: str) -> None:
    code, _, err = lamella("sweep", tmp_path / "grid.toml", "--out", tmp_path / "out", option, "1")
    assert (code, err) == (2, f"lamella: sweep {option}: needs --engine ray.\n")


def test_listing_a_sweep_writes_nothing(tmp_path: Path, encoder: Path, lamella: Lamella) -> None:
    file = write(tmp_path / "grid.toml", encoder, "[grid.learner]\nseed = [0, 1]", tuning="frozen")
    code, out, _ = lamella("sweep", file, "--out", tmp_path / "out", "--list")
    assert code == 0
    assert out.splitlines() == ["2 runs in 1 pass", f"1. {encoder}, frozen: seed0, seed1"]
    assert not (tmp_path / "out").exists()
    code, out, _ = lamella("sweep", file, "--out", tmp_path / "out", "--list", "--json")
    assert json.loads(out) == {"passes": [["seed0", "seed1"]], "derived": []}


def test_without_ray_the_extra_is_named_and_nothing_is_written(
    tmp_path: Path, encoder: Path, lamella: Lamella, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    file = write(tmp_path / "one.toml", encoder)
    code, _, err = lamella("sweep", file, "--out", tmp_path / "out", "--engine", "ray")
    assert code == 2
    assert err == "lamella: --engine ray needs ray, which is not installed; install with: pip install 'lamella[ray]'\n"
    assert not (tmp_path / "out").exists()
