"""Load checked examples from files: refuse errors, fix them, or skip the faulty questions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lamella.data.checks import check
from lamella.data.examples import Example
from lamella.data.fixes import fix, skip_faulty
from lamella.data.formats import DataFile, read
from lamella.data.problems import Problem
from lamella.errors import DataError
from lamella.garbage import paused_garbage_collection


@dataclass(frozen=True)
class Dataset:
    """Checked examples; `fixed` counts the fixed problems, `skipped` the questions that were dropped."""

    examples: tuple[Example, ...]
    files: tuple[DataFile, ...]
    fixed: int
    skipped: int


def load_examples(
    paths: Iterable[str | Path],
    *,
    on_bad_answer: Literal["refuse", "fix", "skip", "ignore"] = "refuse",
    labelled: bool = False,
) -> Dataset:
    """Read and check the examples of some files.

    `on_bad_answer` decides about errors: refuse the files, fix what can be fixed, skip the questions concerned, or
    ignore the errors. `labelled` refuses questions without any label (answers or `is_impossible`): they can be
    answered, but not trained on or scored.
    """
    with paused_garbage_collection():
        return _load(paths, on_bad_answer, labelled)


def _load(paths: Iterable[str | Path], on_bad_answer: str, labelled: bool) -> Dataset:
    files = tuple(read(path) for path in dict.fromkeys(map(str, paths)))
    unlabelled = [problem for file in files for problem in file.problems if problem.kind == "unlabelled"]
    if labelled and unlabelled:
        raise DataError(f"{unlabelled[0]}. Training and scoring need answers, or is_impossible = true for no answer.")
    if on_bad_answer == "ignore":
        return Dataset(tuple(itertools.chain(*(file.examples for file in files))), files, 0, _unread(files))
    report = check(files)
    if report.errors and on_bad_answer == "refuse":
        raise DataError(_refusal(report.errors))
    examples: list[Example] = []
    fixed = skipped = 0
    for file in files:
        if on_bad_answer == "fix":
            usable, count, _ = fix(file, report.errors)
            fixed += count
        else:
            usable = skip_faulty(file, report.errors)
        examples += usable
        skipped += len(file.examples) - len(usable)
    if not examples:
        names = ", ".join(file.path for file in files)
        raise DataError(f"{names}: no usable question is left; list the problems with: lamella check {names}")
    return Dataset(tuple(examples), files, fixed, skipped + _unread(files))


def _unread(files: Iterable[DataFile]) -> int:
    return sum(file.unread for file in files)


def _refusal(errors: Sequence[Problem]) -> str:
    files = list(dict.fromkeys(problem.file for problem in errors))
    count = f"{len(errors)} error{'s' if len(errors) > 1 else ''}"
    return (
        f"{', '.join(files)}: {count}, the first: {errors[0]}. "
        f"List all with: lamella check {' '.join(files)} (or pass --on-bad-answer fix|skip)."
    )
