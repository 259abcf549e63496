"""Check the arguments of calls from Python; each error names the argument, and what was expected and found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

from lamella.errors import UsageError, shorten


def as_list(name: str, value: Any) -> list[Any]:
    """Return a list of any iterable, except a mapping (it would give its keys) and bytes (numbers)."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise UsageError(f"{name}: expected a text or a list of texts, got {describe(value)}.")
    return list(value)


def check_text(name: str, value: Any) -> str:
    """Check that a value is a text."""
    if not isinstance(value, str):
        raise UsageError(f"{name}: expected a text, got {describe(value)}.")
    return value


def check_positive(name: str, value: Any) -> int:
    """Check that a value is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise UsageError(f"{name}: expected a whole number of at least 1, got {shorten(value)}.")
    return int(value)


def describe(value: Any) -> str:
    """Describe a wrong value in an error message: by its type, or by the keys of a mapping."""
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(map(str, value)) or 'no keys'}"
    return "nothing" if value is None else type(value).__name__
