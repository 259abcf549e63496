"""Two real processes give the losses, weights and scores of a single one, and nothing is written twice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from doubles import save_tiny_encoder
from lamella.data.file_formats.formats import read
from lamella.data.file_formats.writers import write
from lamella.plan import make_plan
from lamella.training.run import train_plan
from outcomes import outcome, timeless_history

pytestmark = pytest.mark.usefixtures("one_thread")

# Every process of the launch trains each plan and writes down what was logged. Then only the second gets a signal. At
# the end, each runs the command line, as `torchrun -m lamella` does.
SCRIPT = """
import contextlib, json, os, runpy, signal, sys
from pathlib import Path
from lamella.plan import make_plan
from lamella.training.fitting import loop
from lamella.training.fitting.interrupts import InterruptedTrainingError
from lamella.training.run import train_plan

folder = Path(sys.argv[1])
for name, table in json.loads((folder / "plans.json").read_text()).items():
    lines = []
    best = train_plan(make_plan(table, where=name), folder / "two" / name, log=lines.append)
    (folder / f"{name}-{os.environ['RANK']}.json").write_text(json.dumps({"best": best, "lines": lines}))

plan = make_plan(json.loads((folder / "plans.json").read_text())["full"], where="full")
collate, calls = loop.collate, []

def send(*arguments, **options):
    calls.append(arguments)
    if len(calls) == 4 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return collate(*arguments, **options)

loop.collate = send
try:
    train_plan(plan, folder / "stopped")
except InterruptedTrainingError as error:
    (folder / f"stopped-{os.environ['RANK']}.txt").write_text(str(error))
loop.collate = collate
train_plan(plan, folder / "stopped", resume=True)

sys.argv = ["lamella", "train", str(folder / "full.json"), "--out", str(folder / "two" / "full")]
with open(folder / f"errors-{os.environ['RANK']}.txt", "w") as errors, contextlib.redirect_stderr(errors):
    runpy.run_module("lamella", run_name="__main__")
"""


def plans(encoder: Path) -> dict[str, Any]:
    tuning = str(encoder.parent / "tuning.json")
    common = {
        "data": {"train": "demo:train", "dev": "demo:dev", "max_train_samples": 3, "max_eval_samples": 3},
        "windows": {"max_seq_length": 128, "doc_stride": 32, "max_query_length": 24},
        "training": {"epochs": 2, "batch_size": 3, "precision": "fp32", "evaluate_every": 0.5},
    }
    full = {"name": str(encoder), "tuning": "full", "dropout": 0.0}
    frozen = {**full, "tuning": "frozen"}
    by_group = {"name": "cross_entropy", "answerable": 2.0, "weigh_by": "group"}
    return {
        "full": {**common, "encoder": full, "learner": {"learning_rate": 1e-3}},
        # Batches of three for two processes, several per step, and means over the groups of the whole step.
        "groups": {
            **common,
            "encoder": full,
            "learner": {"learning_rate": 1e-3, "loss": by_group},
            "training": {**common["training"], "accumulate": 2},
        },
        # One window per batch: one of the two processes has nothing to do.
        "lonely": {
            **common,
            "encoder": {**full, "tuning": {"name": "adapter", "size": 4}},
            "training": {**common["training"], "batch_size": 1, "max_steps": 6},
        },
        # The layer above the embeddings is trained, but the head does not read it: weight decay leaves it alone.
        "below": {
            **common,
            "encoder": full,
            "learner": {"learning_rate": 1e-2, "weight_decay": 10.0, "layers": [0]},
        },
        "teacher": {
            **common,
            "encoder": full,
            "learner": {"learning_rate": 1e-3, "distil": {"name": "sda", "k": 2}},
        },
        "many": {
            **common,
            "data": {**common["data"], "threshold": tuning},
            "encoder": frozen,
            "grid": {"learner": {"mixer": ["dot", "scalar_mix"], "fraction": [0.5, 1.0]}},
        },
        "answerability": {**common, "encoder": frozen, "learner": {"task": "answerability"}},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every plan trained in two processes, started by torchrun, and in one."""
    folder = tmp_path_factory.mktemp("processes")
    encoder = save_tiny_encoder(folder / "tiny", num_hidden_layers=1)
    write(read("demo:train").examples[-12:], folder / "tuning.json")
    (folder / "plans.json").write_text(json.dumps(plans(encoder)))
    (folder / "full.json").write_text(json.dumps(plans(encoder)["full"]))
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    launched = subprocess.run(
        [*command, str(folder / "script.py"), str(folder)], env=environment, capture_output=True, text=True, check=False
    )
    (folder / "launch.txt").write_text(f"exit code {launched.returncode}\n{launched.stderr}")
    assert (folder / "errors-0.txt").exists(), launched.stderr[-3000:]
    for name, table in plans(encoder).items():
        train_plan(make_plan(table, where=name), folder / "one" / name)
    return folder


