"""The cost of a run as the report shows it: from cost.json, otherwise from the other files of the run."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import numpy as np

from lamella import runs
from lamella.errors import UnreadableError
from lamella.study.records import RunRecord, is_number, read_json_object

# The costs that the report shows, and their keys in cost.json.
COST_KEYS = {
    "parameters": "trainable_parameters",
    "train_seconds": "train_seconds",
    "inference_seconds": "inference_seconds_per_1000",
}


def run_cost(run: RunRecord) -> tuple[dict[str, float], str]:
    """Return the known costs of a run, and the source of its training time: `record`, `clock` or none ("").

    Costs missing in cost.json are read from the model file and from the start and end times of the run.
    """
    cost = {name: float(run.cost[key]) for name, key in COST_KEYS.items() if is_number(run.cost.get(key))}
    if "parameters" not in cost and (saved := _saved_parameters(run.folder / runs.MODEL)):
        cost["parameters"] = float(saved)
    if "train_seconds" in cost:
        return cost, "record"
    record = read_json_object(run.folder / runs.RUN)
    if record.get("command") != "train" or "resumed" in record:  # the clock would count the break, too
        return cost, ""
    try:
        started, ended = (datetime.fromisoformat(record[key]) for key in ("started", "ended"))
        cost["train_seconds"] = (ended - started).total_seconds()
    except (KeyError, TypeError, ValueError):  # not ended yet, or not a time
        return cost, ""
    return cost, "clock"


def _saved_parameters(model: Path) -> int:
    """Count the parameters in a saved model, which holds only what was trained."""
    return sum(int(np.prod(shape)) for shape in _tensor_shapes(model).values())


def _tensor_shapes(model: Path) -> dict[str, list[int]]:
    """Read the header of a safetensors file: 8 bytes with its length, then JSON."""
    path = model / "model.safetensors"
    if not path.is_file():
        return {}
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
    except (OSError, ValueError, TypeError, KeyError, OverflowError, MemoryError):
        raise UnreadableError(f"{path}: expected a safetensors file; the file is damaged.") from None
