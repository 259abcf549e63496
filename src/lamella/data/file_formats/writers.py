"""Write examples as data files, atomically."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lamella.data.examples import Answer, Context, Example
from lamella.errors import DataError, UsageError
from lamella.files import write_bytes
from lamella.registry import part, register

SUFFIXES = {".json": "squad", ".jsonl": "flat"}


def write(examples: Iterable[Example], path: str | Path, format: str | None = None) -> None:
    """Write examples in a format; by default, `.json` is squad, `.jsonl` is flat, and `.gz` after it compresses."""
    part("writer", format or checked_format(path)).make(examples, path)


def checked_format(path: str | Path) -> str:
    """Return the format for the suffix of a file name; a name without one is an error."""
    chosen = format_of(Path(path))
    if chosen is None:
        known = " or ".join(f"{suffix}[.gz] ({name})" for suffix, name in SUFFIXES.items())
        raise UsageError(f"{path}: expected a file name that ends in {known}; choose such a name or pass the format.")
    return chosen


@register("writer", "squad")
def write_squad(examples: Iterable[Example], path: str | Path, *, version: str = "v2.0") -> None:
    """Write SQuAD 2.0: questions under their contexts, contexts under their titles, in order of first appearance.

    Contexts are compared as objects: a paragraph that a file had twice is written twice. The only addition to the
    format is `group`, for questions about several contexts.
    """
    articles: dict[str, dict[Context, list[dict[str, Any]]]] = {}
    for example in examples:
        paragraphs = articles.setdefault(example.context.title, {})
        paragraphs.setdefault(example.context, []).append(_question(example))
    data = [
        {"title": title, "paragraphs": [{"context": context.text, "qas": qas} for context, qas in paragraphs.items()]}
        for title, paragraphs in articles.items()
    ]
    _write(path, [{"version": version, "data": data}])


@register("writer", "flat")
def write_flat(examples: Iterable[Example], path: str | Path) -> None:
    """Write flat JSONL: one line per example with id, title, context, question and answers."""
    _write(path, [_row(example, example.context) for example in examples])


def write_submission(answers: Mapping[str, str], path: Path) -> None:
    """Write answers for Stanford's CS224n leaderboard: CSV with `Id,Predicted`, sorted by id, empty for no answer."""
    text = io.StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow(["Id", "Predicted"])
    rows.writerows(sorted(answers.items()))
    write_bytes(path, _encoded(text.getvalue(), path))


def format_of(path: Path) -> str | None:
    """Return the format for the suffix of a file name, if any."""
    suffix = path.with_suffix("").suffix if path.suffix.lower() == ".gz" else path.suffix
    return SUFFIXES.get(suffix.lower())


def _row(example: Example, context: Context) -> dict[str, Any]:
    question = _question(example)
    return {"id": question.pop("id"), "title": context.title, "context": context.text, **question}


def _question(example: Example) -> dict[str, Any]:
    question: dict[str, Any] = {
        "id": example.id,
        "question": example.question,
        "answers": _answers(example.answers),
        "is_impossible": not example.answerable,
    }
    if example.plausible_answers:
        question["plausible_answers"] = _answers(example.plausible_answers)
    if example.group is not None:
        question["group"] = example.group
    return question


def _answers(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    return [{"text": answer.text, "answer_start": answer.begin_char} for answer in answers]


def _write(path: str | Path, lines: Sequence[dict[str, Any]]) -> None:
    path = Path(path)
    data = _encoded("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), path)
    if path.suffix.lower() == ".gz":
        data = gzip.compress(data, mtime=0)  # equal examples make equal files
    write_bytes(path, data)


def _encoded(text: str, path: Path) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise DataError(f"{path}: not written: a text contains {half}, half of a surrogate pair; replace it.") from None
