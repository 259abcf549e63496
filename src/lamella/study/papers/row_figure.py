"""The figure of a published table: published and our scores by row, and the differences behind its findings."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lamella.study.papers.findings import JudgedFinding
from lamella.study.papers.matched_rows import MatchedTable
from lamella.study.papers.published_tables import SCORE_METRICS
from lamella.study.report.svg_plot import axis_ticks

WIDTH, LEFT, RIGHT = 840, 350, 800
LINE, PANEL_HEAD, PANEL_FOOT = 24, 44, 40  # heights in pixels
PUBLISHED, OURS = "#d55e00", "#0072b2"  # distinct for colour-blind eyes
MAX_LABEL = 50  # characters
DIFFERENCES = "Differences behind the findings, in points: to the right of 0 as the authors conclude"


@dataclass(frozen=True)
class _Mark:
    """A line of a panel: its label, the published value, ours, and the interval of ours."""

    label: str
    published: float | None
    ours: float | None
    interval: tuple[float, float] | None


def draw(matched: MatchedTable, findings: Sequence[JudgedFinding], *, published: bool = True) -> str:
    """Return the figure as SVG: a panel with the score of every row, and one with the compared differences.

    Without `published`, the rows are ours alone, and the differences are those from a baseline.
    """
    title = "Accuracy" if matched.table.task == "answerability" else SCORE_METRICS[matched.metric]
    panels = [(f"{title} by row, in percent", _row_marks(matched))]
    if marks := _difference_marks(matched, findings):
        panels.append((DIFFERENCES if published else "Differences from the first row, in points", marks))
    height = sum(PANEL_HEAD + LINE * len(marks) + PANEL_FOOT for _, marks in panels) + LINE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    if published:
        lines += [
            f'<circle cx="{LEFT + 4}" cy="14" r="5" fill="#fff" stroke="{PUBLISHED}" stroke-width="2"/>',
            f'<text x="{LEFT + 14}" y="18">published</text>',
        ]
    lines += [
        f'<circle cx="{LEFT + 104}" cy="14" r="5" fill="{OURS}"/>',
        f'<text x="{LEFT + 114}" y="18">ours, with its 95 % interval</text>',
    ]
    top = LINE
    for place, (title, marks) in enumerate(panels):
        lines += _panel(title, marks, top, with_zero=place == 1)
        top += PANEL_HEAD + LINE * len(marks) + PANEL_FOOT
    return "\n".join([*lines, "</svg>", ""])


def _row_marks(matched: MatchedTable) -> list[_Mark]:
    marks = []
    for row in matched.rows:
        interval = matched.intervals.get(row.row.run)
        ends = None if interval is None else (interval.low, interval.high)
        published, ours = row.row.value(matched.metric), row.scores.get(matched.metric)
        marks.append(_Mark(row.row.label, published, ours, ends))
    return marks


def _difference_marks(matched: MatchedTable, findings: Sequence[JudgedFinding]) -> list[_Mark]:
    """Return the differences in scores, each once; costs have other units."""
    marks: dict[tuple[str, str, str], _Mark] = {}
    for finding in findings:
        for difference in finding.differences:
            if difference.metric not in SCORE_METRICS:
                continue
            unit = "" if difference.metric == matched.metric else f" ({SCORE_METRICS[difference.metric]})"
            better, worse = (matched.row(run).row.label for run in (difference.better, difference.worse))
            label = f"{better} − {worse}{unit}"
            ours = difference.ours
            ends = None if ours is None else (ours.low, ours.high)
            key = (difference.better, difference.worse, difference.metric)
            marks[key] = _Mark(label, difference.published, None if ours is None else ours.value, ends)
    return list(marks.values())


def _panel(title: str, marks: Sequence[_Mark], top: float, *, with_zero: bool) -> Iterator[str]:
    values = [
        value for mark in marks for value in (mark.published, mark.ours, *(mark.interval or ())) if value is not None
    ]
    ticks = axis_ticks([*values, 0.0] if with_zero else values)
    low, high = ticks[0], ticks[-1]
    first, last = top + PANEL_HEAD, top + PANEL_HEAD + LINE * len(marks)

    def x(value: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (value - low) / (high - low), 1)

    yield f'<text x="16" y="{top + 28}" font-weight="bold">{html.escape(title)}</text>'
    for tick in ticks:
        color = "#888" if with_zero and tick == 0 else "#e4e4e4"
        yield f'<line x1="{x(tick)}" y1="{first}" x2="{x(tick)}" y2="{last}" stroke="{color}"/>'
        text = f"{tick:g}".replace("-", "−")
        yield f'<text x="{x(tick)}" y="{last + 16}" text-anchor="middle" fill="#666">{text}</text>'
    for place, mark in enumerate(marks):
        y = first + LINE * place + LINE / 2
        label = mark.label if len(mark.label) <= MAX_LABEL else f"{mark.label[: MAX_LABEL - 1]}…"
        yield f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end">{html.escape(label)}</text>'
        if mark.interval is not None:
            ends = f'x1="{x(mark.interval[0])}" y1="{y}" x2="{x(mark.interval[1])}" y2="{y}"'
            yield f'<line {ends} stroke="{OURS}" stroke-width="3" stroke-opacity="0.4"/>'
        if mark.ours is not None:
            yield f'<circle cx="{x(mark.ours)}" cy="{y}" r="5" fill="{OURS}"/>'
        if mark.published is not None:
            circle = f'cx="{x(mark.published)}" cy="{y}" r="5" fill="#fff" fill-opacity="0.6"'
            yield f'<circle {circle} stroke="{PUBLISHED}" stroke-width="2"/>'
