"""Read the questions of a file, to answer or to score them."""

from __future__ import annotations

from collections.abc import Sequence

from lamella.data.dataset import Dataset, load_examples
from lamella.data.examples import Example
from lamella.data.file_formats.in_memory import is_in_memory
from lamella.errors import DataError, counted, shorten
from lamella.inference.question_ids import check_unique_ids
from lamella.progress import Log


def read_questions(data: str, *, labelled: bool = False, log: Log | None = None) -> Sequence[Example]:
    """Read the questions of a file; `labelled` requires true answers, to score against.

    The metric compares texts, so wrong answer offsets in the file do not matter. A blank question stays, since
    predictions must have all ids; `log` receives a line about such questions.
    """
    examples = _load(data, labelled).examples
    blank = {example.question_id: example for example in examples if not example.question.strip()}
    if blank and log is not None:
        first = shorten(next(iter(blank)))
        log(
            f"{data}: {counted(len(blank), 'question')} without text, the first: {first}; the predictions are arbitrary"
        )
    return examples


def read_any_questions(data: str) -> tuple[Sequence[Example], bool]:
    """Read the questions of a file; return them, and whether all have the true answers that scoring needs."""
    dataset = _load(data, labelled=False)
    return dataset.examples, all(problem.kind != "unlabelled" for file in dataset.files for problem in file.problems)


def check_all_read(dataset: Dataset) -> None:
    """Refuse data with questions that cannot be read: scores without them would look like scores of all."""
    for file in dataset.files:
        if file.unread:
            unread = f"{file.path}: {counted(file.unread, 'question')} cannot be read"
            if is_in_memory(file.path):
                errors = [problem for problem in file.problems if problem.severity == "error"]
                raise DataError(f"{unread}, the first: {errors[0]}." if errors else f"{unread}.")
            raise DataError(f"{unread}; see why with: lamella check {file.path}")


def _load(data: str, labelled: bool) -> Dataset:
    dataset = load_examples([data], on_bad_answer="ignore", labelled=labelled)
    check_all_read(dataset)
    if not dataset.examples:
        raise DataError(f"{data}: expected questions, found none; list its problems with: lamella check {data}")
    check_unique_ids(dataset.examples)
    return dataset
