"""The helpers that messages are made with."""

from __future__ import annotations

from lamella.errors import counted


def test_counted_uses_the_singular_for_one_only() -> None:
    assert [counted(number, "question") for number in (0, 1, 2)] == ["0 questions", "1 question", "2 questions"]
    assert counted(2_000, "pass", "passes") == "2,000 passes"
