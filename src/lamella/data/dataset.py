"""Load checked examples from files or from memory: refuse errors, fix them, or skip the faulty questions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from lamella.data.doctor.checks import check
from lamella.data.doctor.fixes import fix, skip_faulty
from lamella.data.doctor.problems import Problem
from lamella.data.examples import Example
from lamella.data.file_formats.formats import DataFile, read, read_records
from lamella.data.file_formats.in_memory import Data, default_name, is_in_memory, split_paths
from lamella.errors import DataError, UnknownNameError, counted
from lamella.garbage import paused_garbage_collection

OnBadAnswer = Literal["refuse", "fix", "skip", "ignore"]


@dataclass(frozen=True)
class Dataset:
    """Checked examples; `fixed` counts the fixed problems, `skipped` the questions that were dropped.

    `warnings` counts the warnings of the check; with `on_bad_answer="ignore"` there is no check.
    """

    examples: tuple[Example, ...]
    files: tuple[DataFile, ...]
    fixed: int
    skipped: int
    warnings: int = 0
    sizes: tuple[int, ...] = ()  # how many of the examples each file gave

    def __repr__(self) -> str:
        """Return the counts, and not all the texts."""
        names = ", ".join(file.path for file in self.files)
        return f"<Dataset of {names}: {len(self.examples):,} examples, {self.fixed} fixed, {self.skipped} skipped>"

    def by_file(self) -> list[tuple[Example, ...]]:
        """Return the examples of each file."""
        ends = itertools.accumulate(self.sizes)
        return [self.examples[end - size : end] for end, size in zip(ends, self.sizes, strict=True)]

    def first_questions(self, count: int | None) -> Dataset:
        """Return the data set with the first questions only, each with all its contexts."""
        if count is None:
            return self
        chosen = set(itertools.islice(dict.fromkeys(example.question_id for example in self.examples), count))
        return self.choose(lambda examples: [example for example in examples if example.question_id in chosen])

    def choose(self, chosen: Callable[[Sequence[Example]], Sequence[Example]]) -> Dataset:
        """Return the data set with the examples that a function chooses of each file."""
        parts = [chosen(examples) for examples in self.by_file()]
        return replace(self, examples=tuple(itertools.chain(*parts)), sizes=tuple(map(len, parts)))


def load_examples(
    data: Data,
    *,
    on_bad_answer: OnBadAnswer = "refuse",
    labelled: bool = False,
    name: str | None = None,
    encoding: str | None = None,
) -> Dataset:
    """Load and check examples.

    `data` is a path or several, a list of dictionaries (rows of the flat format), a nested SQuAD dictionary, a pandas
    DataFrame, or a Hugging Face data set. Data in memory is checked like a file; messages call it `name`, by default
    `<records>` or its type, such as `<DataFrame>`.

    `on_bad_answer` decides about errors: refuse the data, fix what can be fixed, skip the questions concerned, or
    ignore the errors. `labelled` refuses questions without any label (answers or `is_impossible`): they can be
    answered, but not trained on or scored. `encoding` is the encoding of text files that are not Unicode.

    >>> context = "Huygens discovered Titan in 1655."
    >>> rows = [{"id": "t1", "question": "Who discovered Titan?", "context": context, "answers": ["Huygens"]}]
    >>> load_examples(rows).examples[0].answers
    (Answer(text='Huygens', begin_char=0),)
    """
    if on_bad_answer not in get_args(OnBadAnswer):
        raise UnknownNameError("on_bad_answer", on_bad_answer, get_args(OnBadAnswer))
    with paused_garbage_collection():
        return _check(_read(data, name, encoding), on_bad_answer, labelled)


def _read(data: Data, name: str | None, encoding: str | None) -> tuple[DataFile, ...]:
    paths, records = split_paths(data)
    if records is not None:
        return (read_records(records, name or default_name(data)),)
    return tuple(read(path, encoding=encoding) for path in dict.fromkeys(map(str, paths)))


def _check(files: tuple[DataFile, ...], on_bad_answer: str, labelled: bool) -> Dataset:
    unlabelled = [problem for file in files for problem in file.problems if problem.kind == "unlabelled"]
    if labelled and unlabelled:
        raise DataError(
            f"{unlabelled[0].place}: expected answers to train or score on, or is_impossible = true for no answer, "
            "found neither; `lamella predict` needs none."
        )
    unread = sum(file.unread for file in files)
    if on_bad_answer == "ignore":
        everything = tuple(itertools.chain(*(file.examples for file in files)))
        return Dataset(everything, files, 0, unread, sizes=tuple(len(file.examples) for file in files))
    report = check(files)
    if report.errors and on_bad_answer == "refuse":
        raise DataError(_refusal(report.errors))
    examples: list[Example] = []
    sizes: list[int] = []
    fixed = skipped = 0
    for file in files:
        if on_bad_answer == "fix":
            usable, fixes, _ = fix(file, report.errors)
            fixed += fixes
        else:
            usable = skip_faulty(file, report.errors)
        examples += usable
        sizes.append(len(usable))
        skipped += len(file.examples) - len(usable)
    if not examples:
        names = [file.path for file in files]
        advice = f"; {_list_command(names)}" if _list_command(names) else ""
        raise DataError(f"{', '.join(names)}: no usable question is left{advice}.")
    return Dataset(tuple(examples), files, fixed, skipped + unread, len(report.warnings), tuple(sizes))


def _refusal(errors: Sequence[Problem]) -> str:
    names = list(dict.fromkeys(problem.file for problem in errors))
    command = _list_command(names)
    choice = "set on_bad_answer to fix or skip"
    advice = f"{command}, or {choice} (--on-bad-answer on the command line)" if command else choice
    return (
        f"{', '.join(names)}: {counted(len(errors), 'error')}, the first: {errors[0]}. {advice[0].upper()}{advice[1:]}."
    )


def _list_command(names: Iterable[str]) -> str:
    """Return how to list all problems of files; nothing for data in memory."""
    files = [name for name in names if not is_in_memory(name)]
    return f"list all problems with: lamella check {' '.join(files)}" if files else ""
