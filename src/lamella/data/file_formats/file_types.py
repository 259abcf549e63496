"""Recognise binary files by their first bytes, to read them or to name them in an error."""

from __future__ import annotations

import io
import zipfile
import zlib
from typing import Literal, NamedTuple


class FileType(NamedTuple):
    """A kind of binary file: `reader` is how its table is read, if it is, `advice` what to do with it otherwise."""

    name: str
    advice: str
    reader: Literal["spreadsheet", "parquet", ""] = ""
    libraries: str = ""


ZIP_SIGNATURE = b"PK\x03\x04"
LONGEST_MIMETYPE = 1000  # bytes; those of OpenDocument have 60
_UNPACK = "unpack it, or compress it with gzip, which can be read directly"
_CONVERT = "convert it to CSV or JSONL"
_EXTRACT = "extract the text first, and save questions and contexts as CSV or JSONL"

_EXCEL = FileType("an Excel file", _CONVERT, "spreadsheet", "pandas openpyxl")
_OLD_EXCEL = FileType("an old Excel file", _CONVERT, "spreadsheet", "pandas xlrd")
_ODS = FileType("an OpenDocument spreadsheet", _CONVERT, "spreadsheet", "pandas odfpy")
_ZIP = FileType("a ZIP archive", _UNPACK)

_SIGNATURES: tuple[tuple[int, bytes, FileType], ...] = (
    (0, b"PAR1", FileType("a Parquet file", _CONVERT, "parquet", "pyarrow")),
    (0, b"ARROW1", FileType("an Arrow file", _CONVERT)),
    (0, b"\xff\xff\xff\xff", FileType("an Arrow stream", "load it with `datasets` and pass the data set to Python")),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", _OLD_EXCEL),
    (0, b"\x1f\x8b", FileType("a gzip file", "unpack it")),  # of data files: gzip within gzip
    (0, b"BZh", FileType("a bzip2 file", _UNPACK)),
    (0, b"\xfd7zXZ\x00", FileType("an xz file", _UNPACK)),
    (0, b"\x28\xb5\x2f\xfd", FileType("a Zstandard file", _UNPACK)),
    (0, b"7z\xbc\xaf\x27\x1c", FileType("a 7-Zip archive", _UNPACK)),
    (0, b"Rar!\x1a\x07", FileType("a RAR archive", _UNPACK)),
    (257, b"ustar", FileType("a tar archive", _UNPACK)),
    (0, b"%PDF-", FileType("a PDF file", _EXTRACT)),
    (0, b"SQLite format 3\x00", FileType("an SQLite database", "export its table to CSV")),
    (0, b"\x89HDF\r\n\x1a\n", FileType("an HDF5 file", _CONVERT)),
    (0, b"\x93NUMPY", FileType("a NumPy file", _CONVERT)),
    (0, b"\x89PNG", FileType("a PNG image", _EXTRACT)),
    (0, b"\xff\xd8\xff", FileType("a JPEG image", _EXTRACT)),
)


def recognise_binary(data: bytes) -> FileType | None:
    """Return the kind of a binary file; None for text and unknown content."""
    if data.startswith(ZIP_SIGNATURE):
        return _recognise_zip(data)
    return next((kind for offset, magic, kind in _SIGNATURES if data.startswith(magic, offset)), None)


def _recognise_zip(data: bytes) -> FileType:
    """Distinguish office documents, which are ZIP archives, by the files in them."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
            mimetype = b""
            if "mimetype" in names:
                with archive.open("mimetype") as file:
                    mimetype = file.read(LONGEST_MIMETYPE)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError, KeyError):
        return _ZIP
    if any(name.startswith("xl/") for name in names):
        return _EXCEL
    if any(name.startswith("word/") for name in names):
        return FileType("a Word document", _EXTRACT)
    if b"opendocument.spreadsheet" in mimetype:
        return _ODS
    return _ZIP
