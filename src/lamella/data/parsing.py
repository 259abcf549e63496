"""A file parsed into a document, before its format is known: gzip or not, JSON, JSONL or CSV.

All of it is told from the content. What the parsers would pass over in silence (repeated keys, NaN, halves of surrogate
pairs, broken lines) is reported, and what no later step could handle is replaced.
"""

from __future__ import annotations

import ast
import csv
import gzip
import hashlib
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lamella.data.demo import data_path
from lamella.data.problems import quote
from lamella.data.source import Document, Place, Source
from lamella.errors import UnreadableError


def parse(source: Source) -> Document:
    """Parse the file of a source; raises UnreadableError when nothing of it can be read."""
    text = _decode(_load(data_path(source.path), source), source.path)
    if text.lstrip()[:1] not in ("{", "["):
        document = _parse_csv(text, source)
        if document is not None:
            return document
    try:
        return Document(_parse_json(text, source, Place()))
    except json.JSONDecodeError as error:
        document = _parse_lines(text, source) if _looks_like_lines(text) else None
        if document is not None and document.entries:
            return document
        where = f"{source.path}:{error.lineno}:{error.colno}"
        raise UnreadableError(f"{where}: broken JSON: {error.msg}.") from None
    except (RecursionError, ValueError) as error:  # ValueError: an integer of thousands of digits
        raise UnreadableError(f"{source.path}: JSON that cannot be read ({error}).") from None


def _load(path: Path, source: Source) -> bytes:
    """The bytes of a file, unpacked when they are gzip; the source is told what was read."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UnreadableError(f"{path}: no such file.") from None
    except IsADirectoryError:
        raise UnreadableError(f"{path}: expected a data file, found a folder.") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UnreadableError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}).") from None
    source.size, source.sha256 = len(data), hashlib.sha256(data).hexdigest()
    if not data.startswith(b"\x1f\x8b"):
        return data
    try:
        return gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UnreadableError(f"{path}: a gzip file that is cut off or damaged ({error}).") from None


def _decode(data: bytes, path: str) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UnreadableError(f"{path}: expected UTF-8 text, found UTF-16; save it as UTF-8.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at position {error.start}"
        raise UnreadableError(f"{path}: expected UTF-8 text; {found} is not.") from None
    if not text.strip():
        raise UnreadableError(f"{path}: is empty.")
    return text


def _looks_like_lines(text: str) -> bool:
    """Whether most lines begin with a bracket, as in JSONL; of indented JSON only the first one does."""
    lines = [line for line in text.split("\n") if line.strip()]
    return len(lines) > 1 and 2 * sum(line.startswith(("{", "[")) for line in lines) > len(lines)


def _parse_lines(text: str, source: Source) -> Document:
    rows, lines = [], []
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: U+2028 may stand in a string
        if not line.strip():
            continue
        place = Place.at_line(number)
        try:
            rows.append(_parse_json(line, source, place))
            lines.append(number)
        except json.JSONDecodeError as error:
            source.report("broken_line", f"broken JSON: {error.msg}", place, column=error.colno)
            source.unread += 1
        except (RecursionError, ValueError) as error:
            source.report("broken_line", f"JSON that cannot be read ({error})", place)
            source.unread += 1
    return Document(rows, "jsonl", lines)


def _parse_csv(text: str, source: Source) -> Document | None:
    """The rows under a header with question and context; None when there is no such header."""
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
            rows.append(_typed_cells(dict(zip(header, row, strict=True)), source, line))
            lines.append(line)
            continue
        fault = row if isinstance(row, str) else f"{len(row)} cells, but the header has {len(header)}"
        source.report("broken_csv_row", fault, Place.at_line(line))
        source.unread += 1
    return Document(rows, "csv", lines)


def _csv_rows(text: str, delimiter: str) -> Iterator[tuple[int, list[str] | str]]:
    """Each row that is not blank with the line it begins on; the fault in words where it cannot be taken apart."""
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


def _typed_cells(row: dict[str, str], source: Source, line: int) -> dict[str, Any]:
    """A CSV row as the JSON row that it stands for: an empty cell is an absent field."""
    typed: dict[str, Any] = {key: cell for key, cell in row.items() if cell.strip() or key in ("question", "context")}
    if "is_impossible" in typed:
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        typed["is_impossible"] = words.get(typed["is_impossible"].strip().lower(), typed["is_impossible"])
    for key in {"answers", "plausible_answers"} & row.keys():
        typed[key] = _answers_cell(row[key], source, Place.at_line(line).at(key)) if row[key].strip() else []
    return typed


def _answers_cell(cell: str, source: Source, place: Place) -> Any:
    """The answers in a cell: JSON, a Python literal (a list or dict as pandas writes it), or a plain text."""
    if not cell.lstrip().startswith(("[", "{")):
        return cell
    try:
        return _parse_json(cell, source, place)
    except (ValueError, RecursionError):
        pass
    if not re.match(r"\s*\[?\{'", cell):
        return cell
    try:
        return _parse_json(json.dumps(ast.literal_eval(cell.strip())), source, place)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return cell


_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


class _RepeatedKeys(dict[str, Any]):
    """A JSON object that had keys twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.repeated = sorted(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)


class _NotANumber(NamedTuple):
    """NaN or an infinity, until it is reported."""

    spelling: str


def _parse_json(text: str, source: Source, place: Place) -> Any:
    """Parse JSON, and report what the parser would pass over: repeated keys, NaN, halves of surrogate pairs."""
    untidy = _SURROGATE_ESCAPE.search(text) is not None

    def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal untidy
        made = dict(pairs)
        if len(made) == len(pairs):
            return made
        untidy = True
        return _RepeatedKeys(pairs)

    def make_constant(spelling: str) -> _NotANumber:
        nonlocal untidy
        untidy = True
        return _NotANumber(spelling)

    value = json.loads(text, object_pairs_hook=make_object, parse_constant=make_constant)
    return _tidy(value, source, place) if untidy else value


def _tidy(value: Any, source: Source, place: Place) -> Any:
    """A copy of a JSON value without what no later step could handle, each such thing reported."""
    if isinstance(value, str):
        if not _SURROGATE.search(value):
            return value
        halves = ", ".join(sorted({f"\\u{ord(half):04x}" for half in _SURROGATE.findall(value)}))
        source.report("lone_surrogate", f"{place.path}: {halves} without its other half", place)
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, _NotANumber):
        source.report("not_a_number", f"{place.path}: {value.spelling} is not JSON", place)
        return None
    if isinstance(value, list):
        return [_tidy(item, source, place.at(index)) for index, item in enumerate(value)]
    if isinstance(value, dict):
        title, id = value.get("title"), value.get("id")
        if isinstance(title, str) and not _SURROGATE.search(title):
            place = place._replace(article=title)
        if isinstance(id, str) and not _SURROGATE.search(id):
            place = place._replace(id=id)
        if isinstance(value, _RepeatedKeys):
            repeated = ", ".join(quote(key) for key in value.repeated)
            source.report("duplicate_key", f"{place.path or 'the file'}: the key {repeated} is there twice", place)
        return {_SURROGATE.sub("\ufffd", key): _tidy(item, source, place.at(key)) for key, item in value.items()}
    return value
