"""The analyses on the page of a paper: tables of an `analysis.json` that is kept beside the results."""

from __future__ import annotations

from pathlib import Path

from lamella.errors import UnknownNameError, UnreadableError
from lamella.files import read_json
from lamella.study.analysis.analysis_tables import AnalysisTable, analysis_tables
from lamella.study.papers.page_text import AnalysisOptions
from lamella.study.report.page_blocks import Block, Heading, Paragraph, Prose, Table


def analysis_section(options: AnalysisOptions) -> list[Block]:
    """Return the tables of an analysis that the page shows."""
    numbers = read_json(Path(options.file))
    try:
        tables = {table.name: table for table in analysis_tables(numbers)}
    except (KeyError, TypeError, IndexError) as error:
        raise UnreadableError(
            f"{options.file}: expected an analysis.json ({error} is missing); write it with lamella analyse --out."
        ) from None
    for name in options.tables:
        if name not in tables:
            raise UnknownNameError(f"{options.file}: table", name, tables)
    blocks: list[Block] = [Heading(options.title), Prose(options.text)]
    for name in options.tables or tables:
        blocks += [Paragraph(f"{_capitalised(tables[name].title)}:"), _lay_out(tables[name])]
    return blocks


def _lay_out(table: AnalysisTable) -> Table:
    titles = tuple(", ".join(title.splitlines()) for title in table.columns)
    return Table(titles, tuple((f"`{run}`", *values) for run, *values in table.rows))


def _capitalised(title: str) -> str:
    return title[0].upper() + title[1:]
