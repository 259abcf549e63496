"""Learning curves: the history of a run, thinned to what can be drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lamella.errors import UnreadableError
from lamella.files import read_text
from lamella.study.records import is_number
from lamella.study.report.values import SHOWN_SCORES, Record, rounded

CURVE_POINTS = 200  # a longer curve is drawn by the means of as many stretches


def read_curve(path: Path) -> Record:
    """The training loss and the dev scores of a history, by step and by epoch."""
    steps: list[tuple[float, float, float]] = []
    evaluations: list[Record] = []
    for number, line in enumerate(read_text(path).splitlines() if path.is_file() else (), start=1):
        try:
            record = json.loads(line)
            if record.get("event") == "step" and is_number(record.get("loss")):
                steps.append((record["step"], record["epoch"], record["loss"]))
            elif record.get("event") == "evaluation":
                evaluations.append(record)
        except (ValueError, AttributeError, KeyError):
            raise UnreadableError(f"{path}:{number}: expected a JSON object a line; it is damaged.") from None
    columns = np.array(steps, dtype=np.float64).reshape(-1, 3)
    parts = np.array_split(columns, min(CURVE_POINTS, len(columns))) if len(columns) else []
    means = [part.mean(0) for part in parts]
    scores = [key for key in SHOWN_SCORES if any(is_number(record.get(key)) for record in evaluations)]
    return {
        "step": [rounded(one[0]) for one in means],
        "epoch": [rounded(one[1]) for one in means],
        "loss": [rounded(one[2]) for one in means],
        "evaluations": {
            key: [rounded(record[key]) if is_number(record.get(key)) else None for record in _thin(evaluations)]
            for key in ("step", *scores)
        },
    }


def _thin(records: Sequence[Record], limit: int = CURVE_POINTS) -> list[Record]:
    """At most `limit` of the records, evenly, the first and the last among them."""
    if len(records) <= limit:
        return list(records)
    return [records[round(place)] for place in np.linspace(0, len(records) - 1, limit)]
