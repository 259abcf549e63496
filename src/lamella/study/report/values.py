"""What the values of a report are: which scores, numbers of few digits, names without folders."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

SHOWN_SCORES = (
    "exact", "f1", "best_exact", "best_f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1", "pr_f1_ap",
    "answerability_accuracy", "answerability_f1", "ece", "threshold", "epoch",
)  # fmt: skip

Record = dict[str, Any]


def rounded(value: float, digits: int = 4) -> float:
    """Few enough digits that a hundred runs stay a small file."""
    return float(f"{float(value):.{digits + 2}g}")


def without_folders(name: str) -> str:
    """A report is shown to others, whom the folders of a machine do not concern; `demo:dev` stays what it is."""
    return PurePath(name).name or name
