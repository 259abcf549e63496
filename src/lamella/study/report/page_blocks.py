"""A page as blocks (headings, paragraphs, lists, tables, figures), written as Markdown or as one HTML file.

Texts are plain, except that `code` in backticks is set as code. Everything else in them is escaped.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

_CODE = re.compile(r"(`[^`]+`)")
_MARKUP = re.compile(r"[*]|<(?=[A-Za-z/!?])|\](?=\()")  # a `<` before anything else is no tag, as in `p < 0.001`
_STYLE = """
main { padding-top: 28px; padding-bottom: 40px; }
h2 { margin: 1.8em 0 .4em; }
h3 { margin: 1.6em 0 .5em; }
.scroll { margin: 0 0 18px; padding: 0; }
th { padding: 6px 10px; vertical-align: bottom; color: var(--quiet); }
thead th { position: static; padding: 6px 10px; white-space: normal; }
td { vertical-align: top; }
td.text { max-width: 46ch; white-space: normal; overflow: visible; }
figure { margin: 18px 0; overflow-x: auto; }
svg { max-width: 100%; height: auto; border-radius: 10px; }
"""


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is the title of the page."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Prose:
    """A text in Markdown, of a file that the author of the page wrote."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table; `left` has the places of the columns with words, which are set to the left."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[int] = frozenset({0})


@dataclass(frozen=True)
class Figure:
    """A drawing in SVG: inside an HTML file, beside a Markdown file as `name`."""

    name: str
    svg: str
    description: str


Block = Heading | Paragraph | Prose | Bullets | Table | Figure


def markdown_page(blocks: Sequence[Block]) -> str:
    """Return the blocks as Markdown; figures are links to files beside it."""
    return "\n\n".join(text for block in blocks if (text := markdown_block(block))) + "\n"


def markdown_block(block: Block) -> str:
    """Return a block as Markdown."""
    match block:
        case Heading(text, level):
            return f"{'#' * level} {_markdown(text)}"
        case Paragraph(text):
            return _markdown(text)
        case Prose(text):
            return text.strip()
        case Bullets(items):
            return "\n".join(f"- {_markdown(item)}" for item in items)
        case Figure(name, _, description):
            return f"![{_markdown(description)}]({name})"
        case Table(titles, rows, left):
            rule = ["---" if place in left else "---:" for place in range(len(titles))]
            lines = [list(map(_markdown_cell, titles)), rule, *(list(map(_markdown_cell, row)) for row in rows)]
            return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def html_page(blocks: Sequence[Block], *, title: str) -> str:
    """Return the blocks as one HTML file without scripts; its policy forbids every request."""
    style = (resources.files("lamella.study.report") / "assets" / "report.css").read_text("utf-8") + _STYLE
    body = "\n".join(_html_block(block) for block in blocks if block != Paragraph(""))
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{html.escape(title)} · Lamella report</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _html_block(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{_html(text)}</h{level}>"
        case Paragraph(text):
            return f"<p>{_html(text)}</p>"
        case Prose(text):
            return "\n".join(f"<p>{_html_prose(part)}</p>" for part in text.strip().split("\n\n") if part)
        case Bullets(items):
            return "<ul>" + "".join(f"<li>{_html(item)}</li>" for item in items) + "</ul>"
        case Figure(_, svg, description):
            return f'<figure role="img" aria-label="{html.escape(description)}">\n{svg}</figure>'
        case Table(titles, rows, left):
            head = "".join(_html_cell("th", title, place in left) for place, title in enumerate(titles))
            lines = [
                "<tr>" + "".join(_html_cell("td", cell, place in left) for place, cell in enumerate(row)) + "</tr>"
                for row in rows
            ]
            table = "\n".join(["<table>", f"<thead><tr>{head}</tr></thead>", "<tbody>", *lines, "</tbody>", "</table>"])
            return f'<div class="scroll">\n{table}\n</div>'


def _html_cell(tag: str, text: str, is_text: bool) -> str:
    words = ' class="text"' if is_text else ""
    return f"<{tag}{words}>{_html(text)}</{tag}>"


def _html(text: str) -> str:
    return "".join(
        f"<code>{html.escape(part[1:-1])}</code>" if _CODE.fullmatch(part) else html.escape(part)
        for part in _CODE.split(text)
    )


def _html_prose(text: str) -> str:
    """Return a paragraph of Markdown as HTML: code, bold, emphasis and links; everything else is escaped."""
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", _html(text))
    text = re.sub(r"\*(.+?)\*", r"<em>\1</em>", text)
    return re.sub(r"\[([^]]+)\]\(([\w./#-]+)\)", r'<a href="\2">\1</a>', text)


def _markdown(text: str) -> str:
    """Escape what Markdown would take for markup: HTML, emphasis, links."""
    return "".join(
        part
        if _CODE.fullmatch(part)
        else re.sub(_MARKUP, lambda match: "&lt;" if match[0] == "<" else f"\\{match[0]}", part)
        for part in _CODE.split(" ".join(text.split()))
    )


def _markdown_cell(text: str) -> str:
    return _markdown(text).replace("|", r"\|")
