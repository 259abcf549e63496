"""Check that the ids of questions identify them; apart from `questions`, which imports the parsers of data files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lamella.data.examples import Example
from lamella.errors import DataError


def check_unique_ids(examples: Sequence[Example]) -> None:
    """Refuse ids that several questions share: predictions are written by id, so only one answer would remain."""
    repeated = [id for id, times in Counter(example.id for example in examples).items() if times > 1]
    questions: dict[str, str] = {}  # a question about several contexts is one question under one id
    repeated += [
        example.question_id
        for example in examples
        if questions.setdefault(example.question_id, example.question) != example.question
    ]
    if repeated:
        raise DataError(
            f"question id {repeated[0]!r}: expected one question, got several, and predictions can hold only one "
            "answer per id; write a copy with unique ids: lamella check DATA --fix-to OUT."
        )
