"""Numbers as the page shows them."""

from __future__ import annotations


def amount(value: float, unit: str) -> str:
    return f"{digits(1000 * value)} ms" if unit == "s" and value < 1 else f"{digits(value)} {unit}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.2g} %"


def missed(found: float, goal: float) -> str:
    """Return by how much a goal is missed."""
    return f"missed by {percent(abs(found / goal - 1))}"


def digits(value: float) -> str:
    """Return a number with three significant digits."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
