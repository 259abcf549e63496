"""Data in memory: dictionaries, lists of them, pandas DataFrames and Hugging Face data sets, by duck typing."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from lamella.data.file_formats.json_text import replace_unusable
from lamella.data.file_formats.source import Document, Place, Source
from lamella.data.file_formats.tables import table_document
from lamella.errors import UnreadableError, UsageError

Path = str | os.PathLike[str]
# The data that `load_examples` takes: paths, or records in any form.
Data = Path | Mapping[str, Any] | Iterable[Any]

_EXPECTED = "a path, several paths, a list of dictionaries, a DataFrame or a data set"


def split_paths(data: Data) -> tuple[list[Path], Any]:
    """Return the paths that the data names, or the records that it is: one of the two is empty (None)."""
    if isinstance(data, str | os.PathLike):
        return [data], None
    if isinstance(data, Mapping) or _is_table(data):
        return [], data
    if isinstance(data, bytes) or not isinstance(data, Iterable):
        raise UsageError(f"data: expected {_EXPECTED}, got {type(data).__name__}.")
    items = list(data)
    paths = [item for item in items if isinstance(item, str | os.PathLike)]
    if not items:
        raise UsageError(f"data: expected {_EXPECTED}, got an empty {type(data).__name__}.")
    if paths and len(paths) < len(items):
        raise UsageError("data: expected paths or records, got a mixture of both; load them one after the other.")
    return (paths, None) if paths else ([], items)


def default_name(data: Data) -> str:
    """Return the name of data in memory in messages: `<records>`, or its type, such as `<DataFrame>`."""
    return "<records>" if isinstance(data, dict | list | tuple) else f"<{type(data).__name__}>"


def is_in_memory(name: str) -> bool:
    """Check whether a name is the name of data in memory, not a path."""
    return name.startswith("<")


def parse_records(records: Any, source: Source) -> Document:
    """Return the document of records in memory; its hash is a hash of the content, whatever the type."""
    try:
        if _is_table(records):
            rows = [_plain(row) for row in records.to_dict(orient="records")]
            _hash(rows, source)
            return parse_rows(rows, source)
        _reject_splits(records)
        content = _plain(records)
        _hash(content if isinstance(content, list) else [content], source)
        return Document(replace_unusable(content, source, Place()))
    except RecursionError:
        raise UnreadableError(f"{source.path}: expected records, got values nested too deeply.") from None
    except ValueError:
        raise UnreadableError(
            f"{source.path}: expected records, got a number of thousands of digits, or an object that contains itself."
        ) from None


def parse_rows(rows: list[Any], source: Source) -> Document:
    """Return the document of the rows of a table, as dictionaries."""
    return table_document(replace_unusable(_plain(rows), source, Place()), source)


def _is_table(data: Any) -> bool:
    """Check for `to_dict(orient="records")`, which pandas DataFrames have."""
    if not callable(getattr(data, "to_dict", None)):
        return False
    return "orient" in inspect.signature(data.to_dict).parameters


def _reject_splits(records: Any) -> None:
    """Reject a dictionary of data sets, as `datasets.load_dataset` returns it for several splits."""
    if isinstance(records, Mapping) and any(hasattr(value, "to_dict") for value in records.values()):
        names = ", ".join(repr(str(name)) for name in records)
        raise UsageError(f"data: expected one data set, got a dictionary of {names}; choose one of them by its name.")


def _plain(value: Any) -> Any:
    """Convert a value to the types of JSON; missing values (NaN, NA) become None."""
    if value is None or type(value) in (str, bool, int):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return None if math.isnan(value) else float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # arrays and scalars of NumPy, tensors
        return _plain(value.tolist())
    return None if type(value).__name__ in ("NAType", "NaTType") else value


def _hash(entries: list[Any], source: Source) -> None:
    digest = hashlib.sha256()
    for entry in entries:
        line = json.dumps(entry, sort_keys=True, default=str).encode() + b"\n"
        digest.update(line)
        source.size += len(line)
    source.sha256 = digest.hexdigest()
