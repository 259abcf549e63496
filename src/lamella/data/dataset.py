"""Examples fit to use: files read, checked, and refused, mended or left out as asked."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lamella.data.checks import check
from lamella.data.examples import Example
from lamella.data.fixes import leave_out, mend
from lamella.data.formats import DataFile, read
from lamella.data.problems import Problem
from lamella.errors import DataError
from lamella.garbage import nothing_collected


@dataclass(frozen=True)
class Loaded:
    """Examples fit to train on; `mended` counts problems, `skipped` counts questions that were left out."""

    examples: tuple[Example, ...]
    files: tuple[DataFile, ...]
    mended: int
    skipped: int


def load_examples(
    paths: Iterable[str | Path],
    *,
    on_bad_answer: Literal["refuse", "fix", "skip", "ignore"] = "refuse",
    labelled: bool = False,
) -> Loaded:
    """Read the examples of files; their errors are refused, mended, left out with their questions, or ignored.

    `labelled` refuses questions of which nobody says whether they have an answer: they can be answered, but neither
    learnt from nor scored.
    """
    with nothing_collected():
        return _load(paths, on_bad_answer, labelled)


def _load(paths: Iterable[str | Path], on_bad_answer: str, labelled: bool) -> Loaded:
    files = tuple(read(path) for path in dict.fromkeys(map(str, paths)))
    bare = [problem for file in files for problem in file.problems if problem.kind == "unlabelled" and labelled]
    if bare:
        raise DataError(f"{bare[0]}. Training and scoring need answers, or is_impossible where there is none.")
    if on_bad_answer == "ignore":
        return Loaded(tuple(itertools.chain(*(file.examples for file in files))), files, 0, _unread(files))
    report = check(files)
    if report.errors and on_bad_answer == "refuse":
        raise DataError(_refusal(report.errors))
    examples: list[Example] = []
    mended = skipped = 0
    for file in files:
        if on_bad_answer == "fix":
            kept, done, _ = mend(file, report.errors)
            mended += done
        else:
            kept = leave_out(file, report.errors)
        examples += kept
        skipped += len(file.examples) - len(kept)
    if not examples:
        names = ", ".join(file.path for file in files)
        raise DataError(f"{names}: no question is left to use; see what is wrong with: lamella check {names}")
    return Loaded(tuple(examples), files, mended, skipped + _unread(files))


def _unread(files: Iterable[DataFile]) -> int:
    return sum(file.unread for file in files)


def _refusal(errors: Sequence[Problem]) -> str:
    files = list(dict.fromkeys(problem.file for problem in errors))
    count = f"{len(errors)} error{'s' if len(errors) > 1 else ''}"
    return (
        f"{', '.join(files)}: {count}, the first: {errors[0]}. "
        f"See them all with: lamella check {' '.join(files)} (or pass --on-bad-answer fix|skip)."
    )
