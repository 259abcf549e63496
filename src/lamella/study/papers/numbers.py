"""Numbers of a page as text: with a real minus sign, and a dash where there is none."""

from __future__ import annotations

from lamella.scoring.significance import Difference
from lamella.study.report.columns import NOTHING


def decimal(value: float | None, digits: int = 2) -> str:
    """Return a score, or a loss, with this many decimals."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def count(value: float | None) -> str:
    """Return a whole number."""
    return NOTHING if value is None else f"{value:,.0f}"


def signed(value: float | None) -> str:
    """Return a difference with its sign."""
    return NOTHING if value is None else f"{value:+.2f}".replace("-", "−")


def interval_text(difference: Difference, digits: int = 1) -> str:
    """Return an interval in brackets."""
    return f"[{difference.low:.{digits}f}, {difference.high:.{digits}f}]".replace("-", "−")
