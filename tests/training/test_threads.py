"""Training takes fewer threads where other programs use the cores, and never more than it was given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from doubles import save_tiny_encoder
from lamella import cores
from lamella.cores import CoreMeter, busy_seconds
from lamella.plan import make_plan
from lamella.training.fitting import bookkeeping
from lamella.training.run import train_plan
from lamella.training.threads import sharing_cores

TICKS = os.sysconf("SC_CLK_TCK")


class Machine:
    """A machine with four cores of which others use some; its clock moves by ten seconds per measurement."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stat, self.now, self.others, self.own = folder / "stat", 0.0, 0.0, 0.0
        monkeypatch.setattr(cores, "STAT", self.stat)
        monkeypatch.setattr(cores.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(cores.time, "process_time", lambda: self.own * self.now)
        monkeypatch.setattr(cores.time, "sleep", self.wait)
        monkeypatch.setattr(cores.os, "cpu_count", lambda: 4)
        monkeypatch.setattr(cores, "usable_cores", lambda: 4)
        self.wait(0)

    def wait(self, seconds: float = 10) -> None:
        self.now += seconds
        worked = int((self.others + self.own) * self.now * TICKS)
        self.stat.write_text(f"cpu  {worked} 0 0 {10**6} {10**5} 0 0 0 {worked} 0\ncpu0 1 2 3\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.fixture
def _four_threads(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("others", "free"), [(0, 4), (0.3, 4), (1, 3), (2.6, 1), (3.9, 1), (9, 1)])
def test_free_cores_are_those_that_others_leave(machine: Machine, others: float, free: int) -> None:
    machine.others, machine.own = others, 0.8
    machine.wait()
    meter = CoreMeter()
    machine.wait()
    assert meter.others() == pytest.approx(others, abs=0.01)
    assert meter.free_cores() == free


def test_a_machine_with_more_cores_than_this_process_may_use(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores.os, "cpu_count", lambda: 64)
    machine.others = 40
    meter = CoreMeter()
    machine.wait()
    assert meter.free_cores() == 4


@pytest.mark.usefixtures("machine")
def test_without_counts_of_the_system_all_cores_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "STAT", tmp_path / "none")
    assert busy_seconds() == 0
    assert CoreMeter().free_cores() == 4


@pytest.mark.usefixtures("_four_threads")
def test_training_shares_the_cores(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.others = 2
    lines: list[str] = []
    meter = CoreMeter()
    machine.wait()
    with sharing_cores(meter, lines.append):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 4
    assert lines == [
        "training with 2 threads instead of 4, as other programs use the cores; OMP_NUM_THREADS sets another number"
    ]
    with sharing_cores(meter, lines.append, before=3):
        assert torch.get_num_threads() == 3
    with sharing_cores(meter, lines.append, before=8):
        assert torch.get_num_threads() == 4
    assert "as the run began" in lines[1]
    assert len(lines) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    with sharing_cores(meter, lines.append):
        assert torch.get_num_threads() == 4


@pytest.mark.usefixtures("_four_threads", "on_cpu")
def test_a_resumed_run_keeps_its_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others use three of four cores when the run begins, and none when it is resumed."""
    encoder = save_tiny_encoder(tmp_path / "encoder", num_hidden_layers=1)
    plan = make_plan(
        {
            "data": {"train": "demo:train", "dev": "demo:dev", "max_train_samples": 4, "max_eval_samples": 3},
            "windows": {"max_seq_length": 128, "doc_stride": 32, "max_query_length": 24},
            "encoder": {"name": str(encoder), "tuning": "full"},
            "training": {"max_steps": 3, "batch_size": 4, "precision": "fp32", "checkpoint_every": "1 steps"},
        },
        where="test",
    )
    used: list[int] = []

    class Killed(BaseException): ...

    save = bookkeeping.save_checkpoint

    def killed_after_saving(*arguments: object, **options: object) -> None:
        used.append(torch.get_num_threads())
        save(*arguments, **options)  # type: ignore[arg-type]
        if len(used) == 1:
            raise Killed

    monkeypatch.setattr(bookkeeping, "save_checkpoint", killed_after_saving)
    monkeypatch.setattr(CoreMeter, "free_cores", lambda meter: 1)
    with pytest.raises(Killed):
        train_plan(plan, tmp_path / "run")
    monkeypatch.setattr(CoreMeter, "free_cores", lambda meter: 4)
    train_plan(plan, tmp_path / "run", resume=True)
    assert used == [1, 1]
    assert torch.get_num_threads() == 4
