"""The cost of rows that are not trained: a copy has its share of the training, an ensemble the sum of its members."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lamella import runs
from lamella.files import read_json
from lamella.scoring.cost import write_cost
from lamella.study.learning_curve import read_history
from lamella.study.records import is_number

SUMMED = (
    "trainable_parameters", "trainable_percent_of_encoder", "model_bytes", "train_seconds",
    "inference_seconds_per_1000", "inference_flops_per_window",
)  # fmt: skip
MEASURED = ("train_seconds", "inference_seconds_per_1000")  # comparable on one device only
OF_TRAINING = ("windows_per_second", "training_flops_per_window")  # the same at every epoch


def add_training(folder: Path, run: Path, epoch: float) -> None:
    """Add the cost of training up to an epoch of `run` to that of a copy, which has the cost of answering."""
    if (folder / runs.COST).is_file() and (run / runs.COST).is_file():
        cost, trained = read_json(folder / runs.COST), read_json(run / runs.COST)
        if cost.get("device") == trained.get("device"):
            cost |= {key: trained[key] for key in OF_TRAINING if key in trained}
            cost["train_seconds"] = _seconds_until(run, epoch)
        _write(folder, cost)


def add_members(folder: Path, members: Sequence[tuple[Path, float | None]]) -> None:
    """Write the cost of an ensemble: every member is trained, and every member answers.

    A member is a run and, if it is a copy, its epoch. Without the costs of all members, nothing is written.
    """
    costs = []
    for run, epoch in members:
        if not (run / runs.COST).is_file():
            return
        cost = read_json(run / runs.COST)
        costs.append(cost if epoch is None else {**cost, "train_seconds": _seconds_until(run, epoch)})
    same_device = len({cost.get("device") for cost in costs}) == 1
    total = {
        key: sum(cost[key] for cost in costs)
        for key in SUMMED
        if all(cost.get(key) is not None for cost in costs) and (same_device or key not in MEASURED)
    }
    shared = {key: costs[0].get(key) for key in ("encoder_parameters", "precision", "flops_tokens")}
    _write(folder, {**total, **shared, "device": costs[0].get("device") if same_device else None})


def _write(folder: Path, cost: dict[str, Any]) -> None:
    scores = read_json(folder / runs.RESULTS) if (folder / runs.RESULTS).is_file() else {}
    write_cost(folder, {key: value for key, value in cost.items() if value is not None}, f1=scores.get("f1"))


def _seconds_until(run: Path, epoch: float) -> float | None:
    """Return the training time until an epoch: as recorded at evaluations, in proportion between them."""
    total: float | None = read_json(run / runs.COST).get("train_seconds")
    history = read_history(run / runs.HISTORY)
    if total is None or not history.steps:
        return total
    seconds = {0.0: 0.0}
    seconds |= {event["epoch"]: event["seconds"] for event in history.evaluations if is_number(event.get("seconds"))}
    seconds[history.steps[-1]["epoch"]] = total
    epochs = sorted(seconds)
    return float(np.interp(epoch, epochs, [seconds[place] for place in epochs]))
