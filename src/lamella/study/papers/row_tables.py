"""The tables of a published table's rows: how it was trained and scored, the scores, and the costs; theirs and ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from lamella.errors import counted
from lamella.study.papers.cost_verdicts import mean_loss
from lamella.study.papers.matched_rows import MatchedRow, MatchedTable
from lamella.study.papers.numbers import count, decimal, interval_text, signed
from lamella.study.papers.published_tables import EFFICIENCY, METRICS, SCORE_METRICS
from lamella.study.report.columns import NOTHING, Labels, describe_dev, describe_encoder, readable_value
from lamella.study.report.page_blocks import Block, Heading, Paragraph, Table

OUR_METRIC = {
    "span": "EM and F1, as the official scripts compute them",
    "answerability": "accuracy, and F1 of the class “no answer”",
}
SUBSETS = {key: title for key, title in SCORE_METRICS.items() if key.startswith(("HasAns_", "NoAns_"))}
Cell = Callable[[MatchedRow], str]


def protocol_table(matched: MatchedTable, labels: Labels) -> Table:
    """Return encoder, data, training, score and seeds of the paper, and ours beside them."""
    protocol, ours = matched.table.protocol, [row for row in matched.rows if row.reader]
    dev = matched.results[0].content["dev"] if ours else None
    seeds = sorted({len(row.results) for row in ours})
    rows = [
        ("encoder", protocol.encoder, _by_row(ours, lambda row: _encoder(row, labels))),
        ("train data", protocol.train, _by_row(ours, lambda row: _train_data(row, labels))),
        ("training", protocol.training, _by_row(ours, _training)),
        (
            "scored on",
            protocol.dev,
            f"{labels.files(dev['files'])}: {describe_dev(matched.results[0])}" if dev else NOTHING,
        ),
        ("score", protocol.metric, OUR_METRIC[matched.table.task] if ours else NOTHING),
        ("threshold", protocol.threshold, "0" if ours else NOTHING),
        ("seeds", protocol.seeds, " to ".join(dict.fromkeys(map(str, (seeds[0], seeds[-1])))) if seeds else NOTHING),
    ]
    return Table(("", "the paper", "ours"), tuple(rows), frozenset({0, 1, 2}))


def score_table(matched: MatchedTable) -> Table:
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
    columns[f"{titles[main]}, difference"] = lambda row: signed(_minus(row.scores.get(main), row.row.value(main)))
    for key, title in titles.items():
        columns[f"{title}, cross-fitted"] = _ours(matched, f"crossfit_{key}")
    for key, title in titles.items():  # empty, and not shown, where every question has a single context
        columns[f"{title} per question, ours"] = _ours(matched, f"question_{key}")
    for key, title in titles.items():
        columns[f"{title} per question, cross-fitted"] = _ours(matched, f"question_crossfit_{key}")
    for key, title in SUBSETS.items():
        if any(row.row.value(key) is not None for row in matched.rows):
            columns[f"{title}, published"] = _published(key)
            columns[f"{title}, ours"] = _ours(matched, key)
    if has_loss(matched):
        columns["loss, published"] = lambda row: decimal(row.row.loss, 3)
        columns["loss, ours"] = lambda row: decimal(mean_loss(row), 3)
    return _filled_table(columns, matched.rows, words=2)


def has_loss(matched: MatchedTable) -> bool:
    """Return whether the authors published losses of a table."""
    return any(row.row.loss is not None for row in matched.rows)


def cost_blocks(matched: MatchedTable, labels: Labels) -> list[Block]:
    """Return the table of the costs, published and ours, and the devices of our times."""

    def ours(key: str) -> Cell:
        return lambda row: labels.cell(key, row.reader) if row.reader else NOTHING

    columns: dict[str, Cell] = {
        "row": lambda row: row.row.label,
        "run": lambda row: f"`{row.row.run}`",
        "parameters, published": _published_parameters,
        "parameters, ours": ours("delta"),
        "train s, published": lambda row: count(row.row.train_seconds),
        "train s, ours": ours("train_seconds"),
        "windows/s": ours("windows_per_second"),
        "inference s, published": lambda row: count(row.row.inference_seconds),
        "ms/question, ours": ours("inference_seconds_per_1000"),
    }
    if any(finding.metric == EFFICIENCY for finding in matched.table.finding):
        columns[f"{METRICS[EFFICIENCY]}, published"] = _published(EFFICIENCY)
        columns[f"{METRICS[EFFICIENCY]}, ours"] = _our_efficiency
    table = _filled_table(columns, matched.rows, words=2)
    if len(table.titles) == 2:
        return []
    devices = dict.fromkeys(row.reader.device for row in matched.rows if row.reader and row.reader.device)
    has_times = not {"train s, ours", "windows/s", "ms/question, ours"}.isdisjoint(table.titles)
    timed = (
        [Paragraph(f"Our times were measured on {'; on '.join(map(str, devices))}.")] if devices and has_times else []
    )
    return [Heading("Cost", 3), table, *timed]


def _by_row(rows: Sequence[MatchedRow], describe: Callable[[MatchedRow], str | None]) -> str:
    """Describe all rows: once if the description is the same, otherwise with the runs that have it."""
    runs_of: dict[str, list[str]] = {}
    for row in rows:
        if text := describe(row):  # an ensemble has neither an encoder nor train data
            runs_of.setdefault(text, []).append(row.row.run)
    if len(runs_of) < 2:
        return next(iter(runs_of), NOTHING)
    return "; ".join(f"{text} ({', '.join(runs)})" for text, runs in runs_of.items())


def _encoder(row: MatchedRow, labels: Labels) -> str | None:
    return describe_encoder(labels, row.results[0].content["encoder"])


def _train_data(row: MatchedRow, labels: Labels) -> str | None:
    """Return the files that a row was trained on, and how many questions they have."""
    train = row.results[0].content["train"]
    if not train["files"]:
        return None
    if "questions" not in train or row.reader is None:
        return labels.cell("train", row.reader) if row.reader else NOTHING
    return f"{labels.files(train['files'])}: {counted(train['questions'], 'question')}"


def _training(row: MatchedRow) -> str | None:
    """Return epochs, batch size and learning rate of a row; None if it was not trained, as an ensemble."""
    options: dict[str, Any] = row.results[0].content["options"]
    rate, batch = options.get("learner.learning_rate"), options.get("training.batch_size")
    epochs, steps = options.get("training.epochs"), options.get("training.max_steps")
    words = []
    if steps is not None:
        words.append(counted(steps, "step"))
    elif epochs is not None:
        words.append("1 epoch" if epochs == 1 else f"{epochs:g} epochs")
    if batch is not None:
        words.append(f"batches of {batch * (options.get('training.accumulate') or 1)}")
    if rate is not None:
        words.append(f"learning rate {readable_value(rate)}")
    return ", ".join(words) or None


def _filled_table(columns: dict[str, Cell], rows: Sequence[MatchedRow], *, words: int) -> Table:
    """Return a table without the columns that have no value in any row; the first columns are words."""
    cells = {title: [cell(row) for row in rows] for title, cell in columns.items()}
    shown = [title for title in cells if any(cell != NOTHING for cell in cells[title])]
    if "seeds" in shown and set(cells["seeds"]) <= {"1", NOTHING}:
        shown.remove("seeds")
    lines = tuple(zip(*(cells[title] for title in shown), strict=True))
    return Table(tuple(shown), lines, frozenset(range(words)))


def _published(key: str) -> Cell:
    return lambda row: decimal(row.row.value(key))


def _ours(matched: MatchedTable, key: str) -> Cell:
    """Return the cells of a score of ours; the main score has its deviation between seeds and its interval."""

    def cell(row: MatchedRow) -> str:
        text = decimal(row.scores.get(key))
        if key != matched.metric or row.row.run not in matched.intervals:
            return text
        deviation = matched.deviation(row)
        seeds = "" if deviation is None else f" ±{deviation:.2f}"
        return f"{text}{seeds} {interval_text(matched.intervals[row.row.run])}"

    return cell


def _our_efficiency(row: MatchedRow) -> str:
    parameters, f1 = row.reader and row.reader.mean_cost("trainable_parameters"), row.scores.get("f1")
    return NOTHING if not parameters or f1 is None else decimal((f1 - 50) / math.log10(parameters))


def _published_parameters(row: MatchedRow) -> str:
    parameters, share = row.row.trainable_parameters, row.row.trainable_percent
    if parameters is None:
        return NOTHING if share is None else f"{share:g} %"
    return f"{parameters:,}" + ("" if share is None else f" ({share:g} %)")


def _minus(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other
