"""Parse a data file into a document, before its format is known: JSON, JSONL, CSV or a binary table, gzip or not.

The content decides, never the name of the file.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from lamella.data.demo import data_path
from lamella.data.doctor.problems import quote
from lamella.data.file_formats.binary_tables import read_table
from lamella.data.file_formats.file_types import recognise_binary
from lamella.data.file_formats.in_memory import parse_rows
from lamella.data.file_formats.json_text import parse_json
from lamella.data.file_formats.source import Document, Place, Source
from lamella.data.file_formats.tables import COLUMNS, NEEDED_COLUMNS, PREDICTION_COLUMNS, parse_csv, split_header
from lamella.data.html_text import looks_like_html
from lamella.errors import UnreadableError
from lamella.text_encoding import decode_text
from lamella.unpacking import unpack_gzip

_ADVICE = "save it as UTF-8, or convert it: lamella convert IN OUT --encoding {encoding}"


def parse(source: Source, encoding: str | None = None) -> Document:
    """Parse the file of a source; raise UnreadableError if it cannot be read at all."""
    data = _load(data_path(source.path), source)
    binary = recognise_binary(data) if encoding is None else None
    if binary is not None and binary.reader:
        return parse_rows(read_table(data, binary, source.path), source)
    if binary is not None:
        raise UnreadableError(f"{source.path}: expected JSON, JSONL or CSV, got {binary.name}; {binary.advice}.")
    text = decode_text(data, source.path, encoding, advice=_ADVICE)
    if not text.strip():
        raise UnreadableError(f"{source.path}: the file is empty.")
    if not text.strip("\0"):
        raise UnreadableError(f"{source.path}: the file is damaged: it contains only zero bytes.")
    return _parse_text(text, source)


def _load(path: Path, source: Source) -> bytes:
    """Return the bytes of a file, decompressed if they are gzip; record size and hash of the file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UnreadableError(f"{path}: no such file.") from None
    except IsADirectoryError:
        raise UnreadableError(f"{path}: expected a data file, got a folder.") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UnreadableError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}).") from None
    source.size, source.sha256 = len(data), hashlib.sha256(data).hexdigest()
    return unpack_gzip(data, str(path)) if data.startswith(b"\x1f\x8b") else data


def _parse_text(text: str, source: Source) -> Document:
    if text.lstrip()[:1] not in ("{", "["):
        document = parse_csv(text, source)
        if document is not None:
            return document
    try:
        return Document(parse_json(text, source, Place()))
    except json.JSONDecodeError as error:
        document = _parse_lines(text, source) if _looks_like_lines(text) else None
        if document is not None and document.entries:
            return document
        raise UnreadableError(_explain(text, error, source.path)) from None
    except (RecursionError, ValueError) as error:
        raise UnreadableError(f"{source.path}: JSON that cannot be parsed: {_explain_refusal(error)}.") from None


def _explain(text: str, error: json.JSONDecodeError, path: str) -> str:
    """Return the message about a text that is neither JSON nor JSONL nor a CSV table of questions."""
    if text.lstrip().startswith(("{", "[")):
        end = " (the file ends here; it may be truncated)" if error.pos >= len(text.rstrip()) else ""
        return f"{path}:{error.lineno}:{error.colno}: broken JSON: {error.msg}{end}."
    _, header = split_header(text)
    if set(header) >= PREDICTION_COLUMNS:
        return (
            f"{path}:1: expected questions, got predictions (the columns {_list(header)}); score them with: "
            f"lamella evaluate DATA {path}"
        )
    if len(header) > 1 and COLUMNS.intersection(header):
        missing = sorted(NEEDED_COLUMNS.difference(header), reverse=True)
        nouns = ("column", "the one that holds it") if len(missing) == 1 else ("columns", "those that hold them")
        return (
            f"{path}:1: expected a CSV header with the columns question and context, got {_list(header)}; add the "
            f"{nouns[0]} {' and '.join(missing)}, or rename {nouns[1]}."
        )
    found = "an HTML page" if looks_like_html(text) else f"text that begins with {quote(text.strip())}"
    return f"{path}: expected JSON, JSONL, or CSV with a header of the columns question and context, got {found}."


def _list(header: list[str]) -> str:
    return ", ".join(quote(name) for name in header[:12]) + (", …" if len(header) > 12 else "")


def _explain_refusal(error: Exception) -> str:
    """Explain why Python does not parse valid JSON."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else "it has a number of thousands of digits"


def _looks_like_lines(text: str) -> bool:
    """Check for JSONL: the first line is JSON, or most lines begin with a bracket; in indented JSON, neither is so."""
    lines = [line for line in text.split("\n") if line.strip()]
    if len(lines) < 2:
        return False
    return 2 * sum(line.startswith(("{", "[")) for line in lines) > len(lines) or _is_json_object(lines[0])


def _is_json_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _parse_lines(text: str, source: Source) -> Document:
    rows, lines = [], []
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: a string may contain U+2028
        if not line.strip():
            continue
        place = Place.at_line(number)
        try:
            rows.append(parse_json(line, source, place))
            lines.append(number)
        except json.JSONDecodeError as error:
            source.report("broken_line", f"broken JSON: {error.msg}", place, column=error.colno)
            source.unread += 1
        except (RecursionError, ValueError) as error:
            source.report("broken_line", f"JSON that cannot be parsed: {_explain_refusal(error)}", place)
            source.unread += 1
    return Document(rows, "jsonl", lines)
