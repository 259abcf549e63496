"""Papers with the runs of their rows: collected from folders of results, matched with the tables, and judged."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lamella.errors import RunError
from lamella.study.compared_readers import TIME_COSTS
from lamella.study.papers.beyond_rows import beyond_tables
from lamella.study.papers.findings import JudgedFinding, judge
from lamella.study.papers.matched_rows import MatchedTable, match_tables, run_file_of
from lamella.study.papers.page_text import PageText, PaperTexts
from lamella.study.papers.published_tables import Paper, PublishedTable, find_tables
from lamella.study.records import RunRecord, read_records
from lamella.study.report.columns import Labels
from lamella.study.result_files import result_files

TIMES = (*TIME_COSTS, "encoder_seconds", "head_seconds", "pass_seconds")


@dataclass(frozen=True, eq=False)
class JudgedTable:
    """A table with the runs of its rows, and the verdicts on its findings."""

    matched: MatchedTable
    findings: list[JudgedFinding]


@dataclass(frozen=True, eq=False)
class JudgedPaper:
    """The tables of a paper, those of our own rows, and the runs that are in neither."""

    paper: Paper
    text: PageText
    tables: tuple[JudgedTable, ...]
    beyond: tuple[JudgedTable, ...]
    others: tuple[RunRecord, ...]

    @property
    def runs(self) -> list[RunRecord]:
        """All runs in its tables, each once."""
        readers = [row.reader for table in (*self.tables, *self.beyond) for row in table.matched.rows if row.reader]
        return list({run.folder: run for reader in readers for run in reader.runs}.values())


def judge_paper(
    id: str, paths: Sequence[str | os.PathLike[str]], texts: PaperTexts, data: str | None = None
) -> JudgedPaper:
    """Return the table of an id, or all tables of a paper, with the runs among `paths`."""
    paper, tables = find_tables(id)
    page = texts.of(paper.id)
    text = page if id == paper.id else PageText(paper=paper.id, file=f"{id}.md")
    if text.tables:
        tables = [table for table in tables if table.id in text.tables]
    records = read_records(collected_paths(paths, tables)).records
    records = tuple(record if page.has_time(record.name) else _without_times(record) for record in records)
    matched, others = match_tables(tables, records, data)
    ours, _ = match_tables(beyond_tables(paper, text, others, Labels(texts.names)), records, data)
    shown = {run.folder for table in ours for row in table.rows if row.reader for run in row.reader.runs}
    return JudgedPaper(
        paper,
        text,
        tuple(JudgedTable(table, judge(table)) for table in matched),
        tuple(JudgedTable(table, judge(table)) for table in ours),
        tuple(run for run in others if run.folder not in shown),
    )


def _without_times(record: RunRecord) -> RunRecord:
    """Return a record whose costs and curve have no times."""
    cost = {key: value for key, value in record.cost.items() if key not in TIMES}
    if record.result is None:
        return replace(record, cost=cost)
    content = {**record.result.content, "cost": cost}
    if "curve" in content:
        content["curve"] = {key: values for key, values in content["curve"].items() if key != "seconds"}
    return replace(record, cost=cost, result=replace(record.result, content=content))


def collected_paths(
    paths: Sequence[str | os.PathLike[str]], tables: Sequence[PublishedTable]
) -> list[str | os.PathLike[str]]:
    """Return the paths, with a folder that collects the results of all papers replaced by those of some tables.

    Such a folder has a folder of result files for each run file, under its name: `results/papers/pce-table2`.
    """
    wanted = {table.run_file_of(row) for table in tables for row in table.row}
    collected: list[str | os.PathLike[str]] = []
    for path in paths:
        folders = result_folders(path)
        collected += [folder for folder in folders if run_file_of(folder.name) in wanted] if folders else [path]
    if not collected:
        raise RunError(
            f"{', '.join(map(str, paths))}: expected a folder of results named {' or '.join(sorted(wanted))}, got "
            "only those of other papers."
        )
    return collected


def result_folders(path: str | os.PathLike[str]) -> list[Path]:
    """List the folders in a folder that are named after run files and have result files; none if it has some itself."""
    folder = Path(os.path.expanduser(path))
    if not folder.is_dir() or result_files(folder):
        return []
    children = sorted(child for child in folder.iterdir() if child.is_dir())
    return [child for child in children if run_file_of(child.name) and result_files(child)]
