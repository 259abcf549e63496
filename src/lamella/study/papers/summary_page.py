"""The summary of all papers: which published findings hold here, in one table, and how sure that is."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from lamella.errors import RunError, counted
from lamella.study.papers.finding_tables import compared_values, comparison, verdict_text
from lamella.study.papers.findings import JudgedFinding
from lamella.study.papers.judged_papers import JudgedPaper, JudgedTable, judge_paper, result_folders
from lamella.study.papers.matched_rows import run_file_of
from lamella.study.papers.page_text import read_texts
from lamella.study.papers.paper_page import DISCLAIMER, VERDICT_LEGEND, PaperPage, table_summaries
from lamella.study.papers.published_tables import PAPERS, read_paper
from lamella.study.papers.verdicts import NOT_RUN, VERDICTS
from lamella.study.report.page_blocks import Block, Heading, Paragraph, Prose, Table

HOW_SURE = (
    "Each row is a conclusion of the authors. A finding with several comparisons has a row for the one that decides "
    "it: the first with the least favourable verdict. Brackets are 95 % intervals; values without them "
    "are not tested. Costs and losses are ratios."
)


def summary_page(
    paths: Sequence[str | os.PathLike[str]], *, data: str | None = None, title: str | None = None
) -> PaperPage:
    """Return the page with the findings of all papers that have results among `paths`, folders of results."""
    texts = read_texts(paths)
    run_files = set()
    for path in paths:
        folders = result_folders(path)
        if not folders:
            raise RunError(
                f"{path}: expected a folder that has a folder of result files for each run file of a paper, such as "
                "pce-table2, got none; make them with: lamella compare RUNS --keep FOLDER/pce-table2"
            )
        run_files |= {run_file_of(folder.name) for folder in folders}
    chosen = [paper for paper in PAPERS if run_files & {table.run_file for table in read_paper(paper).table}]
    papers = [judge_paper(paper, paths, texts, data) for paper in chosen]
    title = title or texts.title
    judged = [(paper, table, finding) for paper in papers for table, finding in _findings(paper)]
    decided = [entry for entry in judged if entry[2].verdict != NOT_RUN]
    undecided = [entry for entry in judged if entry[2].verdict == NOT_RUN]
    verdicts = _counted_verdicts(finding for _, _, finding in decided)
    blocks: list[Block] = [
        Heading(title, 1),
        Prose(texts.intro),
        Paragraph(f"{counted(len(decided), 'finding')} of {counted(len(papers), 'paper')}: {verdicts}. {DISCLAIMER}"),
        Prose("\n".join(_page_line(paper) for paper in papers)),
        Heading("Findings"),
        Paragraph(HOW_SURE),
        _findings_table(decided),
    ]
    if undecided:
        blocks += [Heading("Not decided here"), _undecided_table(undecided), Prose(texts.undecided)]
    blocks += [Heading("How to read it"), *map(Paragraph, VERDICT_LEGEND)]
    runs = {run.folder for paper in papers for run in paper.runs}
    tables = tuple(table for paper in papers for table in table_summaries(paper))
    return PaperPage(title, tuple(blocks), len(runs), (), tables)


def _findings(paper: JudgedPaper) -> Iterator[tuple[JudgedTable, JudgedFinding]]:
    """Yield the findings of a paper, each once: some tables repeat rows and conclusions of others."""
    seen = set()
    for table in paper.tables:
        for finding in table.findings:
            pairs = tuple(tuple(_with_run_file(run, table) for run in pair) for pair in finding.finding.pairs)
            key = (finding.finding.text, pairs, finding.finding.metric)
            if key not in seen:
                seen.add(key)
                yield table, finding


def _with_run_file(run: str, table: JudgedTable) -> str:
    """Return the run of a row as RUN_FILE/RUN: tables of one paper have rows of the same name."""
    return run if "/" in run else f"{table.matched.table.run_file}/{run}"


def _counted_verdicts(findings: Iterable[JudgedFinding]) -> str:
    counts = Counter(finding.verdict for finding in findings if finding.verdict != NOT_RUN)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in reversed(VERDICTS) if counts[verdict]) or NOT_RUN


def _page_line(paper: JudgedPaper) -> str:
    counts = _counted_verdicts(finding for _, finding in _findings(paper))
    return f"- [{paper.text.title or paper.paper.title}]({paper.text.file}) ({paper.paper.authors}): {counts}"


def _findings_table(entries: Sequence[tuple[JudgedPaper, JudgedTable, JudgedFinding]]) -> Table:
    rows = []
    for _, table, finding in entries:
        difference = next(item for item in finding.differences if item.verdict == finding.verdict)
        others = len(finding.differences) - 1
        text = comparison(difference, table.matched.table.task) + (f" (and {others} more)" if others else "")
        rows.append(
            (
                finding.finding.text,
                f"`{table.matched.table.id}`",
                text,
                *compared_values(difference),
                " and ".join(dict.fromkeys(map(str, difference.runs))),
                finding.verdict,
            )
        )
    titles = ("finding", "table", "comparison", "published", "ours", "seeds", "verdict")
    return Table(titles, tuple(rows), frozenset({0, 1, 2, 6}))


def _undecided_table(entries: Sequence[tuple[JudgedPaper, JudgedTable, JudgedFinding]]) -> Table:
    rows = []
    for _, table, finding in entries:
        difference = next(item for item in finding.differences if item.verdict == NOT_RUN)
        rows.append((finding.finding.text, f"`{table.matched.table.id}`", verdict_text(difference)))
    return Table(("finding", "table", "reason"), tuple(rows), frozenset({0, 1, 2}))
