"""Read the files that `lamella evaluate` scores: predictions, null odds and no-answer probabilities by question id."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lamella.data.file_formats.tables import csv_rows, split_header
from lamella.errors import UnreadableError, counted, shorten
from lamella.files import read_json, read_text
from lamella.runs import PREDICTIONS

_ID = "id"
_TEXTS = ("predicted", "prediction", "prediction_text", "answer")  # columns that may hold the predicted texts


def read_predictions(path: Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """Read predicted texts: a JSON object {id: text}, or CSV with the columns Id and Predicted as in a submission.

    This and the other functions return the content of a file as it is, if they are given that.
    """
    if isinstance(path, Mapping):
        return path
    if path.is_dir():
        advice = f"give {path / PREDICTIONS}" if (path / PREDICTIONS).is_file() else f"a run holds it as {PREDICTIONS}"
        raise UnreadableError(f"{path}: expected a predictions file, got a folder; {advice}.")
    text = read_text(path)
    if not text.strip() or text.lstrip().startswith(("{", "[")):
        return _read_object(path)
    delimiter, header = split_header(text)
    column = next((name for name in _TEXTS if name in header), None)
    if _ID not in header or column is None:
        raise UnreadableError(
            f"{path}: expected a JSON object {{question id: text}}, or CSV with the columns Id and Predicted, got text "
            f"that begins with {shorten(text.strip(), 40)}."
        )
    return _read_columns(text, path, delimiter, header, column)


def read_null_odds(path: Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """Read null odds, a JSON object {id: number}."""
    return _read_object(path)


def read_na_prob(path: Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """Read probabilities of "no answer", a JSON object {id: number from 0 to 1}."""
    probabilities = _read_object(path)
    name = "na_prob" if isinstance(path, Mapping) else path
    for id, value in probabilities.items():
        if isinstance(value, int | float) and not 0 <= value <= 1:
            raise UnreadableError(
                f"{name}: question {shorten(id)}: expected a probability from 0 to 1, got {shorten(value)}; pass null "
                "odds with --null-odds."
            )
    return probabilities


def _read_object(path: Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(path, Mapping):
        return path
    scores = read_json(path, unique_keys=True)
    if not isinstance(scores, dict):
        raise UnreadableError(f"{path}: expected a JSON object {{question id: value}}, got {shorten(scores, 40)}.")
    if isinstance(scores.get("data"), list):
        raise UnreadableError(f"{path}: expected a JSON object {{question id: value}}, got a data file with questions.")
    return scores


def _read_columns(text: str, path: Path, delimiter: str, header: list[str], column: str) -> dict[str, Any]:
    predictions: dict[str, Any] = {}
    rows = csv_rows(text, delimiter)
    next(rows)
    for line, row in rows:
        if isinstance(row, str) or len(row) != len(header):
            found = (
                row if isinstance(row, str) else f"{counted(len(row), 'cell')}; quote texts that contain {delimiter!r}"
            )
            raise UnreadableError(
                f"{path}:{line}: expected {counted(len(header), 'cell')} as in the header, got {found}."
            )
        id = row[header.index(_ID)]
        if id in predictions:
            raise UnreadableError(f"{path}:{line}: expected every id once, got {shorten(id)} more than once.")
        predictions[id] = row[header.index(column)]
    return predictions
