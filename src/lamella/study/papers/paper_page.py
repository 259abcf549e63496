"""The page of a published table: published values beside ours, the cost of each row, and a verdict on each finding."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lamella.errors import counted
from lamella.study.papers.analysis_section import analysis_section
from lamella.study.papers.finding_tables import findings_table, gains_table
from lamella.study.papers.findings import LEANING, JudgedFinding, same_encoder
from lamella.study.papers.judged_papers import JudgedPaper, JudgedTable, judge_paper
from lamella.study.papers.matched_rows import MatchedRow, MatchedTable
from lamella.study.papers.page_text import read_texts
from lamella.study.papers.published_tables import Paper
from lamella.study.papers.row_figure import draw
from lamella.study.papers.row_tables import cost_blocks, has_loss, protocol_table, score_table
from lamella.study.report.columns import Labels
from lamella.study.report.figures import Rows, cost_figures, figure_blocks
from lamella.study.report.page_blocks import Block, Bullets, Figure, Heading, Paragraph, Prose
from lamella.study.report.provenance_section import provenance_section
from lamella.study.result_files import Result

DISCLAIMER = "The comparisons are the papers', the digits are not."
EARLY_FILES = (
    "Some result files are from before the scores of single questions at threshold 0 were kept, so intervals and "
    "verdicts are at cross-fitted thresholds here. Keep these runs again for those at 0."
)
SCORE_LEGEND = (
    "Published: as the authors print it, corrected where a note says so. Ours: EM and F1 at threshold 0, as in the "
    "papers; nothing is tuned. Brackets are 95 % intervals from a bootstrap over paragraphs. ± is the standard "
    "deviation between seeds. Cross-fitted scores stand beside them for comparison with other reports: each article at "
    "the no-answer threshold that is best on the other articles."
)
LOSS_LEGEND = (
    "Loss, ours: the last training loss that the learning curve keeps, averaged over seeds. It is the mean over the "
    "steps since the evaluation before: of the last epoch, where a run was evaluated after every epoch."
)
VERDICT_LEGEND = (
    "A verdict compares two rows on the same questions, in the seeds that both have, by a paired bootstrap: over "
    "questions between two single runs, over paragraphs with several seeds. Same sign and clear: the 95 % interval "
    "lies on the published side of 0, and with several seeds the difference is at least two standard errors between "
    "seeds. Reversed: the same on the other side. Same sign: on the published side by the "
    f"{100 * LEANING:.0f} % interval, or not beyond the variation between seeds. Not distinguishable: everything else. "
    "A finding with several comparisons has the least favourable verdict of them. With a single seed, a verdict is "
    "about these questions and not about other seeds.",
    "As good as: the first row is at most the stated margin worse; the margins are ours. Costs and losses are not "
    "tested: same sign or reversed. Times and losses within 10 % of each other are not distinguished, nor losses "
    "within the factor by which seeds vary, nor times within the factor by which times of the same work vary here: "
    "runs that differ in their seeds only, or networks of the same size that answer. Lowest accuracies and mean layers "
    "are not tested either: same sign or reversed if all seeds agree, otherwise not distinguishable.",
)


@dataclass(frozen=True)
class PaperPage:
    """The content of a page, and its verdicts as plain values."""

    title: str
    blocks: tuple[Block, ...]
    runs: int  # in its tables
    notes: tuple[str, ...]
    tables: tuple[dict[str, Any], ...]


def paper_page(
    id: str, paths: Sequence[str | os.PathLike[str]], *, data: str | None = None, title: str | None = None
) -> PaperPage:
    """Return the page of a table (`pce-table2`), or of all tables of a paper (`pce`).

    `paths` are run folders, result files, or folders of either; `data` is the file with the questions that the runs
    were scored on, if the runs do not record it. The same files always give the same page.
    """
    texts = read_texts(paths)
    judged = judge_paper(id, paths, texts, data)
    labels = Labels(texts.names)
    title = title or judged.text.title or judged.paper.title
    blocks: list[Block] = [Heading(title, 1), Prose(judged.text.intro), Paragraph(_introduction(judged.paper))]
    by_run = {row.row.run: row.results for table in judged.tables for row in table.matched.rows}
    measure_time = [_measures_time(table.matched) for table in judged.tables]
    together = len(judged.tables) > 1 and all(measure_time)
    for table in judged.tables:
        blocks += _table_blocks(table, labels, by_run, costs=not together and _measures_time(table.matched))
    for section in judged.beyond:
        blocks += _beyond_blocks(section, labels, costs=any(measure_time) and not together)
    if together:
        blocks += _under_heading("All rows by cost", cost_figures(judged.paper.id, _all_rows(judged)), 2)
    for analysis in judged.text.analysis:
        blocks += analysis_section(analysis)
    notes = []
    if judged.others:
        names = ", ".join(run.name for run in judged.others)
        tables = "the table" if len(judged.tables) == 1 else "any of the tables"
        blocks += [Heading("Other runs"), Paragraph(f"Given, but not in {tables}: {names}.")]
        notes.append(f"not in {tables}: {names}")
    if not judged.runs:
        rows = [row.row.run for table in judged.tables for row in table.matched.rows]
        notes.append(f"no run has the name of a row: {', '.join(rows)}")
    blocks += [Heading("How to read it"), Paragraph(SCORE_LEGEND)]
    if any(has_loss(table.matched) for table in judged.tables):
        blocks.append(Paragraph(LOSS_LEGEND))
    blocks += map(Paragraph, VERDICT_LEGEND)
    blocks += provenance_section(judged.runs, labels) if judged.runs else []
    return PaperPage(title, tuple(blocks), len(judged.runs), tuple(notes), table_summaries(judged))


def table_summaries(judged: JudgedPaper) -> tuple[dict[str, Any], ...]:
    """Return the rows and verdicts of all tables as plain values."""
    return tuple(
        {
            "table": table.matched.table.id,
            "rows": [_row_summary(row) for row in table.matched.rows],
            "findings": [finding.to_dict() for finding in table.findings],
        }
        for table in (*judged.tables, *judged.beyond)
    )


def _introduction(paper: Paper) -> str:
    return f"{paper.authors}. {paper.text} {DISCLAIMER}".replace("  ", " ")


def _table_blocks(judged: JudgedTable, labels: Labels, by_run: Rows, *, costs: bool) -> list[Block]:
    matched, findings = judged.matched, judged.findings
    table = matched.table
    blocks: list[Block] = [
        Heading(f"{table.title} (`{table.id}`)"),
        Paragraph(table.text),
        protocol_table(matched, labels),
        Paragraph("" if matched.at_0 else EARLY_FILES),
        score_table(matched),
        Figure(f"{table.id}.svg", draw(matched, findings), f"{table.title}: published and ours, by row"),
    ]
    if findings:
        blocks += [Heading("Findings", 3), findings_table(findings, table.task)]
    blocks += cost_blocks(matched, labels)
    blocks += _more_figures(matched, by_run, costs=costs)
    notes = _notes(matched, findings)
    return [*blocks, Heading("Notes", 3), Bullets(notes)] if notes else blocks


def _all_rows(judged: JudgedPaper) -> dict[str, list[Result]]:
    """Return the results of all rows of a paper, each once, and of our own."""
    rows = {row.row.run_name: row for table in judged.tables for row in table.matched.rows if row.results}
    ours = [row for table in judged.beyond for row in table.matched.rows[1:] if row.results]  # without the baseline
    return {row.row.label: row.results for row in (*rows.values(), *ours)}


def _beyond_blocks(judged: JudgedTable, labels: Labels, *, costs: bool) -> list[Block]:
    """Return the blocks of a table of our own rows: scores, figure, differences from the baseline, and costs."""
    matched, findings = judged.matched, judged.findings
    table = matched.table
    return [
        Heading(f"Beyond the paper: {table.title}"),
        Prose(table.text),
        Paragraph("" if matched.at_0 else EARLY_FILES),
        score_table(matched),
        Figure(f"{table.id}.svg", draw(matched, findings, published=False), f"{table.title}: ours, by row"),
        gains_table(findings, table.task),
        *cost_blocks(matched, labels),
        *_more_figures(matched, {}, costs=costs),
    ]


def _more_figures(matched: MatchedTable, by_run: Rows, *, costs: bool) -> list[Block]:
    """Return what the results of the rows recorded besides scores; with `costs`, the scores by each cost."""
    rows = {row.row.label: row.results for row in matched.rows if row.results}
    figures = figure_blocks(matched.table.id, rows, by_run, matched.sources)
    figures += cost_figures(matched.table.id, rows) if costs else []
    missing = without_curves(matched)
    blocks: list[Block] = [*figures, *([Paragraph(missing)] if missing else [])]
    return _under_heading("Curves, layers and costs", blocks, 3)


def without_curves(matched: MatchedTable) -> str:
    """Return a sentence about the trained rows that have no learning curve on the page; "" if all have one."""
    copied = {row.row.run_name.partition("@")[0] for row in matched.rows if row.results}
    lost = [
        f"`{name}`" for name in matched.sources if name in copied and not any(map(_evaluations, matched.sources[name]))
    ]
    trained = [row for row in matched.rows if row.results and row.results[0].content["command"] == "train"]
    known = [max(map(_evaluations, row.results)) for row in trained]
    whose = "curve was" if len(lost) == 1 else "curves were"
    reasons = [f"the copies of {' and '.join(lost)}, whose {whose} not kept"] if lost else []
    if once := known.count(1):
        reasons.append(f"{counted(once, 'row')} evaluated once, at the end of training")
    if unrecorded := known.count(0):
        reasons.append(f"{counted(unrecorded, 'row')} whose curve was not recorded")
    return f"Learning curves are missing for {', and for '.join(reasons)}." if reasons else ""


def _evaluations(result: Result) -> int:
    return len(result.content.get("curve", {}).get("epoch", ()))


def _under_heading(text: str, blocks: Sequence[Block], level: int) -> list[Block]:
    return [Heading(text, level), *blocks] if blocks else []


def _measures_time(matched: MatchedTable) -> bool:
    return any(row.row.train_seconds is not None for row in matched.rows)


def _notes(matched: MatchedTable, findings: Sequence[JudgedFinding]) -> tuple[str, ...]:
    rows = [row.row for row in matched.rows]
    notes = [f"{row.label}: misprint. {row.misprint}" for row in rows if row.misprint]
    notes += [f"{row.label}: {row.note}" for row in rows if row.note]
    notes += [f"“{finding.finding.text}” {finding.finding.note}" for finding in findings if finding.finding.note]
    same = [(better, worse) for finding in findings for better, worse in same_encoder(matched, finding.finding)]
    notes += [
        f"{better.row.label} and {worse.row.label} are on one encoder here, whatever the names of these rows say."
        for better, worse in dict.fromkeys(same)
    ]
    return tuple(notes)


def _row_summary(row: MatchedRow) -> dict[str, Any]:
    return {
        "run": row.row.run,
        "published_exact": row.row.exact,
        "published_f1": row.row.f1,
        "exact": row.scores.get("exact"),
        "f1": row.scores.get("f1"),
        "seeds": len(row.results),
    }
