"""The real TensorBoard and W&B receive what the history holds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from doubles import save_tiny_encoder
from lamella.errors import MissingLibraryError
from lamella.plan import make_plan
from lamella.training.fitting import processes
from lamella.training.run import train_plan

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # the trackers' own warnings
]


def train(tmp_path: Path, trackers: list[str], **grid: Any) -> Path:
    table = {
        "data": {"train": "demo:train", "dev": "demo:dev", "max_train_samples": 8, "max_eval_samples": 4},
        "windows": {"max_seq_length": 128, "doc_stride": 32, "max_query_length": 24},
        "encoder": {"name": str(save_tiny_encoder(tmp_path / "tiny")), "tuning": "frozen"},
        "training": {"epochs": 1, "batch_size": 4, "precision": "fp32", "trackers": trackers},
        **grid,
    }
    train_plan(make_plan(table, where="test"), tmp_path / "run")
    return tmp_path / "run"


def test_tensorboard_shows_the_losses_and_the_scores(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = train(tmp_path, ["tensorboard"], grid={"learner": {"seed": [0, 1]}})
    shown = EventAccumulator(str(out / "lamella"))
    shown.Reload()
    for seed in (0, 1):
        history = [json.loads(line) for line in (out / f"seed{seed}" / "history.jsonl").read_text().splitlines()]
        steps = [record for record in history if record["event"] == "step"]
        events = shown.Scalars(f"seed{seed}/loss")
        assert [event.step for event in events] == [record["step"] for record in steps]
        assert [event.value for event in events] == pytest.approx([record["loss"] for record in steps])
        assert shown.Scalars(f"seed{seed}/f1")[-1].value == pytest.approx(history[-1]["f1"])


def test_wandb_gets_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    train(tmp_path, ["wandb"])
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 30  # another process writes the file asynchronously
    while b"learning_rate" not in file.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b"learning_rate" in file.read_bytes()


def test_a_tracker_that_is_not_installed_is_reported_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        MissingLibraryError, match=r"the tracker 'wandb' needs wandb, .*: pip install 'lamella\[trackers\]'"
    ):
        train(tmp_path, ["wandb"])
    assert not (tmp_path / "run").exists()
