"""Learning curves: the history of a run, or what a result file kept of it, as many points as a plot can show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lamella import runs
from lamella.study.learning_curve import PARTS, read_history, seconds_per_tenth, thin_out
from lamella.study.records import RunRecord, is_number
from lamella.study.report.values import SHOWN_SCORES, ReportValues, rounded

X_AND_LOSS = ("step", "epoch", "loss")
BESIDE_SCORES = ("step", "seconds", "dev_loss")
CURVE_POINTS = 200  # a longer curve is averaged over as many stretches


def read_curve(run: RunRecord) -> ReportValues:
    """Return the training loss with its parts by step, epoch and seconds, and what the evaluations recorded."""
    if run.result is not None and not run.folder.is_dir():
        return _curve_of_result(run.result.content.get("curve", {}))
    history = read_history(run.folder / runs.HISTORY)
    names = [*X_AND_LOSS, *history.parts]
    columns = np.array([[event[key] for key in names] for event in history.steps], np.float64).reshape(-1, len(names))
    stretches = np.array_split(columns, min(CURVE_POINTS, len(columns))) if len(columns) else []
    means = {name: [rounded(stretch[:, place].mean()) for stretch in stretches] for place, name in enumerate(names)}
    evaluations = thin_out(history.evaluations, CURVE_POINTS)
    recorded = {
        key: [rounded(event[key]) if is_number(event.get(key)) else None for event in evaluations]
        for key in (*BESIDE_SCORES, *SHOWN_SCORES)
        if key == "step" or any(is_number(event.get(key)) for event in evaluations)
    }
    parts = {name: means[name] for name in history.parts}
    return {**{name: means[name] for name in X_AND_LOSS}, "parts": parts, **_timed(means["epoch"], recorded)}


def _curve_of_result(curve: Mapping[str, Any]) -> ReportValues:
    """Return the curve of a result file, which has an entry per evaluation, also of the loss."""
    columns = {key: column for key, column in curve.items() if key not in ("loss", PARTS)}
    epochs = columns.get("epoch", []) if "loss" in curve else []
    loss: ReportValues = {"step": [], "epoch": epochs, "loss": curve.get("loss", []), "parts": curve.get(PARTS, {})}
    return {**loss, **_timed(epochs, columns)}


def _timed(epochs: Sequence[float], evaluations: ReportValues) -> ReportValues:
    """Return the evaluations, the seconds at some epochs, and those that each tenth of an epoch took, if known."""
    known = [
        (epoch, seconds)
        for epoch, seconds in zip(evaluations.get("epoch", ()), evaluations.get("seconds", ()), strict=False)
        if is_number(epoch) and is_number(seconds)
    ]
    if not known:
        return {"evaluations": evaluations}
    at, seconds = zip(*known, strict=True)
    tenths = seconds_per_tenth(at, seconds)
    return {
        "evaluations": evaluations,
        "seconds": [rounded(value) for value in np.interp(epochs, [0.0, *at], [0.0, *seconds])],
        **({"tenths": {"epoch": tenths[0], "seconds": list(map(rounded, tenths[1]))}} if tenths else {}),
    }
