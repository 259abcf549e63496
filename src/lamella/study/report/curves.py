"""Learning curves: the history of a run, thinned to as many points as a plot can show."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lamella.study.learning_curve import read_history, thin_out
from lamella.study.records import is_number
from lamella.study.report.values import SHOWN_SCORES, ReportValues, rounded

X_AND_LOSS = ("step", "epoch", "loss")
CURVE_POINTS = 200  # a longer curve is averaged over as many stretches


def read_curve(path: Path) -> ReportValues:
    """Return the training loss with its parts, and the dev scores, of a history file, by step and by epoch."""
    history = read_history(path)
    names = [*X_AND_LOSS, *history.parts]
    columns = np.array([[event[key] for key in names] for event in history.steps], np.float64).reshape(-1, len(names))
    stretches = np.array_split(columns, min(CURVE_POINTS, len(columns))) if len(columns) else []
    means = {name: [rounded(stretch[:, place].mean()) for stretch in stretches] for place, name in enumerate(names)}
    evaluations = thin_out(history.evaluations, CURVE_POINTS)
    scores = [key for key in SHOWN_SCORES if any(is_number(event.get(key)) for event in evaluations)]
    return {
        **{name: means[name] for name in X_AND_LOSS},
        "parts": {name: means[name] for name in history.parts},
        "evaluations": {
            key: [rounded(event[key]) if is_number(event.get(key)) else None for event in evaluations]
            for key in ("step", *scores)
        },
    }
