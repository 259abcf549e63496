"""Binary tables: the rows of spreadsheets and Parquet files.

A small file can unfold to a table that no memory holds: by one value in the last cell of a sheet, or by a text that is
stored once and repeated in every row. Such a file is refused before it is unfolded.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any
from xml.parsers import expat  # nosec B407  # expat limits how far entities expand

from lamella.data.file_formats.file_types import ZIP_SIGNATURE, FileType
from lamella.errors import UnreadableError, one_line
from lamella.unpacking import TooLargeFileError, allowed_size, check_archive

Rows = list[dict[str, Any]]

CELLS_ALWAYS_ALLOWED = 1 << 20  # beyond that, one for each byte of the file; real tables have fewer
MOST_ROWS_AT_ONCE = 1024  # of a Parquet file
_REFERENCE = re.compile(r"([A-Z]{1,3})([0-9]{1,18})")  # of an Excel cell, such as C12


def read_table(data: bytes, kind: FileType, path: str) -> Rows:
    """Read the rows of a spreadsheet with pandas, or of a Parquet file with pyarrow."""
    try:
        return _read_parquet(data, path) if kind.reader == "parquet" else _read_spreadsheet(data, path)
    except UnreadableError:
        raise
    except ImportError as error:
        raise UnreadableError(
            f"{path}: {kind.name}, which needs libraries that are not installed ({one_line(error)}); install "
            f"them with: pip install {kind.libraries}, or convert the file to CSV or JSONL."
        ) from None
    except Exception as error:  # whatever a library raises for a damaged file
        reader = "pyarrow" if kind.reader == "parquet" else "pandas"
        raise UnreadableError(f"{path}: {reader} cannot read this file ({one_line(error)}).") from None


def _read_spreadsheet(data: bytes, path: str) -> Rows:
    pandas = importlib.import_module("pandas")
    if data.startswith(ZIP_SIGNATURE):
        with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(io.BytesIO(data)) as archive:
            check_archive(archive, len(data), path)
            for name in archive.namelist():
                _check_cells(*_extent(archive, name), len(data), path)
    # The text `None` or `NA` is an answer.
    rows: Rows = pandas.read_excel(io.BytesIO(data), keep_default_na=False, na_values=[""]).to_dict(orient="records")
    return rows


def _read_parquet(data: bytes, path: str) -> Rows:
    """Read a Parquet file in batches, and count the characters: texts may be stored once and repeated in every row."""
    parquet = importlib.import_module("pyarrow.parquet")
    with parquet.ParquetFile(io.BytesIO(data)) as file:
        names, metadata = file.schema_arrow.names, file.metadata
        if len(set(names)) < len(names):
            raise ValueError("two columns have the same name")
        _check_cells(metadata.num_rows, metadata.num_columns, len(data), path)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        largest = max(
            (group.column(n).total_uncompressed_size for group in groups for n in range(len(names))), default=0
        )
        most_bytes = allowed_size(len(data))
        at_once = max(1, min(MOST_ROWS_AT_ONCE, most_bytes // max(1, largest)))  # no cell is larger than its column
        rows: Rows = []
        size = 0
        for batch in file.iter_batches(batch_size=at_once):
            read = batch.to_pylist()
            size += _size(read)
            if size > most_bytes:
                raise TooLargeFileError(
                    f"{path}: expected a Parquet file that unpacks to at most {most_bytes >> 20} MiB, got more than "
                    "ordinary data; if you trust it, convert it to CSV or JSONL."
                )
            rows += read
    return rows


def _size(value: Any) -> int:
    """Return about how many bytes the texts in a value take, and 8 for anything else."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list):
        return sum(map(_size, value))
    return sum(map(_size, value.values())) if isinstance(value, dict) else 8


def _check_cells(rows: int, columns: int, packed: int, path: str) -> None:
    if rows * columns > CELLS_ALWAYS_ALLOWED + packed:
        raise TooLargeFileError(
            f"{path}: expected a table of ordinary data, got {rows:,} rows and {columns:,} columns in {packed:,} bytes"
            "; remove what is far from the table, or convert it to CSV or JSONL."
        )


def _extent(archive: zipfile.ZipFile, name: str) -> tuple[int, int]:
    """Return the last row and the last column of the sheet in a part of an Excel file; 0 for other and broken parts."""
    row = column = rows = columns = 0

    def start(tag: str, attributes: Mapping[str, str]) -> None:
        nonlocal row, column, rows, columns
        reference = attributes.get("r", "")
        tag = tag.rpartition(":")[2]
        if tag == "row":
            row, column = int(reference) if re.fullmatch(r"[0-9]{1,18}", reference) else row + 1, 0
        elif tag == "c":
            column += 1
            if cell := _REFERENCE.fullmatch(reference):
                column, row = _column_number(cell[1]), int(cell[2])
            rows, columns = max(rows, row), max(columns, column)

    parser = expat.ParserCreate()
    parser.StartElementHandler = start
    # What is damaged, encrypted or in an unknown encoding is left to the library.
    faults = (
        expat.ExpatError,
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        OSError,
        ValueError,
        RuntimeError,
        LookupError,
    )
    with contextlib.suppress(*faults), archive.open(name) as file:
        parser.ParseFile(file)
    return rows, columns


def _column_number(letters: str) -> int:
    """Return the number of a column, from 1: A, B, …, Z, AA, …"""
    number = 0
    for letter in letters:
        number = number * 26 + ord(letter) - ord("A") + 1
    return number
