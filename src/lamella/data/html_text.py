"""Extract the text of an HTML page, as a browser shows it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from lamella.text_encoding import unify_line_ends

BETWEEN = "\n\n"  # blocks; in other documents, pages and paragraphs
_BLOCKS = {
    "address", "article", "aside", "blockquote", "body", "br", "caption", "center", "dd", "details", "dialog",
    "div", "dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6",
    "head", "header", "hr", "html", "legend", "li", "main", "menu", "nav", "ol", "optgroup", "option", "p", "pre",
    "search", "section", "select", "summary", "table", "tbody", "tfoot", "thead", "title", "tr", "ul",
}  # fmt: skip
_CELLS = {"td", "th"}
_HIDDEN = {"noscript", "script", "style", "svg", "template"}  # a browser does not show their content
_PAGE = re.compile(  # a comment is atomic: else the time to try each as a part of the one before is exponential
    r"\s*(?:<\?xml.*?\?>\s*)?(?:(?><!--.*?-->)\s*)*+<(?:!doctype\s+html|html|head|body)\b", re.I | re.S
)
_FRAGMENT = re.compile(r"\s*<([a-z][a-z0-9]*)(?:\s[^<>]*)?>.*</\1\s*>", re.I | re.S)


def looks_like_html(text: str) -> bool:
    """Check whether a text is an HTML page, or a fragment that begins with a closed block element."""
    if _PAGE.match(text):
        return True
    fragment = _FRAGMENT.match(text)
    return fragment is not None and fragment[1].lower() in _BLOCKS


def text_of_html(html: str) -> str:
    """Return the text of an HTML page: no tags, scripts or styles, entities decoded, a blank line between blocks.

    With single line breaks, a heading would be part of the sentence after it.

    >>> text_of_html("<h1>Titan</h1><p>Found by <b>Huygens</b> &amp; co.</p><script>x = 1</script>")
    'Titan\\n\\nFound by Huygens & co.'
    """
    parser = _TextParser()
    parser.feed(unify_line_ends(html))
    parser.close()
    lines = ("".join(parser.pieces)).split("\n")
    return BETWEEN.join(line.strip() for line in lines if line.strip())


class _TextParser(HTMLParser):
    """Collects the visible pieces of text; a line break separates blocks."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self._hidden = 0
        self._preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._separate(tag)
        self._hidden += tag in _HIDDEN
        self._preformatted += tag == "pre"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._separate(tag)  # it has no content to hide

    def handle_endtag(self, tag: str) -> None:
        if tag in _HIDDEN:
            self._hidden = max(0, self._hidden - 1)
        if tag == "pre":
            self._preformatted = max(0, self._preformatted - 1)
        self._separate(tag)

    def parse_marked_section(self, i: int, report: bool = True) -> int:
        """Read `<![if ...]>` and the like; an unknown section is a comment for browsers, and an error for Python."""
        try:
            return super().parse_marked_section(i, report)
        except AssertionError:
            return self.parse_bogus_comment(i)

    def handle_data(self, data: str) -> None:
        if self._preformatted and not self._hidden:
            self.pieces.append(data)
        elif not self._hidden:
            self._add(re.sub(r"\s+", " ", data))

    def _separate(self, tag: str) -> None:
        if tag in _BLOCKS:
            self._add("\n")
        elif tag in _CELLS:
            self._add(" ")

    def _add(self, piece: str) -> None:
        """Add a piece whose white space continues that of the piece before it."""
        ends_in_space = self.pieces and self.pieces[-1][-1:].isspace()
        piece = piece.lstrip(" ") if ends_in_space else piece
        if piece:
            self.pieces.append(piece)
