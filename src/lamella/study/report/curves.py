"""Learning curves: the history of a run, thinned to as many points as a plot can show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lamella.errors import UnreadableError
from lamella.files import read_text
from lamella.study.records import is_number
from lamella.study.report.values import SHOWN_SCORES, ReportValues, rounded

X_AND_LOSS = ("step", "epoch", "loss")
NOT_PARTS = ("event", *X_AND_LOSS, "learning_rate")  # the other numbers of a step are parts of the loss
CURVE_POINTS = 200  # a longer curve is averaged over as many stretches


def read_curve(path: Path) -> ReportValues:
    """Return the training loss with its parts, and the dev scores, of a history file, by step and by epoch."""
    steps: list[list[float]] = []
    parts: list[str] | None = None
    evaluations: list[ReportValues] = []
    for number, line in enumerate(read_text(path).splitlines() if path.is_file() else (), start=1):
        try:
            event = json.loads(line)
            if event.get("event") == "step" and is_number(event.get("loss")):
                if parts is None:
                    parts = [key for key, value in event.items() if key not in NOT_PARTS and is_number(value)]
                steps.append([float(event[key]) for key in (*X_AND_LOSS, *parts)])
            elif event.get("event") == "evaluation":
                evaluations.append(event)
        except (ValueError, TypeError, AttributeError, KeyError):
            raise UnreadableError(f"{path}:{number}: expected one JSON object per line; the file is damaged.") from None
    names = [*X_AND_LOSS, *(parts or [])]
    columns = np.array(steps, dtype=np.float64).reshape(-1, len(names))
    stretches = np.array_split(columns, min(CURVE_POINTS, len(columns))) if len(columns) else []
    means = {name: [rounded(stretch[:, place].mean()) for stretch in stretches] for place, name in enumerate(names)}
    scores = [key for key in SHOWN_SCORES if any(is_number(event.get(key)) for event in evaluations)]
    return {
        **{name: means[name] for name in X_AND_LOSS},
        "parts": {name: means[name] for name in parts or []},
        "evaluations": {
            key: [rounded(event[key]) if is_number(event.get(key)) else None for event in _thin(evaluations)]
            for key in ("step", *scores)
        },
    }


def _thin(events: Sequence[ReportValues], limit: int = CURVE_POINTS) -> list[ReportValues]:
    """Return at most `limit` events at even distances, including the first and the last."""
    if len(events) <= limit:
        return list(events)
    return [events[round(index)] for index in np.linspace(0, len(events) - 1, limit)]
