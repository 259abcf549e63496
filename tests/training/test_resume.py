"""A run that was killed resumes to the same weights and history as a run that was not."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lamella
from doubles import save_tiny_encoder
from forks import ForkServer
from lamella import runs
from lamella.atomic import TEMPORARY
from lamella.data.demo import data_path
from lamella.errors import RunError
from lamella.files import read_json
from lamella.models.model import ReaderModel
from lamella.plan import make_plan
from lamella.training.fitting import bookkeeping
from lamella.training.run import train_pass, train_plan
from outcomes import outcome

pytestmark = pytest.mark.usefixtures("one_thread", "on_cpu", "read_once")


class Killed(BaseException):
    """Simulates a kill inside the process: nothing after it is written, not even the state of the run."""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("resume") / "tiny", num_hidden_layers=1)


def table(folder: Path, **sections: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "data": {"train": "demo:train", "dev": "demo:dev", "max_train_samples": 4, "max_eval_samples": 3},
        "windows": {"max_seq_length": 128, "doc_stride": 32, "max_query_length": 24},
        "encoder": {"name": str(folder), "tuning": "full"},
        "learner": {"learning_rate": 1e-3},
        "training": {
            "epochs": 3,
            "batch_size": 4,
            "precision": "fp32",
            "evaluate_every": "3 steps",
            "checkpoint_every": "2 steps",
            "save_at": [0, 1.5],
        },
    }
    return {**given, **{name: {**given.get(name, {}), **options} for name, options in sections.items()}}


def written(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


@pytest.mark.parametrize("kills", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_killed_at_random_moments(kills: int, encoder: Path, forks: ForkServer, tmp_path: Path) -> None:
    """Real processes and real SIGKILLs, some of them while a checkpoint is half-written."""
    config = tmp_path / "run.json"
    # Dropout is on, so a wrong random state would show. Enough steps that a process lives to be killed.
    training = {"epochs": kills + 2, "evaluate_every": 10, "save_at": []}
    given = table(encoder, data={"max_train_samples": 8}, training=training)
    config.write_text(json.dumps(given))
    train_plan(make_plan(given, where="test"), tmp_path / "whole")

    out, dice, halves, steps = tmp_path / "killed", random.Random(5), 0, []
    for kill in range(kills):
        before, wait, began = written(out / runs.CHECKPOINT), dice.uniform(0.0, 0.1), None
        process = forks.start("train", config, "--out", out, *(["--resume"] if kill else []))
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if began is None and written(out / runs.CHECKPOINT) != before:
                began = time.monotonic()
            half = began is not None and any(out.glob(f".{runs.CHECKPOINT}.*{TEMPORARY}"))
            if began is not None and (half if kill % 2 else time.monotonic() - began > wait):
                halves += half
                break
            time.sleep(0.002 if began is None else 0.0002)
        assert runs.run_state(out) == "unfinished", "the run ended before it was killed: make it longer"
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        steps.append(torch.load(out / runs.CHECKPOINT, weights_only=True)["position"][0])
    assert halves >= max(1, kills // 4)
    assert sorted(set(steps)) == steps  # each continued from the one before
    assert forks.run("train", config, "--out", out, "--resume")[0] == 0
    assert runs.run_state(out) == "finished"
    assert outcome(out) == outcome(tmp_path / "whole")


def killed_at(monkeypatch: pytest.MonkeyPatch, evaluation: int) -> None:
    """Stop at the n-th evaluation as a kill would, without any record of it."""
    evaluate, calls = bookkeeping.Bookkeeper.evaluate, []

    def maybe(self: bookkeeping.Bookkeeper, *arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == evaluation:
            raise Killed
        evaluate(self, *arguments)

    monkeypatch.setattr(bookkeeping.Bookkeeper, "evaluate", maybe)


@pytest.mark.parametrize(
    "changes",
    [
        {"encoder": {"tuning": {"name": "adapter", "size": 8}}, "learner": {"bias_correction": False}},
        {"learner": {"distil": {"name": "sda", "k": 3}}},
        {"learner": {"distil": {"name": "sdv", "k": 2, "every": 2}}, "encoder": {"tuning": "frozen"}},
        {"learner": {"mixer": [{"name": "xception", "widths": [4, 8, 8, 8]}]}, "encoder": {"tuning": "frozen"}},
        {"training": {"accumulate": 3, "epochs": 4, "evaluate_every": "2 steps"}},
        {"data": {"train": [{"file": "demo:train", "weight": 0.9, "negatives": 0.5}]}},
        {"training": {"patience": 9, "epochs": 20, "evaluate_every": "2 steps", "keep": "last"}},
        {"grid": {"learner": {"mixer": ["dot", "conv_1xn"], "fraction": [0.3, 1.0]}}, "encoder": {"tuning": "frozen"}},
        {"grid": {"learner": {"seed": [0, 1]}}},
    ],
    ids=str,
)
def test_a_checkpoint_holds_everything_that_training_depends_on(
    changes: dict[str, Any], encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(table(encoder, **changes), where="test")
    train_plan(plan, tmp_path / "whole")
    for evaluation in (3, 2):
        killed_at(monkeypatch, evaluation)
        with pytest.raises(Killed):
            train_plan(plan, tmp_path / "out", resume=(tmp_path / "out").exists())
        monkeypatch.undo()
    train_plan(plan, tmp_path / "out", resume=True)
    assert outcome(tmp_path / "out") == outcome(tmp_path / "whole")


def test_a_finished_run_stays_as_it_is(encoder: Path, tmp_path: Path) -> None:
    plan = make_plan(table(encoder, training={"max_steps": 2}), where="test")
    train_plan(plan, tmp_path / "out")
    before, lines = outcome(tmp_path / "out"), []
    train_plan(plan, tmp_path / "out", resume=True, log=lines.append)
    assert lines == [f"{tmp_path / 'out'}: already finished"]
    assert outcome(tmp_path / "out") == before
    assert not (tmp_path / "out" / runs.CHECKPOINT).exists()
    more = make_plan(table(encoder, training={"max_steps": 3}), where="test")
    with pytest.raises(RunError, match=r"training\.max_steps = 2, got 3\. It is finished: choose another --out"):
        train_plan(more, tmp_path / "out", resume=True)
    assert outcome(tmp_path / "out") == before


def test_a_mistyped_folder_is_not_trained_into(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(encoder, tmp_path / "first", monkeypatch)
    (tmp_path / "empty").mkdir()
    plan, before = make_plan(table(encoder), where="test"), sorted(tmp_path.iterdir())
    for name, found, hint in (
        ("frist", "no such folder", f" Did you mean {str(tmp_path / 'first')!r}?"),
        ("other", "no such folder", ""),
        ("empty", "a folder without a run", ""),
    ):
        expected = (
            f"{tmp_path / name}: expected a run to resume, found {found}; leave out --resume to train a new run.{hint}"
        )
        with pytest.raises(RunError) as refused:
            train_plan(plan, tmp_path / name, resume=True)
        assert str(refused.value) == expected
        with pytest.raises(RunError) as refused:
            lamella.train(table(encoder), train=[{"question": "Who?"}], out=tmp_path / name, resume=True)
        assert str(refused.value) == expected
    assert sorted(tmp_path.iterdir()) == before
    assert not list((tmp_path / "empty").iterdir())


def interrupted(encoder: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    killed_at(monkeypatch, 2)
    with pytest.raises(Killed):
        train_plan(make_plan(table(encoder), where="test"), out)
    monkeypatch.undo()
    return out


def test_the_time_of_a_resumed_pass_is_added_up(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = interrupted(encoder, tmp_path / "out", monkeypatch)
    content = torch.load(out / runs.CHECKPOINT, weights_only=True)
    assert 0 < content["seconds"] < 100
    torch.save({**content, "seconds": content["seconds"] + 1000}, out / runs.CHECKPOINT)
    train_plan(make_plan(table(encoder), where="test"), out, resume=True)
    cost = read_json(out / runs.COST)
    assert 1000 + content["seconds"] < cost["pass_seconds"] < 1100


def test_the_seconds_of_a_resumed_history_go_on(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = interrupted(encoder, tmp_path / "out", monkeypatch)
    content = torch.load(out / runs.CHECKPOINT, weights_only=True)
    (learner,) = content["learners"].values()
    before = learner["head_seconds"]  # on the CPU a learner's own clock counts, not that of the pass
    learner["head_seconds"] += 1000
    torch.save(content, out / runs.CHECKPOINT)
    train_plan(make_plan(table(encoder), where="test"), out, resume=True)
    records = [json.loads(line) for line in (out / runs.HISTORY).read_text().splitlines()]
    seconds = [record["seconds"] for record in records if record["event"] == "evaluation"]
    assert seconds == sorted(set(seconds))
    assert seconds[0] <= before < 1000 + before < seconds[1]  # the checkpoint came after the first evaluation
    assert seconds[-1] == pytest.approx(read_json(out / runs.COST)["train_seconds"], abs=1e-3)


def test_other_options_are_refused(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = interrupted(encoder, tmp_path / "out", monkeypatch)
    before = outcome(out)
    changed = make_plan(table(encoder, learner={"learning_rate": 1e-2}), where="test")
    with pytest.raises(RunError, match=r"began with learner\.learning_rate = 0\.001, got 0\.01\. .*--overwrite"):
        train_plan(changed, out, resume=True)
    assert outcome(out) == before


def test_a_licence_may_be_added_to_a_run(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = interrupted(encoder, tmp_path / "out", monkeypatch)
    licences = {"demo:train": "CC0", "other.json": "CC BY 4.0"}
    train_plan(make_plan(table(encoder, data={"licences": licences}), where="test"), out, resume=True)
    facts = ReaderModel.load(out / runs.MODEL).facts
    assert facts.train is not None
    assert facts.train.licences == ["CC0"]


def test_an_option_that_is_newer_than_the_run_has_its_default(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = interrupted(encoder, tmp_path / "out", monkeypatch)
    recorded = read_json(out / runs.CONFIG)
    del recorded["training"]["keep"]
    (out / runs.CONFIG).write_text(json.dumps(recorded))
    with pytest.raises(RunError, match=r"began with training\.keep = 'best', got 'last'"):
        train_plan(make_plan(table(encoder, training={"keep": "last"}), where="test"), out, resume=True)
    train_plan(make_plan(table(encoder), where="test"), out, resume=True)
    assert runs.run_state(out) == "finished"


def test_a_damaged_checkpoint_is_reported(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = interrupted(encoder, tmp_path / "out", monkeypatch)
    path = out / runs.CHECKPOINT
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(RunError, match=r"checkpoint\.pt: is damaged, .*--overwrite\.$"):
        train_plan(make_plan(table(encoder), where="test"), out, resume=True)
    train_plan(make_plan(table(encoder), where="test"), out, overwrite=True)


def test_other_runs_are_refused(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of several runs cannot continue as a single one, nor the other way round: its runs would be lost."""
    several = make_plan(table(encoder, grid={"learner": {"seed": [0, 1]}}), where="test")
    killed_at(monkeypatch, 6)
    with pytest.raises(Killed):
        train_plan(several, tmp_path / "several")
    monkeypatch.undo()
    single = interrupted(encoder, tmp_path / "single", monkeypatch)
    before = outcome(single), outcome(tmp_path / "several")
    with pytest.raises(RunError, match=r"holds the runs seed0, seed1, but the run file describes one run"):
        train_plan(make_plan(table(encoder), where="test"), tmp_path / "several", resume=True)
    with pytest.raises(RunError, match=r"holds one run, but the run file describes the runs seed0, seed1"):
        train_plan(several, single, resume=True)
    assert (outcome(single), outcome(tmp_path / "several")) == before


