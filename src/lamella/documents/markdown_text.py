"""Blank the markup of Markdown: the words keep their places, so that lines and offsets are those of the file."""

from __future__ import annotations

import re

_MARKUP = re.compile(
    r"^[ \t]*(?:```|~~~)[^\n]*$"  # the first and the last line of a block of code
    r"|^[ \t]*\|?[ \t]*:?-{3,}[-:| \t]*$"  # the line below the head of a table, or a rule
    r"|^[ \t]{0,3}#{1,6}(?=[ \t])"  # a heading
    r"|^[ \t]*(?:>[ \t]?)+"  # a quotation
    r"|!?\[(?=[^\]\n]*\]\()"  # the begin of a link or picture
    r"|\]\([^)\s]*(?:[ \t]+\"[^\"\n]*\")?\)"  # its end, with the address
    r"|<!--.*?-->|</?[a-zA-Z][^<>\n]*>"  # comments and HTML
    r"|\*\*|__|`+"  # emphasis and code
    r"|(?<!\\)\|",  # the cells of a table
    re.M | re.S,
)
_LINE_ENDS = re.compile(r"[^\n]")


def blank_markup(text: str) -> str:
    """Return a text of the same length, with spaces instead of markup.

    >>> blank_markup("# Titan" + chr(10) + "Found by [Huygens](people.md) in **1655**.")
    '  Titan\\nFound by  Huygens              in   1655  .'
    """
    return _MARKUP.sub(lambda match: _LINE_ENDS.sub(" ", match[0]), text)
