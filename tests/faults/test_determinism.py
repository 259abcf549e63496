"""The same run file, data and seed give the same model and predictions, bit for bit (docs/concepts/determinism.md)."""

from __future__ import annotations

import hashlib
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from doubles import save_tiny_encoder
from forks import ForkServer
from kills import changes, prelude
from lamella import runs
from lamella.plan import make_plan
from lamella.training.extract import extract
from lamella.training.run import train_plan
from outcomes import timeless_history

pytestmark = pytest.mark.usefixtures("one_thread", "on_cpu")
slow = pytest.mark.slow

HASHED = ("model.safetensors", runs.PREDICTIONS, runs.NBEST, runs.NULL_ODDS, runs.NA_PROB, runs.RESULTS)
TUNINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"encoder": {"tuning": "lora"}},
    "adapter": {"encoder": {"tuning": {"name": "adapter", "size": 8}}},
    "frozen": {"encoder": {"tuning": "frozen"}, "grid": {"learner": {"mixer": ["dot", "scalar_mix", "conv_1xn"]}}},
}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("determinism") / "tiny", num_hidden_layers=1)


def table(folder: Path, **sections: Any) -> dict[str, Any]:
    """Dropout is on, and the order of the questions is random."""
    given: dict[str, Any] = {
        "data": {"train": "demo:train", "dev": "demo:dev", "max_train_samples": 8, "max_eval_samples": 4},
        "windows": {"max_seq_length": 128, "doc_stride": 32, "max_query_length": 24},
        "encoder": {"name": str(folder), "tuning": "full"},
        "learner": {"learning_rate": 1e-3},
        "training": {
            "epochs": 2,
            "batch_size": 4,
            "precision": "fp32",
            "evaluate_every": 1,
            "checkpoint_every": "1 steps",
        },
    }
    return {**given, **{name: {**given.get(name, {}), **options} for name, options in sections.items()}}


def fingerprint(out: Path) -> dict[str, str]:
    """Return the hash of the tensors, the predictions and the scores of every run in a folder, and of its history."""
    hashes = {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.name in HASHED
    }
    for path in sorted(out.rglob(runs.HISTORY)):
        content = json.dumps(timeless_history(path)).encode()
        hashes[str(path.relative_to(out))] = hashlib.sha256(content).hexdigest()
    assert {Path(name).name for name in hashes} == {*HASHED, runs.HISTORY}
    return hashes


@pytest.mark.parametrize("name", ["full", "frozen", *(pytest.param(name, marks=slow) for name in ("lora", "adapter"))])
def test_the_same_in_one_process_in_another_and_after_a_kill(
    name: str, encoder: Path, tmp_path: Path, forks: ForkServer
) -> None:
    given = table(encoder, **TUNINGS[name])
    run_file, counter = tmp_path / "run.json", tmp_path / "count"
    run_file.write_text(json.dumps(given))
    plan, more = make_plan(given, where="test"), {}
    if name == "frozen":
        more = {"cache": tmp_path / "cache"}
        extract(plan, tmp_path / "cache")
    command = ["train", run_file, *(("--cache", more["cache"]) if more else ()), "--out"]

    train_plan(plan, tmp_path / "first", **more)
    expected = fingerprint(tmp_path / "first")
    train_plan(plan, tmp_path / "second", **more)
    assert fingerprint(tmp_path / "second") == expected

    code, _, err = forks.run(*command, tmp_path / "third", prelude=prelude(tmp_path / "third", counter))
    assert code == 0, err
    assert fingerprint(tmp_path / "third") == expected

    out, half = tmp_path / "fourth", changes(counter) // 2
    code, _, err = forks.run(*command, out, prelude=prelude(out, counter, last=half))
    assert code == -signal.SIGKILL, err
    assert (out / runs.CHECKPOINT).is_file()
    code, _, err = forks.run(*command, out, "--resume")
    assert code == 0, err
    assert fingerprint(out) == expected


def test_another_seed_gives_another_model(encoder: Path, tmp_path: Path) -> None:
    """Otherwise the hashes above would prove nothing."""
    hashes = []
    for seed in (0, 1):
        train_plan(make_plan(table(encoder, learner={"seed": seed}), where="test"), tmp_path / str(seed))
        hashes.append(fingerprint(tmp_path / str(seed)))
    assert hashes[0]["model/model.safetensors"] != hashes[1]["model/model.safetensors"]
    assert hashes[0][runs.NULL_ODDS] != hashes[1][runs.NULL_ODDS]


@pytest.mark.slow
def test_the_same_with_any_number_of_workers(encoder: Path, tmp_path: Path) -> None:
    """Worker processes augment the texts of the next epoch."""
    hashes = []
    for workers in (0, 1, 3):
        given = table(encoder, data={"augment": {"name": "eda", "rate": 0.2}, "workers": workers})
        train_plan(make_plan(given, where="test"), tmp_path / str(workers))
        hashes.append(fingerprint(tmp_path / str(workers)))
    assert hashes[0] == hashes[1] == hashes[2]
