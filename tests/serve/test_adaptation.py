"""Adaptations: how corrections are split, what a verdict claims, and the process that trains."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from lamella.data.examples import Answer, Context, Example
from lamella.files import locked, write_json
from lamella.scoring.metrics import QuestionScores
from lamella.serve import adaptation
from lamella.serve.adapt_process import compare
from lamella.serve.adaptation import AdaptationError, Adaptations, split_corrections
from lamella.serve.catalogue import Catalogue
from lamella.serve.corrections import Corrections
from samples import needs_torch
from tiny_reader import save_tiny_bert, save_tiny_reader

SENTENCES = [f"The number of box {number} is {number + 40}." for number in range(24)]


def example(number: int, context: Context) -> Example:
    return Example(str(number), "Which?", context, (Answer(context.text[:3], 0),))


def test_whole_texts_are_left_out_if_there_are_enough() -> None:
    contexts = [Context(sentence) for sentence in SENTENCES[:8]]
    examples = [example(number, contexts[number % 8]) for number in range(24)]
    train, left_out, split = split_corrections(examples)
    assert split == "context"
    assert not {item.context for item in train} & {item.context for item in left_out}
    assert (len(train), len(left_out)) == (15, 9)
    assert split_corrections(examples) == (train, left_out, split)  # the same every time


def test_questions_about_one_text_are_split_by_question() -> None:
    context = Context("One text about everything.")
    examples = [example(number, context) for number in range(24)]
    train, left_out, split = split_corrections(examples)
    assert split == "question"
    assert len(left_out) == 8
    assert sorted([*train, *left_out], key=lambda item: int(item.id)) == examples


def scores(*right: int) -> QuestionScores:
    exact = np.array(right, np.float64)
    ids = tuple(map(str, range(len(right))))
    return QuestionScores(ids, np.ones(len(right), bool), np.ones(len(right), bool), exact, exact)


def test_a_verdict_on_few_questions_claims_nothing() -> None:
    verdict = compare(scores(0, 0, 0, 1, 1, 0, 0), scores(1, 1, 1, 0, 1, 0, 0), split="context")
    assert (verdict["before"]["right"], verdict["after"]["right"]) == (2, 4)
    assert (verdict["gained"], verdict["lost"], verdict["result"]) == (3, 1, "unclear")
    assert verdict["sentence"] == (
        "7 questions prove little: 3 answers became right and 1 became wrong, which may be chance."
    )


def test_a_clear_difference_is_named() -> None:
    before, after = scores(*[0] * 12, 1), scores(*[1] * 12, 1)
    better = compare(before, after, split="question")
    assert better["result"] == "better"
    assert better["chance"] < 0.001
    assert "hardly chance" in better["sentence"]
    assert "expect less from it on new texts" in better["sentence"]
    assert compare(after, before, split="context")["result"] == "worse"
    same = compare(after, after, split="context")
    assert same["result"] == "unclear"
    assert same["f1_difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    encoder = save_tiny_bert(tmp_path / "encoder")
    save_tiny_reader(tmp_path / "models" / "tiny", encoder, decoding={"null_score_diff_threshold": -1.5})
    return tmp_path / "models"


def adaptations(folder: Path, *, questions: int = 24) -> Adaptations:
    corrections = Corrections(folder)
    for number, sentence in enumerate(SENTENCES[:questions]):
        corrections.add(f"What is the number of box {number}?", sentence, (len(sentence) - 3, len(sentence) - 1))
    return Adaptations(folder, corrections, Catalogue([], folder))


def finish(jobs: Adaptations, id_: str) -> dict[str, object]:
    until = time.monotonic() + 120
    while (status := jobs.status(id_))["state"] in ("training", "scoring"):
        assert time.monotonic() < until
        time.sleep(0.2)
    return status


@needs_torch
def test_a_reader_is_adapted_scored_and_kept(folder: Path) -> None:
    jobs = adaptations(folder)
    try:
        started = jobs.start("tiny")
        assert (started["state"], started["trained_on"], started["left_out"]) == ("training", 16, 8)
        with pytest.raises(AdaptationError, match="one at a time"):
            jobs.start("tiny")
        with pytest.raises(AdaptationError, match="expected a finished one"):
            jobs.keep(started["id"], "mine")
        assert Adaptations(folder, jobs.corrections, jobs.catalogue).current() is not None  # of a second process
        status = finish(jobs, started["id"])
        assert status["state"] == "finished", status
        assert status["progress"] == 1.0
        assert status["verdict"]["questions"] == 8
        assert status["verdict"]["threshold"]["value"] == -1.5  # its parent's: eight are too few to tune it
        assert status["verdict"]["threshold"]["sentence"].startswith("It answers as readily as tiny")
        again = Adaptations(folder, jobs.corrections, jobs.catalogue)  # after a restart of the server
        assert again.current() == status
        for name in ("../mine", ".mine", "a/b", ""):
            with pytest.raises(AdaptationError, match="expected letters"):
                again.keep(started["id"], name)
        with pytest.raises(AdaptationError, match="one that is free"):
            again.keep(started["id"], "tiny")
        assert again.keep(started["id"], "mine") == "mine"
        assert again.current() is None
    finally:
        jobs.close()
    from lamella.inference.reader import Reader

    reader = Reader.load(folder / "mine")
    assert reader.model.decoding.null_score_diff_threshold == -1.5
    assert reader.ask("What is the number of box 3?", SENTENCES[3])


@needs_torch
def test_training_that_fails_reports_its_last_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptation, "_run_file", lambda source: '[data]\ntrain = "absent.json"\n')
    jobs = adaptations(folder)
    try:
        status = finish(jobs, jobs.start("tiny")["id"])
        assert status["state"] == "failed"
        assert "absent.json" in str(status["message"])
        jobs.discard(str(status["id"]))
        assert jobs.current() is None
    finally:
        jobs.close()


@needs_torch
def test_cancelling_stops_the_process_and_removes_its_files(folder: Path) -> None:
    jobs = adaptations(folder)
    started = jobs.start("tiny")
    process = jobs._process
    assert process is not None
    Adaptations(folder, jobs.corrections, jobs.catalogue).discard(started["id"])  # by another process of the server
    assert process.wait(60) == -signal.SIGKILL
    jobs.close()
    assert list((folder / adaptation.FOLDER).iterdir()) == []
    with pytest.raises(AdaptationError, match="got 'x'"):
        jobs.status("x")


@needs_torch
def test_few_corrections_are_not_enough(folder: Path) -> None:
    with pytest.raises(AdaptationError, match="at least 20 corrections, got 19"):
        adaptations(folder, questions=19).start(None)


def test_without_torch_the_message_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptation.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AdaptationError, match=r"pip install 'lamella\[train\]'"):
        adaptations(folder, questions=1).start(None)


def test_the_process_ends_when_the_server_is_killed(tmp_path: Path) -> None:
    """Its stdin is a pipe that the system closes with the server, however it ends."""
    watcher = "from lamella.serve.adapt_process import _end_with_server; _end_with_server()"
    process = subprocess.Popen([sys.executable, "-c", watcher], stdin=subprocess.PIPE, start_new_session=True)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == -signal.SIGKILL
    assert os.getpid()  # this process is in another group


def finished(jobs: Adaptations, id_: str, **state: str) -> Path:
    """Write the folder of an adaptation that is over."""
    folder = jobs.folder / id_
    model = folder / adaptation.RUN / "model"
    model.mkdir(parents=True)
    request = {"model": "tiny", "trained_on": 16, "left_out": 8, "split": "context"}
    write_json(folder / adaptation.REQUEST, request)
    write_json(folder / adaptation.STATE, {"state": "finished", **state})
    return folder


def test_what_is_no_adaptation_is_ignored(folder: Path) -> None:
    (folder / adaptation.FOLDER / "empty").mkdir(parents=True)
    (folder / adaptation.FOLDER / ".DS_Store").write_bytes(b"x")
    jobs = adaptations(folder, questions=1)
    assert jobs.current() is None
    (folder / adaptation.FOLDER / "0").mkdir()
    finished(jobs, "a1")
    current = jobs.current()
    assert current is not None
    assert current["id"] == "a1"


def test_a_failure_names_no_folder_of_the_server(folder: Path) -> None:
    jobs = adaptations(folder, questions=1)
    finished(jobs, "a1", state="failed", message=f"{folder}/tiny: the base encoder is missing")
    assert jobs.status("a1")["message"] == "The training failed; the log of the server has the reason."


def test_the_name_of_a_removed_reader_is_not_free(folder: Path, tmp_path: Path) -> None:
    given = shutil.copytree(folder / "tiny", tmp_path / "given")
    catalogue = Catalogue([str(folder.parent / "models" / "tiny"), str(given)])
    jobs = Adaptations(folder, Corrections(folder), catalogue)
    finished(jobs, "a1")
    catalogue.remove("given")
    with pytest.raises(AdaptationError, match="one that is free"):
        jobs.keep("a1", "given")


def test_no_reader_takes_the_name_of_the_corrections(folder: Path) -> None:
    jobs = adaptations(folder, questions=1)
    finished(jobs, "a1")
    jobs.corrections.remove(jobs.corrections.listed()[0]["id"])  # the last one: the file is gone
    with pytest.raises(AdaptationError, match="one that is free"):
        jobs.keep("a1", jobs.corrections.path.name)


def test_the_adaptation_of_another_server_process_is_stopped_after_one_s_own(folder: Path) -> None:
    """A process that this one has started, and another has discarded, must not hide that of the other."""
    jobs, sleep = adaptations(folder, questions=1), [sys.executable, "-c", "import time; time.sleep(60)"]
    jobs._process = subprocess.Popen(sleep, start_new_session=True)
    jobs._process.kill()
    current = finished(jobs, "a1", state="training")
    with locked(current) as lock:
        process = subprocess.Popen(sleep, start_new_session=True, pass_fds=[lock])
    write_json(current / adaptation.PROCESS, {"pid": process.pid})
    jobs.discard("a1")
    assert process.wait(20) == -signal.SIGKILL
    assert jobs._process is None
