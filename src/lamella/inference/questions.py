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
    """Answers go by the id of their question."""
    twice = [id for id, times in Counter(one.id for one in examples).items() if times > 1]
    if twice:
        raise DataError(
            f"question {twice[0]}: its id is given to several questions, so that answers would be lost; lamella check "
            "DATA --fix OUT gives each its own."
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
