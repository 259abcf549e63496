"""A run on cached windows gives the same result as a run that cuts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from doubles import save_tiny_encoder
from lamella import runs
from lamella.data.windows import feature_cache
from lamella.plan import make_plan
from lamella.training.run import train_plan
from outcomes import outcome

pytestmark = pytest.mark.usefixtures("one_thread", "on_cpu")


def test_cached_windows_train_and_score_as_fresh_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(
        {
            "data": {
                "train": "demo:train",
                "dev": "demo:dev",
                "max_train_samples": 6,
                "max_eval_samples": 3,
                "negative_windows": "subsample",
            },
            "windows": {"max_seq_length": 64, "doc_stride": 16, "max_query_length": 24},
            "encoder": {"name": str(save_tiny_encoder(tmp_path / "tiny", num_hidden_layers=1)), "tuning": "full"},
            "training": {"epochs": 2, "batch_size": 4, "precision": "fp32"},
        },
        where="test",
    )
    monkeypatch.setenv("LAMELLA_CACHE", str(tmp_path / "cache"))
    train_plan(plan, tmp_path / "fresh")
    assert not (tmp_path / "cache").exists()
    logged: dict[str, list[str]] = {"kept": [], "taken": []}
    monkeypatch.setattr(feature_cache, "MIN_QUESTIONS", 1)
    for name, lines in logged.items():
        train_plan(plan, tmp_path / name, log=lines.append)
    assert len([line for line in logged["kept"] if "for later runs" in line]) == 2  # train and dev
    assert len([line for line in logged["taken"] if "cached windows" in line]) == 2
    assert not [line for line in logged["taken"] if "for later runs" in line]
    fresh = outcome(tmp_path / "fresh")
    assert runs.HISTORY in fresh
    assert outcome(tmp_path / "kept") == fresh
    assert outcome(tmp_path / "taken") == fresh
