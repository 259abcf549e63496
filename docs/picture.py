"""Draw the README's picture, F1 by size of the file to ship, from results/; `--check` reports whether it is current."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "thin-vs-full.svg"

# For each encoder: a thin reader, the same encoder with all weights trained on the same data, and the one that ships.
RUNS = {
    "MPNet": ("mpnet-taught", "mpnet-full-taught", "mpnet-contrast-start"),
    "e5-small": ("e5-small-thin", "e5-small-full-doubt", "e5-small-contrast-start"),
    "MiniLM-L6": ("minilm-thin-long", "minilm-full-long", "minilm-contrast-start"),
}
SHIPPED = {
    "mpnet-contrast-start": "models/mpnet",
    "e5-small-contrast-start": "models/e5-small",
    "minilm-contrast-start": "src/lamella/readers/default",
}
COLORS = {"MPNet": "#0072b2", "e5-small": "#d55e00", "MiniLM-L6": "#009e73"}  # distinct for colour-blind eyes
WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 696, 56, 304
MEGABYTES, F1 = (0.8, 600.0), (73.0, 83.0)


def draw() -> str:
    """Return the picture as SVG."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
            'font-size="13" fill="#222">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
            f'<text x="{LEFT}" y="26" font-size="16" font-weight="bold">'
            "Within 1 F1 of full fine-tuning, from a file 20 to 30 times smaller</text>",
            f'<text x="{LEFT}" y="44" fill="#666">● thin reader: at most 5 % of the weights   '
            "○ all weights   ◆ the reader that ships: thin, more data</text>",
            *_axes(),
            *(line for name, runs in RUNS.items() for line in _encoder(name, *runs)),
            "</svg>",
            "",
        ]
    )


def _axes() -> Iterator[str]:
    for f1 in range(math.ceil(F1[0]) + 1, math.floor(F1[1]) + 1, 2):
        y = _y(f1)
        yield f'<line x1="{LEFT}" y1="{y}" x2="{RIGHT}" y2="{y}" stroke="#e4e4e4"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end" fill="#666">{f1}</text>'
    for size in (1, 2, 5, 10, 20, 50, 100, 200, 500):
        x = _x(size)
        yield f'<line x1="{x}" y1="{BOTTOM}" x2="{x}" y2="{BOTTOM + 5}" stroke="#666"/>'
        yield f'<text x="{x}" y="{BOTTOM + 20}" text-anchor="middle" fill="#666">{size} MB</text>'
    yield f'<line x1="{LEFT}" y1="{BOTTOM}" x2="{RIGHT}" y2="{BOTTOM}" stroke="#666"/>'
    yield (
        f'<text x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 14}" text-anchor="middle">'
        "size of the file of a reader, ◆ fp16, others fp32 (log scale)</text>"
    )
    yield (
        f'<text x="18" y="{(TOP + BOTTOM) / 2}" text-anchor="middle" '
        f'transform="rotate(-90 18 {(TOP + BOTTOM) / 2})">F1, SQuAD 2.0 dev half</text>'
    )


def _encoder(encoder: str, thin: str, full: str, shipped: str) -> Iterator[str]:
    color = COLORS[encoder]
    (x1, y1, label1), (x2, y2, label2), (x3, y3, label3) = (_point(run) for run in (thin, full, shipped))
    yield f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}" stroke-dasharray="2 4"/>'
    yield f'<circle cx="{x2}" cy="{y2}" r="6" fill="#fff" stroke="{color}" stroke-width="2"/>'
    yield f'<circle cx="{x1}" cy="{y1}" r="6" fill="{color}"/>'
    yield f'<path d="M{x3} {round(y3 - 7, 1)}l7 7l-7 7l-7 -7z" fill="{color}" stroke="#fff"/>'
    x, y = round(min(x1, x3) - 12, 1), round(y3 + 4, 1)
    yield f'<text x="{x}" y="{y}" text-anchor="end" fill="{color}" font-weight="bold">{encoder}</text>'
    yield f'<text x="{x1}" y="{y1 + 22}" fill="{color}">{label1}</text>'
    yield f'<text x="{x2}" y="{y2 + 22}" text-anchor="middle" fill="{color}">{label2}</text>'
    yield f'<text x="{round(x3 + 12, 1)}" y="{round(y3 - 4, 1)}" fill="{color}">{label3}</text>'


def _point(run: str) -> tuple[float, float, str]:
    result = json.loads((ROOT / "results" / f"{run}.json").read_text(encoding="utf-8"))
    f1, size = result["scores"]["crossfit"]["f1"], result["cost"]["model_bytes"]
    if run in SHIPPED:
        size = (ROOT / SHIPPED[run] / "model.safetensors").stat().st_size
    megabytes = size / 1e6
    return _x(megabytes), _y(f1), f"{f1:.1f} · {megabytes:.{0 if megabytes >= 10 else 1}f} MB"


def _x(megabytes: float) -> float:
    low, high = map(math.log, MEGABYTES)
    return round(LEFT + (RIGHT - LEFT) * (math.log(megabytes) - low) / (high - low), 1)


def _y(f1: float) -> float:
    return round(BOTTOM - (BOTTOM - TOP) * (f1 - F1[0]) / (F1[1] - F1[0]), 1)


def main() -> None:
    """Write the picture, or compare it with the file."""
    if "--check" in sys.argv[1:]:
        current = PICTURE.is_file() and PICTURE.read_text(encoding="utf-8") == draw()
        sys.exit(None if current else f"{PICTURE.relative_to(ROOT)}: is outdated; run: python docs/picture.py")
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
