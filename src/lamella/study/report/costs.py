"""What a run cost, as a report shows it: from its record, else from the files it left."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import numpy as np

from lamella import runs
from lamella.errors import UnreadableError
from lamella.study.records import RunRecord, is_number, read_object

# What the page shows of a run's cost, and the keys of cost.json it is read from.
COST_KEYS = {
    "parameters": "trainable_parameters",
    "train_seconds": "train_seconds",
    "inference_seconds": "inference_seconds_per_1000",
}


def cost_of(run: RunRecord) -> tuple[dict[str, float], str]:
    """What is known of a run's cost; what cost.json does not say, from the files themselves."""
    cost = {ours: float(run.cost[key]) for ours, key in COST_KEYS.items() if is_number(run.cost.get(key))}
    if "parameters" not in cost and (saved := _saved_parameters(run.folder / runs.MODEL)):
        cost["parameters"] = float(saved)
    if "train_seconds" in cost:
        return cost, "record"
    record = read_object(run.folder / runs.RUN)
    if record.get("command") != "train" or "resumed" in record:  # which counts the time between, too
        return cost, ""
    try:
        began, ended = (datetime.fromisoformat(record[key]) for key in ("started", "ended"))
        cost["train_seconds"] = (ended - began).total_seconds()
    except (KeyError, TypeError, ValueError):  # not ended yet, or not a time
        return cost, ""
    return cost, "clock"


def _saved_parameters(model: Path) -> int:
    """A saved model holds what was trained and nothing else."""
    shapes = _tensor_shapes(model)
    return sum(int(np.prod(shape)) for shape in shapes.values())


def _tensor_shapes(model: Path) -> dict[str, list[int]]:
    """The header of a safetensors file: 8 bytes of its length, then JSON."""
    path = model / "model.safetensors"
    if not path.is_file():
        return {}
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return {name: one["shape"] for name, one in header.items() if name != "__metadata__"}
    except (OSError, ValueError, TypeError, KeyError, OverflowError, MemoryError):
        raise UnreadableError(f"{path}: expected a safetensors file; it is damaged.") from None
