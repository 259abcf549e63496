"""Plots as SVG: panels with lines, named points and reference lines. The same input always gives the same text."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#7a5195",
    "#5d6871",
    "#8a5a44",
    "#6b6f2a",
)  # fmt: skip - distinct for colour-blind eyes
DASHES = ("", "6 3", "2 3")  # beyond the number of colours
SIZE, WIDE = (430, 290), (760, 360)  # of a panel, in pixels
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 36, 46  # margins of a panel
LETTER, LABEL_HEIGHT = 6.1, 13.0  # of labels, about
TICK_LETTER = 7.5  # of the labels of ticks, which are larger
LEGEND_LINE = 18
MAX_LABEL = 44  # characters
LOG_RATIO = 8  # an axis is logarithmic if its values differ by more than this factor

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Line:
    """A line through points; `style` numbers its colour, equal for equal labels of the legend."""

    style: int
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False
    step: bool = False  # go right, then up or down: as a Pareto front does


@dataclass(frozen=True)
class Point:
    """A named point."""

    label: str
    x: float
    y: float
    style: int = 0
    faint: bool = False


@dataclass(frozen=True)
class Panel:
    """One plot: its title and axes, and what is drawn in it."""

    title: str
    x_title: str
    y_title: str
    lines: Sequence[Line] = ()
    points: Sequence[Point] = ()
    references: Sequence[tuple[str, float]] = ()  # horizontal lines with a name
    log_x: bool = False
    x_ticks: Sequence[float] = ()  # by default chosen by the values

    @property
    def values(self) -> tuple[list[float], list[float]]:
        """All x and all y."""
        x = [value for line in self.lines for value in line.x] + [point.x for point in self.points]
        y = [value for line in self.lines for value in line.y] + [point.y for point in self.points]
        return x, [*y, *(value for _, value in self.references)]


def draw_panels(panels: Sequence[Panel], legend: Sequence[str] = (), *, wide: bool = False) -> str:
    """Return panels, two in a row or wide ones below each other, and below them the names of the styles from 0 on."""
    size, columns = (WIDE, 1) if wide else (SIZE, min(2, len(panels)))
    width, rows = size[0] * columns, math.ceil(len(panels) / columns)
    places = list(_legend_places(legend, width))
    top = size[1] * rows
    height = top + (places[-1][1] + LEGEND_LINE if places else 0)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for number, panel in enumerate(panels):
        lines.append(f'<g transform="translate({size[0] * (number % columns)} {size[1] * (number // columns)})">')
        lines += [*_draw_panel(panel, size), "</g>"]
    for style, (name, (x, y)) in enumerate(zip(legend, places, strict=True)):
        lines.append(f'<line x1="{x}" y1="{top + y}" x2="{x + 22}" y2="{top + y}" {_stroke(style)}/>')
        lines.append(f'<text x="{x + 28}" y="{top + y + 4}">{html.escape(shorten(name))}</text>')
    return "\n".join([*lines, "</svg>", ""])


def axis_ticks(values: Iterable[float]) -> list[float]:
    """Return ticks that enclose all values: at distances of 1, 2 or 5 times a power of 10."""
    known = list(values) or [0.0, 1.0]
    low, high = min(known), max(known)
    span = max(high - low, 1e-6 * max(abs(low), abs(high)), 1e-9)
    power = 10.0 ** math.floor(math.log10(span / 5))
    step = next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= 6)
    start, end = math.floor(low / step - 0.1), math.ceil(high / step + 0.1)
    start = max(start, 0) if low >= 0 else start  # no room for negative values where there are none
    return [number * step for number in range(start, end + 1)]


def log_ticks(values: Iterable[float]) -> list[float]:
    """Return ticks of a logarithmic axis: powers of 10, and between them 2 and 5 times these if there are few."""
    known = list(values)
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    factors = (1, 2, 5) if high - low <= 3 else (1,)
    ticks = [factor * 10.0**power for power in range(low, high + 1) for factor in factors]
    begin = max((tick for tick in ticks if tick <= min(known)), default=ticks[0])
    end = min((tick for tick in ticks if tick >= max(known)), default=ticks[-1])
    return [tick for tick in ticks if begin <= tick <= end]


def place_labels(
    points: Sequence[tuple[float, float]], widths: Sequence[float], area: Box, obstacles: Sequence[Box] = ()
) -> list[Box]:
    """Return a box for the label of each point: near it and in `area`, off other labels, points and obstacles."""
    marks = [*obstacles, *((x - 6.0, y - 6.0, x + 6.0, y + 6.0) for x, y in points)]
    placed: list[Box] = []
    for (x, y), width in zip(points, widths, strict=True):
        candidates = [box for distance in (8, 14, 20, 30, 44, 60) for box in _around(x, y, width, distance)]
        inside = [box for box in candidates if _is_inside(box, area)] or candidates
        # The first of the least overlapping, and so the nearest.
        placed.append(min(inside, key=lambda box: sum(_overlap(box, other) for other in (*marks, *placed))))
    return placed


def shorten(text: str) -> str:
    """Cut a label that has no room."""
    return text if len(text) <= MAX_LABEL else f"{text[: MAX_LABEL - 1]}…"


def tick_text(value: float) -> str:
    """Return the text of a tick: 20000 is 20k, 1500000 is 1.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1000 if unit == 'k' else size):.4g}{unit}".replace("-", "−")
    return f"{round(value, 10):.6g}".replace("-", "−")


