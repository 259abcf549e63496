"""The page of a published table: published values beside ours, the cost of each row, and a verdict on each finding."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lamella.errors import counted
from lamella.scoring.significance import Difference
from lamella.study.papers.findings import LEANING, NOT_RUN, JudgedFinding, RowDifference, judge
from lamella.study.papers.matched_rows import MatchedRow, MatchedTable, match_tables
from lamella.study.papers.published_tables import COST_METRICS, EFFICIENCY, METRICS, SCORE_METRICS, Paper, find_tables
from lamella.study.papers.row_figure import draw
from lamella.study.records import read_records
from lamella.study.report.columns import NOTHING, Labels
from lamella.study.report.page_blocks import Block, Bullets, Figure, Heading, Paragraph, Table
from lamella.study.report.provenance_section import provenance_section

LABELS = Labels({})
DISCLAIMER = "The comparisons are the papers', the digits are not."
OUR_METRIC = {
    "span": "EM and F1, as the official scripts compute them",
    "answerability": "accuracy, and F1 of the class “no answer”",
}
EARLY_FILES = (
    "Some result files are from before the scores of single questions at threshold 0 were kept, so intervals and "
    "verdicts are at cross-fitted thresholds here. Keep these runs again for those at 0."
)
LEGEND = (
    "Published: as the authors print it, corrected where a note says so. Ours: EM and F1 at threshold 0, as in the "
    "papers; nothing is tuned. Brackets are 95 % intervals from a bootstrap over paragraphs. ± is the standard "
    "deviation between seeds. Cross-fitted scores stand beside them for comparison with other reports: each article at "
    "the no-answer threshold that is best on the other articles.",
    "A verdict compares two rows on the same questions, by a paired bootstrap: over questions between two single runs, "
    "over paragraphs with several seeds. Same sign and clear: the 95 % interval lies on the published side of 0, and "
    "with several seeds the difference is at least two standard errors between seeds. Reversed: the same on the other "
    f"side. Same sign: on the published side by the {100 * LEANING:.0f} % interval, or not beyond the variation "
    "between seeds. Not distinguishable: everything else. A finding with several comparisons has the least favourable "
    "verdict of them. With a single seed, a verdict is about these questions and not about other seeds.",
    "As good as: the first row is at most the stated margin worse; the margins are ours. Costs are not tested: same "
    "sign or reversed, and times within 10 % of each other are not distinguished.",
)
SUBSETS = {key: title for key, title in SCORE_METRICS.items() if key.startswith(("HasAns_", "NoAns_"))}
Cell = Callable[[MatchedRow], str]


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
    paper, tables = find_tables(id)
    records = read_records(paths).records
    matched, others = match_tables(tables, records, data)
    blocks: list[Block] = [Heading(title or paper.title, 1), Paragraph(_introduction(paper))]
    summaries = []
    for table in matched:
        findings = judge(table)
        blocks += _table_blocks(table, findings)
        summaries.append(
            {
                "table": table.table.id,
                "rows": [_row_summary(row) for row in table.rows],
                "findings": [finding.to_dict() for finding in findings],
            }
        )
    runs = {run.folder: run for table in matched for row in table.rows if row.reader for run in row.reader.runs}
    notes = []
    if others:
        names = ", ".join(run.name for run in others)
        blocks += [Heading("Other runs"), Paragraph(f"Given, but not in {_plural(len(matched))}: {names}.")]
        notes.append(f"not in {_plural(len(matched))}: {names}")
    if not runs:
        notes.append(f"no run has the name of a row: {', '.join(row.run for table in tables for row in table.row)}")
    blocks += [Heading("How to read it"), *map(Paragraph, LEGEND)]
    blocks += provenance_section(list(runs.values()), LABELS) if runs else []
    return PaperPage(title or paper.title, tuple(blocks), len(runs), tuple(notes), tuple(summaries))


def _plural(tables: int) -> str:
    return "the table" if tables == 1 else "any of the tables"


def _introduction(paper: Paper) -> str:
    return f"{paper.authors}. {paper.text} {DISCLAIMER}".replace("  ", " ")


def _table_blocks(matched: MatchedTable, findings: Sequence[JudgedFinding]) -> list[Block]:
    table = matched.table
    blocks: list[Block] = [
        Heading(f"{table.title} (`{table.id}`)"),
        Paragraph(table.text),
        _protocol_table(matched),
        Paragraph("" if matched.at_0 else EARLY_FILES),
        _score_table(matched),
        Figure(f"{table.id}.svg", draw(matched, findings), f"{table.title}: published and ours, by row"),
    ]
    if findings:
        blocks += [Heading("Findings", 3), _findings_table(findings)]
    blocks += _cost_blocks(matched)
    notes = [f"{row.row.label}: misprint. {row.row.misprint}" for row in matched.rows if row.row.misprint]
    notes += [f"{row.row.label}: {row.row.note}" for row in matched.rows if row.row.note]
    notes += [f"“{finding.finding.text}” {finding.finding.note}" for finding in findings if finding.finding.note]
    return [*blocks, Heading("Notes", 3), Bullets(tuple(notes))] if notes else blocks


def _protocol_table(matched: MatchedTable) -> Table:
    """Return encoder, data, score and seeds of the paper, and ours beside them."""
    protocol, ours = matched.table.protocol, [row for row in matched.rows if row.reader]
    dev = matched.results[0].content["dev"] if ours else None
    seeds = sorted({len(row.results) for row in ours})
    rows = (
        ("encoder", protocol.encoder, _by_row(ours, lambda row: row.results[0].content["encoder"].get("name"))),
        ("train data", protocol.train, _by_row(ours, _train_data)),
        (
            "scored on",
            protocol.dev,
            f"{LABELS.files(dev['files'])}: {counted(dev['questions'], 'question')} about "
            f"{counted(dev['paragraphs'], 'paragraph')}"
            if dev
            else NOTHING,
        ),
        ("score", protocol.metric, OUR_METRIC[matched.table.task] if ours else NOTHING),
        ("threshold", protocol.threshold, "0" if ours else NOTHING),
        ("seeds", protocol.seeds, " to ".join(dict.fromkeys(map(str, (seeds[0], seeds[-1])))) if seeds else NOTHING),
    )
    return Table(("", "the paper", "ours"), rows, frozenset({0, 1, 2}))


def _by_row(rows: Sequence[MatchedRow], describe: Callable[[MatchedRow], str | None]) -> str:
    """Describe all rows: once if the description is the same, otherwise with the runs that have it."""
    runs_of: dict[str, list[str]] = {}
    for row in rows:
        if text := describe(row):  # an ensemble has neither an encoder nor train data
            runs_of.setdefault(text, []).append(row.row.run)
    if len(runs_of) < 2:
        return next(iter(runs_of), NOTHING)
    return "; ".join(f"{text} ({', '.join(runs)})" for text, runs in runs_of.items())


def _train_data(row: MatchedRow) -> str | None:
    """Return the files that a row was trained on, and how many questions they have."""
    train = row.results[0].content["train"]
    if not train["files"]:
        return None
    if "questions" not in train:
        return _cell("train", row)
    return f"{LABELS.files(train['files'])}: {counted(train['questions'], 'question')}"


def _score_table(matched: MatchedTable) -> Table:
    """Return the table of the scores: published, ours, the difference, and cross-fitted."""
    classifies = matched.table.task == "answerability"
    titles = {"exact": "accuracy", "f1": "no-answer F1"} if classifies else {"exact": "EM", "f1": "F1"}
    columns: dict[str, Cell] = {
        "row": lambda row: row.row.label,
        "run": lambda row: f"`{row.row.run}`",
        "seeds": lambda row: str(len(row.results)) if row.reader else NOTHING,
    }
    for key, title in titles.items():
        columns[f"{title}, published"] = _published(key)
        columns[f"{title}, ours"] = _ours(matched, key)
    main = matched.metric
    columns[f"{titles[main]}, difference"] = lambda row: _signed(_minus(row.scores.get(main), row.row.value(main)))
    for key, title in titles.items():
        columns[f"{title}, cross-fitted"] = _ours(matched, f"crossfit_{key}")
    for key, title in SUBSETS.items():
        if any(row.row.value(key) is not None for row in matched.rows):
            columns[f"{title}, published"] = _published(key)
            columns[f"{title}, ours"] = _ours(matched, key)
    columns["loss, published"] = lambda row: NOTHING if row.row.loss is None else f"{row.row.loss:.3f}"
    return _filled_table(columns, matched.rows, words=2)


def _cost_blocks(matched: MatchedTable) -> list[Block]:
    """Return the table of the costs, published and ours, and the devices of our times."""
    columns: dict[str, Cell] = {
        "row": lambda row: row.row.label,
        "run": lambda row: f"`{row.row.run}`",
        "parameters, published": _published_parameters,
        "parameters, ours": lambda row: _cell("delta", row),
        "train s, published": lambda row: _count(row.row.train_seconds),
        "train s, ours": lambda row: _cell("train_seconds", row),
        "windows/s": lambda row: _cell("windows_per_second", row),
        "inference s, published": lambda row: _count(row.row.inference_seconds),
        "ms/question, ours": lambda row: _cell("inference_seconds_per_1000", row),
    }
    if any(finding.metric == EFFICIENCY for finding in matched.table.finding):
        columns[f"{METRICS[EFFICIENCY]}, published"] = _published(EFFICIENCY)
        columns[f"{METRICS[EFFICIENCY]}, ours"] = _our_efficiency
    table = _filled_table(columns, matched.rows, words=2)
    if len(table.titles) == 2:
        return []
    devices = dict.fromkeys(row.reader.device for row in matched.rows if row.reader and row.reader.device)
    timed = [Paragraph(f"Our times were measured on {'; on '.join(map(str, devices))}.")] if devices else []
    return [Heading("Cost", 3), table, *timed]


def _filled_table(columns: dict[str, Cell], rows: Sequence[MatchedRow], *, words: int) -> Table:
    """Return a table without the columns that have no value in any row; the first columns are words."""
    cells = {title: [cell(row) for row in rows] for title, cell in columns.items()}
    shown = [title for title in cells if any(cell != NOTHING for cell in cells[title])]
    if "seeds" in shown and set(cells["seeds"]) <= {"1", NOTHING}:
        shown.remove("seeds")
    lines = tuple(zip(*(cells[title] for title in shown), strict=True))
    return Table(tuple(shown), lines, frozenset(range(words)))


def _findings_table(findings: Sequence[JudgedFinding]) -> Table:
    rows = []
    for judged in findings:
        text = judged.finding.text
        if len(judged.differences) > 1:
            rows.append((text, f"all {len(judged.differences)} below", "", "", judged.verdict))
            text = ""
        rows += [
            (text, _comparison(difference), *_compared_values(difference), _verdict(difference))
            for difference in judged.differences
        ]
    return Table(("finding", "comparison", "published", "ours", "verdict"), tuple(rows), frozenset({0, 1, 4}))


def _comparison(difference: RowDifference) -> str:
    metric = METRICS[difference.metric]
    if difference.metric in COST_METRICS:
        return f"`{difference.worse}` / `{difference.better}`, {metric}"
    margin = f"; as good as, margin {difference.margin:g}" if difference.margin else ""
    return f"`{difference.better}` − `{difference.worse}`, {metric}{margin}"


def _compared_values(difference: RowDifference) -> tuple[str, str]:
    if difference.metric in COST_METRICS:
        ratios = (difference.published, difference.ratio)
        return tuple(NOTHING if ratio is None else f"× {ratio:.2f}" for ratio in ratios)  # type: ignore[return-value]
    ours = NOTHING if difference.ours is None else f"{_signed(difference.ours.value)} {_interval(difference.ours)}"
    return _signed(difference.published), ours


def _verdict(difference: RowDifference) -> str:
    reason = difference.verdict == NOT_RUN and difference.reason
    return f"{difference.verdict}: {reason}" if reason else difference.verdict


def _row_summary(row: MatchedRow) -> dict[str, Any]:
    return {
        "run": row.row.run,
        "published_exact": row.row.exact,
        "published_f1": row.row.f1,
        "exact": row.scores.get("exact"),
        "f1": row.scores.get("f1"),
        "seeds": len(row.results),
    }


def _published(key: str) -> Cell:
    return lambda row: _number(row.row.value(key))


def _ours(matched: MatchedTable, key: str) -> Cell:
    """Return the cells of a score of ours; the main score has its deviation between seeds and its interval."""

    def cell(row: MatchedRow) -> str:
        text = _number(row.scores.get(key))
        if key != matched.metric or row.row.run not in matched.intervals:
            return text
        deviation = matched.deviation(row)
        seeds = "" if deviation is None else f" ±{deviation:.2f}"
        return f"{text}{seeds} {_interval(matched.intervals[row.row.run])}"

    return cell


def _cell(key: str, row: MatchedRow) -> str:
    return LABELS.cell(key, row.reader) if row.reader else NOTHING


def _our_efficiency(row: MatchedRow) -> str:
    parameters, f1 = row.reader and row.reader.mean_cost("trainable_parameters"), row.scores.get("f1")
    return NOTHING if not parameters or f1 is None else _number((f1 - 50) / math.log10(parameters))


def _published_parameters(row: MatchedRow) -> str:
    count, share = row.row.trainable_parameters, row.row.trainable_percent
    if count is None:
        return NOTHING if share is None else f"{share:g} %"
    return f"{count:,}" + ("" if share is None else f" ({share:g} %)")


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def _count(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def _minus(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


def _signed(value: float | None) -> str:
    return NOTHING if value is None else f"{value:+.2f}".replace("-", "−")


def _interval(difference: Difference) -> str:
    return f"[{difference.low:.1f}, {difference.high:.1f}]".replace("-", "−")
