"""Questions to answer or to score, read from a file and checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lamella.data.dataset import Dataset, load_examples
from lamella.data.examples import Example
from lamella.errors import DataError


def read_questions(data: str, *, labelled: bool = False) -> Sequence[Example]:
    """The questions of a file, to be answered or, if `labelled`, scored.

    The metric compares texts, so it is all the same where an answer is said to lie.
    """
    return _load(data, labelled).examples


def read_any_questions(data: str) -> tuple[Sequence[Example], bool]:
    """The questions of a file, and whether they can be scored."""
    loaded = _load(data, labelled=False)
    return loaded.examples, all(problem.kind != "unlabelled" for file in loaded.files for problem in file.problems)


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
            "answer per id; write a copy with unique ids: lamella check DATA --fix OUT."
        )


def _load(data: str, labelled: bool) -> Dataset:
    from lamella.inference.questions import check_unique_ids

    loaded = load_examples([data], on_bad_answer="ignore", labelled=labelled)
    if loaded.skipped:
        raise DataError(f"{data}: {loaded.skipped} questions cannot be read; see them with: lamella check {data}")
    if not loaded.examples:
        raise DataError(f"{data}: expected questions. Found none.")
    check_unique_ids(loaded.examples)
    return loaded
