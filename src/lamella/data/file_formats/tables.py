"""Tables: CSV text, and the rows of a spreadsheet, a Parquet file or a DataFrame.

The cells of a table have fewer types than JSON values: an empty cell is an absent field, answers may be JSON in a cell,
and a number may be meant as text.
"""

from __future__ import annotations

import ast
import csv
import importlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lamella.data.file_formats.json_text import parse_json
from lamella.data.file_formats.source import Document, Place, Source
from lamella.errors import UnreadableError, one_line


def parse_csv(text: str, source: Source) -> Document | None:
    """Parse the rows under a header with question and context; None if there is no such header."""
    header_line = text.lstrip("\r\n").partition("\n")[0][:1000]
    for delimiter in (",", "\t", ";"):
        try:
            header = [cell.strip().lower() for cell in next(csv.reader([header_line], delimiter=delimiter))]
        except csv.Error:
            continue
        if "question" in header and "context" in header:
            break
    else:
        return None
    rows, lines = [], []
    cells = _csv_rows(text, delimiter)
    next(cells)
    for line, row in cells:
        if isinstance(row, list) and len(row) == len(header):
            rows.append(_typed_row(dict(zip(header, row, strict=True)), source, Place.at_line(line)))
            lines.append(line)
            continue
        fault = row if isinstance(row, str) else f"{len(row)} cells, but the header has {len(header)}"
        source.report("broken_csv_row", fault, Place.at_line(line))
        source.unread += 1
    return Document(rows, "csv", lines)


def table_document(rows: Iterable[Mapping[Any, Any]], source: Source) -> Document:
    """Return the document of rows that map column names to cells."""
    named = ({str(column).strip().lower(): cell for column, cell in row.items()} for row in rows)
    return Document([_typed_row(row, source, Place((number,))) for number, row in enumerate(named)])


def read_with_pandas(data: bytes, reader: str, libraries: str, path: str) -> list[dict[str, Any]]:
    """Read the rows of a binary table with `pandas.<reader>`; `libraries` are the packages it needs."""
    advice = f"install the libraries that read it (pip install {libraries}), or convert it to CSV or JSONL"
    options: dict[str, Any] = {"keep_default_na": False, "na_values": [""]} if reader == "read_excel" else {}
    try:
        pandas = importlib.import_module("pandas")
        frame = getattr(pandas, reader)(io.BytesIO(data), **options)  # the text `None` or `NA` is an answer
    except ImportError as error:
        raise UnreadableError(f"{path}: a binary table, but {one_line(error)}; {advice}.") from None
    except Exception as error:  # whatever a library raises for a damaged file
        raise UnreadableError(f"{path}: pandas cannot read this file ({one_line(error)}).") from None
    rows: list[dict[str, Any]] = frame.to_dict(orient="records")
    return rows


def _csv_rows(text: str, delimiter: str) -> Iterator[tuple[int, list[str] | str]]:
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
    for key in {"id", "title"} & typed.keys():  # pandas reads a column of digits as numbers
        if type(typed[key]) is int or (isinstance(typed[key], float) and typed[key].is_integer()):
            typed[key] = str(int(typed[key]))
    if "is_impossible" in typed:
        cell = typed["is_impossible"]
        word = str(int(cell)) if isinstance(cell, int | float) and cell in (0, 1) else str(cell)
        typed["is_impossible"] = _TRUTH.get(word.strip().lower(), cell)
    for key in {"answers", "plausible_answers"} & row.keys():
        typed[key] = [] if _is_empty(row[key]) else _read_answers(row[key], source, place.at(key))
    return typed


def _is_empty(cell: Any) -> bool:
    return cell is None or (isinstance(cell, str) and not cell.strip())


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
