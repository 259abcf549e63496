"""A run that is asked to stop writes a checkpoint, and resumes to the same result."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from doubles import save_tiny_encoder
from forks import ForkServer
from lamella import runs
from lamella.plan import make_plan
from lamella.training.fitting import loop
from lamella.training.fitting.interrupts import DEFAULT_HANDLERS, STOPPING, InterruptedTrainingError, StopSignals
from lamella.training.run import train_plan
from outcomes import outcome

pytestmark = pytest.mark.usefixtures("one_thread", "on_cpu")


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """Start from Python's own handlers: a library of an earlier test, such as Ray, may have left another."""
    before = {number: signal.signal(number, handler) for number, handler in DEFAULT_HANDLERS.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("interrupts") / "tiny", num_hidden_layers=1)


def table(encoder: Path, **sections: Any) -> dict[str, Any]:
    """A run with dropout, long enough to be interrupted, that writes no checkpoint of its own accord."""
    return {
        "data": {"train": "demo:train", "dev": "demo:dev", "max_train_samples": 8, "max_eval_samples": 3},
        "windows": {"max_seq_length": 128, "doc_stride": 32, "max_query_length": 24},
        "encoder": {"name": str(encoder), "tuning": "full"},
        "learner": {"learning_rate": 1e-3},
        "training": {
            "epochs": 8,
            "batch_size": 4,
            "precision": "fp32",
            "evaluate_every": "30 steps",
            "checkpoint_every": 100,
        },
        **sections,
    }


def test_a_signal_stops_a_run_that_resumes_to_the_same_result(encoder: Path, forks: ForkServer, tmp_path: Path) -> None:
    """Real processes and real signals: first Ctrl-C, then SIGTERM, then to the end."""
    config, out = tmp_path / "run.json", tmp_path / "out"
    config.write_text(json.dumps(table(encoder)))
    train_plan(make_plan(table(encoder), where="test"), tmp_path / "whole")
    for number, more in ((signal.SIGINT, []), (signal.SIGTERM, ["--resume"])):
        code, err = interrupt(forks, ["train", str(config), "--out", str(out), *more], out, number)
        assert code == 128 + number, err
        assert err.splitlines()[-1].startswith("lamella: training was interrupted after step ")
        assert err.endswith(f"; resume with: lamella train {config} --out {out} --resume\n")
        assert runs.run_state(out) == "interrupted"
        assert (out / runs.CHECKPOINT).is_file()
    train_plan(make_plan(table(encoder), where="test"), out, resume=True)
    assert runs.run_state(out) == "finished"
    assert outcome(out) == outcome(tmp_path / "whole")


def interrupt(forks: ForkServer, arguments: list[str], out: Path, number: int) -> tuple[int, str]:
    """Run a command and send it a signal once it has trained a while; return its exit code and its errors."""
    history = out / runs.HISTORY
    before = history.stat().st_size if history.exists() else 0
    command = forks.start(*arguments)
    deadline = time.monotonic() + 300
    while not command.ended() and time.monotonic() < deadline:
        if history.exists() and history.stat().st_size > before:
            os.kill(command.pid, number)
            break
        time.sleep(0.01)
    return command.wait(), command.err


class Signalled:
    """Sends a signal to this process in the given steps of the loop, before their gradients."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
        collate, calls = loop.collate, []

        def send(*arguments: Any, **more: Any) -> Any:
            calls.append(arguments)
            if len(calls) in steps:
                os.kill(os.getpid(), signal.SIGTERM)
            return collate(*arguments, **more)

        monkeypatch.setattr(loop, "collate", send)


@pytest.mark.parametrize(
    ("sections", "step"),
    [
        ({}, 3),  # an evaluation is due
        ({}, 4),
        ({"encoder": {"tuning": "frozen"}, "grid": {"learner": {"mixer": ["dot", "last"], "fraction": [0.5, 1.0]}}}, 5),
    ],
    ids=str,
)
def test_a_run_stops_after_any_step(
    sections: dict[str, Any], step: int, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = table(encoder, **{key: value for key, value in sections.items() if key != "encoder"})
    given["encoder"] = {**given["encoder"], **sections.get("encoder", {})}
    given["training"] = {**given["training"], "max_steps": 8, "evaluate_every": "3 steps"}
    plan = make_plan(given, where="test")
    train_plan(plan, tmp_path / "whole")
    Signalled(monkeypatch, step)
    with pytest.raises(
        InterruptedTrainingError, match=rf"after step {step} of \d+; a checkpoint was written"
    ) as caught:
        train_plan(plan, tmp_path / "out")
    monkeypatch.undo()
    assert caught.value.exit_code == 143
    assert isinstance(caught.value, KeyboardInterrupt)
    assert runs.run_state(tmp_path / "out") == "interrupted"
    train_plan(plan, tmp_path / "out", resume=True)
    assert outcome(tmp_path / "out") == outcome(tmp_path / "whole")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_in_the_last_step_of_a_pass_stops_before_the_next(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = table(encoder, grid={"learner": {"seed": [0, 1]}})
    given["training"] = {**given["training"], "max_steps": 3}
    plan = make_plan(given, where="test")
    Signalled(monkeypatch, 3)
    with pytest.raises(InterruptedTrainingError, match="after pass 1 of 2"):
        train_plan(plan, tmp_path / "out")
    monkeypatch.undo()
    assert runs.is_over(tmp_path / "out" / "seed0")
    train_plan(plan, tmp_path / "out", resume=True)
    train_plan(plan, tmp_path / "whole")
    assert outcome(tmp_path / "out") == outcome(tmp_path / "whole")


def test_a_signal_in_the_last_step_lets_the_run_finish(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = table(encoder)
    given["training"] = {**given["training"], "max_steps": 3}
    Signalled(monkeypatch, 3)
    train_plan(make_plan(given, where="test"), tmp_path / "out")
    assert runs.run_state(tmp_path / "out") == "finished"


def test_a_second_signal_interrupts_at_once(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def impatient(*arguments: Any, **more: Any) -> Any:
        calls.append(arguments)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop, "collate", impatient)
    with pytest.raises(KeyboardInterrupt) as caught:
        train_plan(make_plan(table(encoder), where="test"), tmp_path / "out")
    assert not isinstance(caught.value, InterruptedTrainingError)
    assert len(calls) == 1
    assert runs.run_state(tmp_path / "out") == "interrupted"


def test_further_signals_have_no_effect_on_several_processes() -> None:
    stop = StopSignals(single_process=False)
    with stop.held_back():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
    assert stop.received == signal.SIGINT


def test_only_default_handlers_of_the_main_thread_are_replaced() -> None:
    stop, seen = StopSignals(), []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with stop.held_back():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (seen, stop.received) == ([signal.SIGTERM], None)

    def elsewhere() -> None:
        with stop.held_back():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen[-1] is signal.default_int_handler


def test_the_first_ctrl_c_on_a_terminal_says_what_happens(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for terminal, expected in ((True, STOPPING.decode()), (False, "")):
        monkeypatch.setattr("os.isatty", lambda _, terminal=terminal: terminal)
        stop = StopSignals()
        with stop.held_back():
            signal.raise_signal(signal.SIGINT)
        assert stop.received == signal.SIGINT
        assert capfd.readouterr().err == expected
