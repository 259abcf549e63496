"""The values of a report: which scores it shows, rounding, and names without folders."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

SHOWN_SCORES = (
    "exact", "f1", "best_exact", "best_f1", "question_exact", "question_f1", "HasAns_exact", "HasAns_f1",
    "NoAns_exact", "NoAns_f1", "pr_f1_ap",
    "answerability_accuracy", "answerability_f1", "ece", "threshold", "epoch",
)  # fmt: skip

ReportValues = dict[str, Any]  # a JSON object inside the report


def rounded(value: float, digits: int = 4) -> float:
    """Round to few enough digits that the report of a hundred runs stays a small file."""
    return float(f"{float(value):.{digits + 2}g}")


def without_folders(name: str) -> str:
    """Return the file name alone: a report must not reveal the folders of a machine. `demo:dev` stays as it is."""
    return PurePath(name).name or name