def test_other_data_is_refused(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "train.jsonl"
    lines = [f'{{"id": "q{n}", "question": "Who?", "context": "Titan{n} was it.", "answers": []}}\n' for n in range(60)]
    data.write_text("".join(lines))
    plan = make_plan(table(encoder, data={"train": str(data), "max_train_samples": None}), where="test")
    killed_at(monkeypatch, 2)
    with pytest.raises(Killed):
        train_plan(plan, tmp_path / "out")
    monkeypatch.undo()
    data.write_text("".join(lines[10:]))
    with pytest.raises(RunError, match=r"expected the training data that the run began with, .*--overwrite\.$"):
        train_plan(plan, tmp_path / "out", resume=True)
    data.write_text("".join(lines))
    train_plan(plan, tmp_path / "out", resume=True)


def test_other_data_than_a_finished_run_of_several_had_is_refused(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint shows the change to the pass that was stopped; a pass that had ended has none."""
    data = tmp_path / "train.json"
    data.write_bytes(data_path("demo:train").read_bytes())
    seeds = {"learner": {"seed": [0, 1]}}
    given = table(encoder, data={"train": str(data)}, grid=seeds)
    plan, out = make_plan(given, where="test"), tmp_path / "out"
    assert len(plan.passes) == 2
    monkeypatch.setattr("lamella.training.run.train_pass", second_dies(train_pass))
    with pytest.raises(Killed):
        train_plan(plan, out)
    monkeypatch.undo()
    assert runs.is_over(out / "seed0")
    before = outcome(out)
    data.write_bytes(data.read_bytes() + b"\n")
    message = r"seed0: expected .*train\.json with sha256 .*, which this run was made with, got .*--overwrite\.$"
    with pytest.raises(RunError, match=message):
        train_plan(plan, out, resume=True)
    assert outcome(out) == before


def second_dies(train_pass: Callable[..., None]) -> Callable[..., None]:
    passes: list[object] = []

    def train_or_die(prepared: object, *arguments: object, **more: object) -> None:
        passes.append(prepared)
        if len(passes) == 2:
            raise Killed
        train_pass(prepared, *arguments, **more)

    return train_or_die


def test_without_resume_or_overwrite_the_run_is_safe(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = interrupted(encoder, tmp_path / "out", monkeypatch)
    with pytest.raises(RunError, match=r"already holds a run \(\w+\); .*--overwrite, or --resume"):
        train_plan(make_plan(table(encoder), where="test"), out)
