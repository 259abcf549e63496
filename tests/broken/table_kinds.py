"""Kinds of binary tables: Excel and Parquet files."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from broken.damage import Damage
from broken.data_kinds import ROWS, read_data
from broken.kind import Files, Kind, damage_file
from made_files import make_xlsx

FAR_CELLS = {
    "in the last cell": '<row r="1048576"><c r="XFD1048576"><v>1</v></c></row>',
    "in the last column": '<row r="9"><c r="XFD9"><v>1</v></c></row>',
    "in the last row": '<row r="1048576"><c r="A1048576"><v>1</v></c></row>',
    "in the last column and row, in two cells": '<row r="9"><c r="XFD9"><v>1</v></c></row>'
    '<row r="1048576"><c r="A1048576"><v>1</v></c></row>',
    "beyond the last row": '<row r="99999999"><c r="A99999999"><v>1</v></c></row>',
    "beyond the last column": '<row r="9"><c r="ZZZZ9"><v>1</v></c></row>',
    "in row 0": '<row r="0"><c r="A0"><v>1</v></c></row>',
    "in no row": '<row r="x"><c r="!"><v>1</v></c></row>',
}
ODD_CELLS = {
    "a number of 5,000 digits": f"<c><v>{'9' * 5000}</v></c>",
    "1e999": "<c><v>1e999</v></c>",
    "NaN": "<c><v>NaN</v></c>",
    "a date without a date": '<c t="d"><v>titan</v></c>',
    "an error": '<c t="e"><v>#REF!</v></c>',
    "an unknown type": '<c t="titan"><v>1</v></c>',
    "an unknown shared text": '<c t="s"><v>99</v></c>',
    "an unknown style": '<c s="99"><v>1</v></c>',
    "a formula": "<c><f>HYPERLINK(1)</f></c>",
    "control characters": '<c t="inlineStr"><is><t>_x0000_&#27;[31m</t></is></c>',
    "a text of 100,000 characters": f'<c t="inlineStr"><is><t>{"x" * 100_000}</t></is></c>',
}


def _excel() -> Kind:
    header: list[str | int | None] = list(ROWS[0])
    rows = [header, *([row[str(name)] for name in header] for row in ROWS)]

    def damages(files: Files) -> Iterator[Damage]:
        yield from damage_file("rows.xlsx", files["rows.xlsx"], structure="zip")
        for name, cells in FAR_CELLS.items():
            yield Damage(f"rows.xlsx: a value {name}", "rows.xlsx", make_xlsx(rows, cells))
        for name, cell in ODD_CELLS.items():
            for column in range(len(header)):
                row = f"<row>{'<c/>' * column}{cell}</row>"
                yield Damage(f"rows.xlsx: {header[column]} is {name}", "rows.xlsx", make_xlsx(rows, row))
        for number, name in enumerate(header):
            for label, changed in {"missing": [], "twice": [name, name], "a number": [1], "empty": [None]}.items():
                names = [*header[:number], *changed, *header[number + 1 :]]
                yield Damage(f"rows.xlsx: column {name} {label}", "rows.xlsx", make_xlsx([names, *rows[1:]]))

    def sound(folder: Path, _: Path) -> None:
        (folder / "rows.xlsx").write_bytes(make_xlsx(rows))

    return Kind("xlsx", sound, damages, read_data, reports=True, needs=("pandas", "openpyxl"))


def _parquet() -> Kind:
    def sound(folder: Path, _: Path) -> None:
        (folder / "rows.parquet").write_bytes(_make_parquet({name: [row[name] for row in ROWS] for name in ROWS[0]}))

    def damages(files: Files) -> Iterator[Damage]:
        yield from damage_file("rows.parquet", files["rows.parquet"])
        yield from _parquet_columns()
        long = "Titan " * 20_000
        for name, count, text in (("50 million equal rows", 50_000_000, "Titan"), ("long equal rows", 100_000, long)):
            yield Damage(f"rows.parquet: {name}", "rows.parquet", _equal_rows(count, text))

    return Kind("parquet", sound, damages, read_data, reports=True, needs=("pyarrow",))


def _parquet_columns() -> Iterator[Damage]:
    """Yield files in which one column has values of another type."""
    columns: dict[str, list[Any]] = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    values: dict[str, list[Any]] = {
        "null": [None, None],
        "numbers": [1, 2],
        "odd numbers": [float("nan"), float("inf")],
        "truth values": [True, False],
        "bytes": [b"\xff\x00", b""],
        "lists": [["a"], []],
        "lists of numbers": [[1.5], [None]],
        "objects": [{"text": ["a"], "answer_start": [0]}, {"text": [], "answer_start": []}],
        "texts": ["\x00\x1b[31m", ""],
    }
    for column in columns:
        for name, changed in values.items():
            data = _make_parquet({**columns, column: changed})
            yield Damage(f"rows.parquet: {column} holds {name}", "rows.parquet", data)
        yield Damage(
            f"rows.parquet: without {column}",
            "rows.parquet",
            _make_parquet({name: cells for name, cells in columns.items() if name != column}),
        )
    yield Damage("rows.parquet: no rows", "rows.parquet", _make_parquet({name: [] for name in columns}))
    yield Damage("rows.parquet: no columns", "rows.parquet", _make_parquet({}))


def _make_parquet(columns: dict[str, list[Any]]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def _equal_rows(count: int, text: str) -> bytes:
    """Return a file of equal rows: a dictionary of one text, and its number, repeated."""
    import pyarrow
    from pyarrow import parquet

    cells = pyarrow.DictionaryArray.from_arrays(pyarrow.repeat(pyarrow.scalar(0, pyarrow.int32()), count), [text])
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"question": cells, "context": cells}), file)
    return file.getvalue()


def table_kinds() -> Iterator[Kind]:
    """Yield the kinds of binary tables."""
    yield _excel()
    yield _parquet()
