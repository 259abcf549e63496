"""The learning curve of a run: what its history recorded, reduced to a few points that a result file can keep."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lamella import runs
from lamella.errors import UnreadableError
from lamella.files import read_text
from lamella.study.records import is_number, read_json_object
from lamella.study.result_files import check_layers

POINTS = 60  # of a curve in a result file
NOT_PARTS = ("event", "step", "epoch", "loss", "learning_rate")  # the other numbers of a step are parts of the loss
PARTS = "parts"
SCORES = ("exact", "f1", "question_exact", "question_f1", "answerability_accuracy", "answerability_f1")
DECIMALS = {"epoch": 4, "seconds": 2, **dict.fromkeys(SCORES, 2)}
MAX_TENTH = 0.11  # an evaluation is due after whole steps, so not exactly after a tenth
SIGNIFICANT = 5  # digits of a loss; a distillation loss may be tiny

Event = Mapping[str, Any]


@dataclass
class History:
    """The records of a run's history: optimiser steps with their losses, and evaluations."""

    steps: list[Event] = field(default_factory=list)
    evaluations: list[Event] = field(default_factory=list)

    @property
    def parts(self) -> list[str]:
        """The names of the parts of the loss, such as `start` and `distillation`."""
        first = self.steps[0] if self.steps else {}
        return [key for key, value in first.items() if key not in NOT_PARTS and is_number(value)]


def read_history(path: Path) -> History:
    """Read a history file; one that does not exist is empty."""
    history = History()
    for number, line in enumerate(read_text(path).splitlines() if path.is_file() else (), start=1):
        try:
            event = json.loads(line)
            if event.get("event") == "step" and is_number(event.get("loss")):
                if not all(is_number(event[key]) for key in ("step", "epoch", *history.parts)):
                    raise ValueError
                history.steps.append(event)
            elif event.get("event") == "evaluation":
                if not is_number(event.get("step") or 0):
                    raise ValueError
                history.evaluations.append(event)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            raise UnreadableError(f"{path}:{number}: expected one JSON object per line; the file is damaged.") from None
    return history


def compact_curve(path: Path) -> dict[str, Any]:
    """Return the curve of a history file as columns, with an entry per evaluation; {} without evaluations.

    `loss` and its `parts` are means over the steps since the entry before. What a run did not record is left out.
    """
    history = read_history(path)
    evaluations = thin_out(history.evaluations, POINTS)
    if not evaluations:
        return {}
    ends = [event.get("step") or 0 for event in evaluations]
    of_steps = np.searchsorted(ends, [event["step"] for event in history.steps])
    columns: dict[str, Any] = {}
    for key in ("epoch", "seconds", "dev_loss", *SCORES):
        if any(is_number(event.get(key)) for event in evaluations):
            columns[key] = [_rounded(key, event.get(key)) for event in evaluations]
    for key in ("loss", *history.parts):
        sums = np.zeros(len(ends) + 1)
        np.add.at(sums, of_steps, [event[key] for event in history.steps])
        counts = np.bincount(of_steps, minlength=len(ends) + 1)
        means = [_rounded(key, total / count) if count else None for total, count in zip(sums, counts, strict=True)]
        (columns if key == "loss" else columns.setdefault(PARTS, {}))[key] = means[:-1]  # steps after the last
    return columns


def seconds_per_tenth(epochs: Sequence[float], seconds: Sequence[float]) -> tuple[list[float], list[float]] | None:
    """Return the tenths of an epoch, and how long each took; None if evaluations lie further apart."""
    if len(epochs) < 2 or np.diff(epochs, prepend=0.0).max() > MAX_TENTH:
        return None
    tenths = np.arange(1, round(10 * epochs[-1]) + 1) / 10
    at = np.interp([0.0, *tenths], [0.0, *epochs], [0.0, *seconds])
    return tenths.tolist(), np.diff(at).tolist()


def thin_out(events: Sequence[Event], limit: int) -> list[Event]:
    """Return at most `limit` events at even distances, including the first and the last."""
    if len(events) <= limit:
        return list(events)
    return [events[round(index)] for index in np.linspace(0, len(events) - 1, limit)]


def _rounded(key: str, value: Any) -> float | None:
    if not is_number(value):
        return None
    return round(float(value), DECIMALS[key]) if key in DECIMALS else float(f"{float(value):.{SIGNIFICANT}g}")


def read_layers(folder: Path) -> dict[str, Any]:
    """Read the mean weights of the layers that a run recorded; empty if it recorded none."""
    layers = read_json_object(folder / runs.LAYERS)
    try:
        if layers:
            check_layers(layers)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UnreadableError(
            f"{folder / runs.LAYERS}: expected a weight for every layer; the file is damaged."
        ) from None
    return layers
