"""Print an analysis as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from lamella.errors import counted
from lamella.study.analysis.analysis_tables import AnalysisTable, analysis_tables

WIDTH = 160  # where the output is not a terminal


def print_analysis(numbers: Mapping[str, Any]) -> None:
    """Print everything in `analysis.json` except ids."""
    console = Console(markup=False, emoji=False, highlight=False)  # the name of a run is not markup
    if not console.is_terminal:
        console.width = WIDTH
    left_out = numbers["questions_left_out"]
    rest = f"; {left_out:,} more are not answered by all the runs" if left_out else ""
    console.print(f"{counted(numbers['questions'], 'question')} of {', '.join(numbers['data'])}{rest}")
    for name, reason in numbers["runs_left_out"].items():
        console.print(f"left out: {name} ({reason})")
    for table in analysis_tables(numbers):
        for part in _fit(table, console):
            console.print()
            console.print(part)


def _fit(table: AnalysisTable, console: Console) -> list[Table]:
    """Return the table if it fits the console, otherwise several below one another with some of the columns each.

    Rich would drop what does not fit, and numbers with it.
    """
    every = range(1, len(table.columns))
    whole = _lay_out(table, every, narrow=False)
    if _width(whole, console) <= console.width:
        return [whole]
    parts: list[list[int]] = [[]]
    for column in every:
        wider = _lay_out(table, [*parts[-1], column], narrow=True)
        if parts[-1] and _width(wider, console) > console.width:
            parts.append([])
        parts[-1].append(column)
    return [_lay_out(table, part, narrow=True) for part in parts]


def _width(table: Table, console: Console) -> int:
    """Return the width of a table without any limit."""
    return Measurement.get(console, console.options.update(max_width=100_000), table).maximum


def _lay_out(table: AnalysisTable, columns: Sequence[int], *, narrow: bool) -> Table:
    """Lay out some columns beside the names; with `narrow`, no wider than the longest word in each."""
    layout = Table(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in (0, *columns):
        title, cells = table.columns[column], [row[column] for row in table.rows]
        width = max(map(cell_len, [*title.split(), *cells])) if narrow or not column else None
        layout.add_column(title, width=width, justify="right" if column else "left", overflow="fold")
    for row in table.rows:
        layout.add_row(*(row[column] for column in (0, *columns)))
    return layout
