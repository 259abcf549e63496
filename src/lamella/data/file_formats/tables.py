"""Tables: CSV text, and the rows of a spreadsheet, a Parquet file or a DataFrame.

The cells of a table have fewer types than JSON values: an empty cell is an absent field, answers may be JSON in a cell,
and a number may be meant as text.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lamella.data.doctor.problems import quote
from lamella.data.file_formats.json_text import parse_json
from lamella.data.file_formats.source import Document, Place, Source
from lamella.errors import UnreadableError, counted

DELIMITERS = (",", "\t", ";")
LONGEST_HEADER = 1000  # characters
NEEDED_COLUMNS = frozenset({"question", "context"})
PREDICTION_COLUMNS = frozenset({"id", "predicted"})  # of a submission, see `lamella predict --submission`
_ANSWER_COLUMNS = frozenset({"answers", "answer", "plausible_answers", "answer_text"})
COLUMNS = NEEDED_COLUMNS | PREDICTION_COLUMNS | _ANSWER_COLUMNS | {"answer_start", "title", "is_impossible", "group"}


def parse_csv(text: str, source: Source) -> Document | None:
    """Parse the rows under a header with question and context; None if there is no such header."""
    delimiter, header = split_header(text)
    if not set(header) >= NEEDED_COLUMNS:
        return None
    repeated = [name for name in header if name in COLUMNS and header.count(name) > 1]
    if repeated:
        raise UnreadableError(
            f"{source.path}:1: expected every column once, got {quote(repeated[0])} {header.count(repeated[0])} times; "
            "rename or remove the others."
        )
    rows, lines = [], []
    cells = csv_rows(text, delimiter)
    next(cells)
    for line, row in cells:
        if isinstance(row, list) and len(row) == len(header):
            rows.append(_typed_row(dict(zip(header, row, strict=True)), source, Place.at_line(line)))
            lines.append(line)
            continue
        fault = row if isinstance(row, str) else f"{counted(len(row), 'cell')}, but the header has {len(header)}"
        source.report("broken_csv_row", fault, Place.at_line(line))
        source.unread += 1
    return Document(rows, "csv", lines)


def split_header(text: str) -> tuple[str, list[str]]:
    """Return the delimiter of a CSV text and its column names in lower case; without known columns, as with commas."""
    first_line = re.split(r"[\r\n]", text.lstrip("\ufeff\r\n"), maxsplit=1)[0][:LONGEST_HEADER]
    headers = {}
    for delimiter in DELIMITERS:
        try:
            headers[delimiter] = [cell.strip().lower() for cell in next(csv.reader([first_line], delimiter=delimiter))]
        except (csv.Error, StopIteration):
            headers[delimiter] = []
    best = max(DELIMITERS, key=lambda delimiter: len(COLUMNS.intersection(headers[delimiter])))
    return best, headers[best]


def table_document(rows: Iterable[Mapping[Any, Any]], source: Source) -> Document:
    """Return the document of rows that map column names to cells."""
    named = ({str(column).strip().lower(): cell for column, cell in row.items()} for row in rows)
    return Document([_typed_row(row, source, Place((number,))) for number, row in enumerate(named)])


def csv_rows(text: str, delimiter: str) -> Iterator[tuple[int, list[str] | str]]:
    """Yield the first line and the cells of each row that is not blank; a text instead of cells describes a fault."""
    limit = csv.field_size_limit(len(text) + 1)  # a context may be longer than the 128 KiB that csv allows
    try:
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        while True:
            line = rows.line_num + 1
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield line, f"broken quotes ({error})"
                continue
            if any(cell.strip() for cell in row):
                yield line, row
    finally:
        csv.field_size_limit(limit)


_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def _typed_row(row: Mapping[str, Any], source: Source, place: Place) -> dict[str, Any]:
    """Return the JSON object that a row of cells represents."""
    typed = {key: cell for key, cell in row.items() if not _is_empty(cell) or key in ("question", "context")}
    for key in (
        {"id", "title", "group"} | _ANSWER_COLUMNS
    ) & typed.keys():  # pandas reads a column of digits as numbers
        if _is_whole(typed[key]):
            typed[key] = str(int(typed[key]))
    if "answer_start" in typed:
        typed["answer_start"] = _read_start(typed["answer_start"], source, place.at("answer_start"))
    if "is_impossible" in typed:
        cell = typed["is_impossible"]
        word = str(int(cell)) if isinstance(cell, int | float) and cell in (0, 1) else str(cell)
        typed["is_impossible"] = _TRUTH.get(word.strip().lower(), cell)
    for key in _ANSWER_COLUMNS & typed.keys() - {"answer_text"}:
        typed[key] = _read_answers(typed[key], source, place.at(key))
    # Without an answer in any column, the question has none; an empty cell beside an answer means nothing.
    labels = _ANSWER_COLUMNS - {"plausible_answers"}
    if not labels & typed.keys():
        typed |= {key: [] for key in labels & row.keys()}
    return typed


def _is_empty(cell: Any) -> bool:
    return cell is None or (isinstance(cell, str) and not cell.strip())


def _is_whole(cell: Any) -> bool:
    return type(cell) is int or (isinstance(cell, float) and cell.is_integer())


def _read_start(cell: Any, source: Source, place: Place) -> Any:
    """Return the offset in a cell, or a list of them; a cell that holds neither stays as it is."""
    if isinstance(cell, str) and re.fullmatch(r"\s*-?[0-9]{1,18}(\.0*)?\s*", cell):  # pandas writes 12 as 12.0
        return int(cell.partition(".")[0])
    return int(cell) if _is_whole(cell) else _read_answers(cell, source, place)


def _read_answers(cell: Any, source: Source, place: Place) -> Any:
    """Return the answers in a cell: JSON, a Python literal (a list or dict as pandas writes it), or a plain text."""
    if not isinstance(cell, str) or not cell.lstrip().startswith(("[", "{")):
        return cell
    try:
        return parse_json(cell, source, place)
    except (ValueError, RecursionError):
        pass
    if not re.match(r"\s*\[?\{'", cell):
        return cell
    try:
        return parse_json(json.dumps(ast.literal_eval(cell.strip())), source, place)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return cell