def trained_windows(run: Path) -> float:
    """The number of windows that the rate in its costs was computed from."""
    cost = json.loads((run / "cost.json").read_text())
    return cost["windows_per_second"] * cost["train_seconds"]


def run_folders(plan: Path) -> list[Path]:
    return sorted(path.parent for path in plan.rglob("history.jsonl"))


@pytest.mark.parametrize("name", list(plans(Path())))
def test_two_processes_train_as_one_does(folder: Path, name: str) -> None:
    ones, twos = run_folders(folder / "one" / name), run_folders(folder / "two" / name)
    assert [path.name for path in ones] == [path.name for path in twos]
    assert len(ones) == (4 if name == "many" else 1)
    for single, double in zip(ones, twos, strict=True):
        before, after = (timeless_history(run / "history.jsonl") for run in (single, double))
        assert len(before) == len(after)
        for left, right in zip(before, after, strict=True):
            assert left.keys() == right.keys()
            for key, value in left.items():
                expected = pytest.approx(value, rel=2e-4, abs=1e-5) if isinstance(value, float) else value
                assert right[key] == expected, (left, right)
        assert trained_windows(double) == pytest.approx(trained_windows(single))
        weights, others = (load_file(run / "model" / "model.safetensors") for run in (single, double))
        assert weights.keys() == others.keys()
        for key, value in weights.items():
            if not key.endswith(("key.bias", "task.b")):  # their gradient is only noise, which AdamW amplifies
                torch.testing.assert_close(others[key], value, rtol=1e-3, atol=2e-4, msg=key)
        assert json.loads(
            (single / "predictions.json").read_text() if (single / "predictions.json").exists() else "{}"
        ) == (json.loads((double / "predictions.json").read_text() if (double / "predictions.json").exists() else "{}"))


def test_a_signal_to_one_process_stops_all_after_the_same_step(folder: Path) -> None:
    first, second = ((folder / f"stopped-{rank}.txt").read_text() for rank in (0, 1))
    assert first == second
    assert first.startswith("training was interrupted after step 4 of ")
    assert outcome(folder / "stopped") == outcome(folder / "two" / "full")


@pytest.mark.parametrize("name", list(plans(Path())))
def test_all_processes_return_the_scores_and_one_logs(folder: Path, name: str) -> None:
    first, second = (json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 1))
    assert first["best"] == second["best"]
    assert first["best"]
    assert second["lines"] == []
    assert any("2 processes" in line for line in first["lines"])


def test_the_command_line_under_torchrun(folder: Path) -> None:
    """`torchrun -m lamella train`: a user's mistake is still one line, from one process, and an exit code."""
    errors = "".join((folder / f"errors-{rank}.txt").read_text() for rank in (0, 1))
    assert errors.count(f"lamella: {folder / 'two' / 'full'}: already holds a run") == 1
    assert "Error: lamella" not in errors
    launch = (folder / "launch.txt").read_text()
    assert re.match(r"exit code [1-9]", launch)
    assert "Error: lamella" not in launch