def _draw_panel(panel: Panel, size: tuple[int, int]) -> Iterator[str]:
    xs, ys = panel.values
    log = panel.log_x and min(xs) > 0
    x_ticks = list(panel.x_ticks) or (log_ticks(xs) if log else axis_ticks(xs))
    y_ticks = axis_ticks(ys)
    # Lines reach to the right end; points and their labels need room beside them.
    first, last = (min([*x_ticks, *xs]), max([*x_ticks, *xs] if panel.points else xs))
    last = last if last > first else first + 1.0  # all values are equal
    x_ticks = [tick for tick in x_ticks if tick <= last * (1 + 1e-9)]
    area: Box = (LEFT, TOP, size[0] - RIGHT, size[1] - BOTTOM)

    def x_at(value: float) -> float:
        share = math.log(value / first) / math.log(last / first) if log else (value - first) / (last - first)
        return round(area[0] + (area[2] - area[0]) * share, 1)

    def y_at(value: float) -> float:
        return round(area[3] - (area[3] - area[1]) * (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]), 1)

    middle = (area[0] + area[2]) / 2
    yield f'<text x="{LEFT}" y="20" font-weight="bold">{html.escape(panel.title)}</text>'
    yield f'<text x="{middle}" y="{size[1] - 10}" text-anchor="middle" fill="#555">{html.escape(panel.x_title)}</text>'
    turned = f'transform="translate(14 {(area[1] + area[3]) / 2}) rotate(-90)"'
    yield f'<text {turned} text-anchor="middle" fill="#555">{html.escape(panel.y_title)}</text>'
    for tick in y_ticks:
        yield f'<line x1="{area[0]}" y1="{y_at(tick)}" x2="{area[2]}" y2="{y_at(tick)}" stroke="#e4e4e4"/>'
        yield f'<text x="{area[0] - 6}" y="{y_at(tick) + 4}" text-anchor="end" fill="#666">{tick_text(tick)}</text>'
    for tick in x_ticks:
        text = tick_text(tick)
        # The last label has little room beside the panel: a wide one moves to the left.
        center = round(min(x_at(tick), size[0] - 2 - TICK_LETTER * len(text) / 2), 1)
        yield f'<line x1="{x_at(tick)}" y1="{area[3]}" x2="{x_at(tick)}" y2="{area[3] + 4}" stroke="#888"/>'
        yield f'<text x="{center}" y="{area[3] + 17}" text-anchor="middle" fill="#666">{text}</text>'
    yield f'<line x1="{area[0]}" y1="{area[3]}" x2="{area[2]}" y2="{area[3]}" stroke="#888"/>'
    for name, value in panel.references:
        y = y_at(value)
        yield f'<line x1="{area[0]}" y1="{y}" x2="{area[2]}" y2="{y}" stroke="#444" stroke-dasharray="5 4"/>'
        yield f'<text x="{area[0] + 4}" y="{y - 4}" fill="#444" font-size="11">{html.escape(shorten(name))}</text>'
    obstacles = []
    for line in panel.lines:
        places = [(x_at(x), y_at(y)) for x, y in zip(line.x, line.y, strict=True)]
        if line.step:
            corners = [corner for (_, y), (x, below) in itertools.pairwise(places) for corner in ((x, y), (x, below))]
            places = [*places[:1], *corners]
            obstacles += [_box_of(begin, end) for begin, end in itertools.pairwise(places)]
        yield from _draw_line(line, places)
    places = [(x_at(point.x), y_at(point.y)) for point in panel.points]
    yield from _draw_points(panel.points, places, area, obstacles)


