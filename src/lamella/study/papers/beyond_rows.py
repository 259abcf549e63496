"""Rows that a paper does not have: runs of ours beside one of its rows, in a table of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from lamella.errors import UsageError, did_you_mean
from lamella.study.papers.matched_rows import SEEDS, identify
from lamella.study.papers.page_text import TEXT_FILE, BeyondOptions, PageText
from lamella.study.papers.published_tables import Finding, Paper, PublishedRow, PublishedTable
from lamella.study.records import RunRecord
from lamella.study.report.columns import Labels


def beyond_tables(paper: Paper, text: PageText, others: Sequence[RunRecord], labels: Labels) -> list[PublishedTable]:
    """Return a table for each section of rows that the paper does not have, among the runs that are in no table of it.

    The first row is the baseline; every other is compared with it. A run is in the first section that names it, and a
    section without runs has no table.
    """
    runs = dict.fromkeys(_run_file_and_name(run) for run in others)
    tables = []
    for number, section in enumerate(text.beyond, 1):
        home, baseline = _baseline(paper, section)
        run_file = home.run_file_of(baseline)
        chosen = dict.fromkeys(
            run for pattern in section.runs for run in runs if run[0] == run_file and fnmatchcase(run[1], pattern)
        )
        for run in chosen:
            del runs[run]
        if chosen:
            rows = [PublishedRow(label=baseline.label, run=section.baseline)]
            rows += [PublishedRow(label=labels.names.get(name, name), run=f"{run_file}/{name}") for _, name in chosen]
            metric = "exact" if home.task == "answerability" else "f1"
            findings = [
                Finding(text=row.label, better=row.run, worse=[section.baseline], metric=metric) for row in rows[1:]
            ]
            tables.append(
                PublishedTable(
                    id=f"{paper.id}-beyond-{number}",
                    title=section.title,
                    text=section.text,
                    run_file=run_file,
                    task=home.task,
                    protocol=home.protocol,
                    row=rows,
                    finding=findings,
                )
            )
    return tables


def _run_file_and_name(run: RunRecord) -> tuple[str | None, str]:
    run_file, name = identify(run)
    return run_file, re.sub(rf"{SEEDS}$", "", name)


def _baseline(paper: Paper, section: BeyondOptions) -> tuple[PublishedTable, PublishedRow]:
    """Return the row that others are compared with, and a table that has it."""
    named = [(table, row) for table in reversed(paper.table) for row in table.row]
    named.sort(key=lambda pair: "/" not in pair[1].run)  # the last has the label: of a table of the run file itself
    rows = {f"{table.run_file_of(row)}/{row.run_name}": (table, row) for table, row in named}
    if section.baseline not in rows:
        raise UsageError(
            f"{TEXT_FILE}: page {paper.id}, {section.title!r}: baseline: expected a row of the paper as RUN_FILE/RUN, "
            f"got {section.baseline!r}.{did_you_mean(section.baseline, rows)}"
        )
    return rows[section.baseline]
