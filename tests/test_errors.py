"""The helpers that messages are made with."""

from __future__ import annotations

from lamella.errors import counted, shorten


def test_counted_uses_the_singular_for_one_only() -> None:
    assert [counted(number, "question") for number in (0, 1, 2)] == ["0 questions", "1 question", "2 questions"]
    assert counted(2_000, "pass", "passes") == "2,000 passes"


def test_shorten_shows_the_beginning_of_a_long_value() -> None:
    assert shorten("short") == "'short'"
    assert shorten(10**308, limit=10) == "1000000000…"
    assert shorten(["x" * 1000], limit=5) == "['xxx…"
    assert shorten(10**5000) == "a number of thousands of digits"