def _draw_line(line: Line, places: Sequence[tuple[float, float]]) -> Iterator[str]:
    if not places:
        return
    path = "M" + "L".join(f"{x} {y}" for x, y in places)
    yield f'<path d="{path}" fill="none" {_stroke(line.style, dashed=line.dashed)}/>'
    if not line.step and len(places) <= 30:
        for x, y in places:
            yield f'<circle cx="{x}" cy="{y}" r="2.6" fill="{_colour(line.style)}"/>'


def _draw_points(
    points: Sequence[Point], places: Sequence[tuple[float, float]], area: Box, obstacles: Sequence[Box]
) -> Iterator[str]:
    labels = [shorten(point.label) for point in points]
    boxes = place_labels(places, [LETTER * len(label) for label in labels], area, obstacles)
    for point, label, (x, y), box in zip(points, labels, places, boxes, strict=True):
        nearest = (min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3]))
        if math.dist(nearest, (x, y)) > 12:
            ends = f'x1="{x}" y1="{y}" x2="{nearest[0]:.1f}" y2="{nearest[1]:.1f}"'
            yield f'<line {ends} stroke="#aaa" stroke-width="0.8"/>'
        opacity = ' fill-opacity="0.45"' if point.faint else ""
        yield f'<circle cx="{x}" cy="{y}" r="5" fill="{_colour(point.style)}"{opacity}/>'
        at = f'x="{box[0]:.1f}" y="{box[3] - 3:.1f}"'
        halo = 'paint-order="stroke" stroke="#fff" stroke-width="3" stroke-linejoin="round"'
        yield f'<text {at} font-size="11" {halo}>{html.escape(label)}</text>'


def _around(x: float, y: float, width: float, distance: float) -> Iterator[Box]:
    """Yield boxes around a point: right, left, above and below, then diagonally."""
    half = LABEL_HEIGHT / 2
    middle, right, left = x - width / 2, x + distance, x - distance - width
    above, below = y - distance - LABEL_HEIGHT, y + distance
    corners = (
        (right, y - half), (left, y - half), (middle, above), (middle, below),
        (right, above), (right, below), (left, above), (left, below),
    )  # fmt: skip
    for begin, top in corners:
        yield begin, top, begin + width, top + LABEL_HEIGHT


def _box_of(begin: tuple[float, float], end: tuple[float, float]) -> Box:
    """Return the box of a horizontal or vertical line, two pixels wide on each side."""
    (left, right), (top, bottom) = (sorted(ends) for ends in zip(begin, end, strict=True))
    return left - 2, top - 2, right + 2, bottom + 2


def _is_inside(box: Box, area: Box) -> bool:
    return box[0] >= area[0] and box[1] >= area[1] and box[2] <= area[2] and box[3] <= area[3]


def _overlap(box: Box, other: Box) -> float:
    width = min(box[2], other[2]) - max(box[0], other[0])
    height = min(box[3], other[3]) - max(box[1], other[1])
    return width * height if width > 0 and height > 0 else 0.0


def _legend_places(names: Sequence[str], width: float) -> Iterator[tuple[float, float]]:
    """Yield the place of each name, from left to right, in as many lines as needed."""
    x, y = float(LEFT), 10.0
    for name in names:
        needed = 44 + 6.8 * len(shorten(name))
        if x > LEFT and x + needed > width:
            x, y = float(LEFT), y + LEGEND_LINE
        yield round(x, 1), y
        x += needed


def _colour(style: int) -> str:
    return COLOURS[style % len(COLOURS)]


def _stroke(style: int, *, dashed: bool = False) -> str:
    dash = DASHES[1] if dashed else DASHES[style // len(COLOURS) % len(DASHES)]
    return f'stroke="{_colour(style)}" stroke-width="1.8"' + (f' stroke-dasharray="{dash}"' if dash else "")
