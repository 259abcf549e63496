"""Blank the markup of Markdown: the words keep their places, so that lines and offsets are those of the file.

Every pattern takes time in proportion to the text, whatever the text is: repetitions are bounded, or end where the next
match could begin.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

Span = tuple[int, int]

_HTML_NAMES = (
    "a|abbr|b|blockquote|br|center|cite|code|dd|del|details|div|dl|dt|em|figcaption|figure|font|h[1-6]|hr|i|img|ins|kbd|li"
    "|mark|ol|p|picture|pre|q|s|samp|small|source|span|strike|strong|sub|summary|sup|table|tbody|td|tfoot|th|thead|tr|tt"
    "|u|ul|var|video"
)
_TAG = re.compile(
    rf"</?(?:{_HTML_NAMES})(?:[ \t]{{1,9}}(?:open|[a-z-]{{1,30}}=[^<>\n]{{0,500}})|[ \t]{{0,9}}/?)>"
)  # other words in angle brackets are content, such as List<String> or <name>
_LINE_BEGIN = re.compile(  # a heading; a quotation, with or without a heading
    r"^[ \t]{0,3}#{1,6}(?=[ \t])|^[ \t]{0,20}(?:>[ \t]?){1,20}(?:#{1,6}(?=[ \t]))?", re.M
)
_LINK = re.compile(
    r"(!?\[)([^\[\]]{0,500})(\]\((?:[^()\s]|\([^()\s]{0,200}\)){0,1000}(?:[ \t]{1,9}\"[^\"\n]{0,300}\")?\))"
)


def _emphasis(mark: str, count: int) -> re.Pattern[str]:
    """Return the pattern of words between marks, on one line or several: `2**20` and `f(*args)` have no emphasis."""
    line = rf"[^{mark}\n]{{1,300}}"
    marks = rf"[{mark}]{{{count}}}"
    return re.compile(
        rf"(?<![\w\\/.{mark}])({marks})(?=[^\s.,;:/{mark}])({line}(?:\n{line}){{0,5}})"
        rf"(?<=[^\s/{mark}])({marks})(?![\w{mark}])"
    )


_EMPHASES = [_emphasis(mark, count) for mark in "*_" for count in (1, 2, 3)]  # the inner ones first
_NAME = re.compile(r"[a-z0-9]+")  # __init__ is a name rather than bold
_FENCE = re.compile(r"^[ \t>]{0,40}(?:(?:[-*+]|\d{1,3}[.)])[ \t]{1,4})?(`{3,}|~{3,})([^\n]*)$", re.M)
_TICKS = re.compile(r"(?<!\\)`+|\n[ \t]*\n")
_NO_LINE_END = re.compile(r"[^\n]")
_BORDER = re.compile(r"(?<!\\)\|")


def blank_markup(text: str) -> str:
    """Return a text of the same length, with spaces instead of markup; code stays as it is.

    >>> blank_markup("# Titan" + chr(10) + "Found by [Huygens](people.md) in **1655**.")
    '  Titan\\nFound by  Huygens             in   1655  .'
    """
    blocks = list(_code_blocks(text))
    masked = _replace(text, [(fence, _masked(text, fence)) for fence, _ in blocks])
    spans = list(_code_spans(masked))
    masked = _replace(masked, [(span, _masked(masked, span)) for span, _ in spans])
    blanked = _blank_comments(masked)
    blanked = _LINE_BEGIN.sub(_blank, blanked)
    blanked = _blank_tables(blanked)
    blanked = _TAG.sub(_blank, blanked)
    for pattern in _EMPHASES:
        blanked = pattern.sub(_blank_marks, blanked)
    for _ in range(2):  # a picture may be the text of a link
        blanked = _LINK.sub(_blank_marks, blanked)
    code = [
        ((begin, end), _blanked(text[begin:first]) + text[first:last] + _blanked(text[last:end]))
        for (begin, end), (first, last) in sorted(blocks + spans)
        if _MASK in blanked[begin:end]  # else it is in a comment
    ]
    return _replace(blanked, code)


def close_marks(text: str, begin: int, end: int) -> Span:
    """Widen a part of a text by the mark beside it that belongs to a mark in it: of code or of emphasis.

    >>> text = "Repeat it with `--resume`."
    >>> begin, end = close_marks(text, 0, text.index("`."))
    >>> text[begin:end]
    'Repeat it with `--resume`'
    """
    for marks in ("`+", r"\*+", "_+"):
        inside = re.findall(marks, text[begin:end])
        if len(inside) % 2:
            if text.startswith(inside[-1], end):
                end += len(inside[-1])
            elif text.endswith(inside[0], 0, begin):
                begin -= len(inside[0])
    return begin, end


_MASK = "x"  # stands for code while markup is looked for: part of a word, so that code can be emphasised


def _code_blocks(text: str) -> Iterator[tuple[Span, Span]]:
    """Yield the place of each fenced block of code, and the place of its content; the last one may have no end."""
    opening: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opening is None:
            if "`" not in fence[2]:
                opening = fence
        elif fence[1].startswith(opening[1]) and not fence[2].strip():
            yield (opening.start(), fence.end()), (opening.end(), fence.start())
            opening = None
    if opening is not None:
        yield (opening.start(), len(text)), (opening.end(), len(text))


def _code_spans(text: str) -> Iterator[tuple[Span, Span]]:
    """Yield the place of each code span, and the place of its content: it ends with as many backticks as it begins."""
    runs = list(_TICKS.finditer(text))
    ends: list[re.Match[str] | None] = []  # the next run of the same length in the paragraph, for each run
    later: dict[int, re.Match[str]] = {}
    for run in reversed(runs):
        if run[0][0] == "\n":
            later.clear()
            ends.append(None)
        else:
            ends.append(later.get(len(run[0])))
            later[len(run[0])] = run
    done = 0
    for run, end in zip(runs, reversed(ends), strict=True):
        if end is not None and run.start() >= done:
            done = end.end()
            yield (run.start(), done), (run.end(), end.start())


def _blank_comments(text: str) -> str:
    places: list[tuple[Span, str]] = []
    begin = text.find("<!--")
    while begin >= 0 and (end := text.find("-->", begin)) >= 0:
        places.append(((begin, end + 3), _blanked(text[begin : end + 3])))
        begin = text.find("<!--", end + 3)
    return _replace(text, places)


def _blank_tables(text: str) -> str:
    """Blank rules, and the borders of tables: the row before a line such as `|---|:-:|`, and the rows after it."""
    lines = text.split("\n")
    in_table = False
    for number, line in enumerate(lines):
        if "-" in line and not line.strip(" \t|:-"):
            in_table = "|" in line
            if in_table and number:
                lines[number - 1] = _BORDER.sub(" ", lines[number - 1])
            if in_table or "---" in line:
                lines[number] = " " * len(line)
        elif in_table and "|" in line:
            lines[number] = _BORDER.sub(" ", line)
        else:
            in_table = False
    return "\n".join(lines)


def _blank_marks(match: re.Match[str]) -> str:
    if match[1] == "__" and _NAME.fullmatch(match[2]):
        return match[0]
    return " " * len(match[1]) + match[2] + " " * len(match[3])


def _blank(match: re.Match[str]) -> str:
    return " " * len(match[0])


def _blanked(text: str) -> str:
    return _NO_LINE_END.sub(" ", text)


def _masked(text: str, span: Span) -> str:
    return _NO_LINE_END.sub(_MASK, text[span[0] : span[1]])


def _replace(text: str, places: list[tuple[Span, str]]) -> str:
    """Return a text with other parts of the same lengths at some places, which are in order."""
    parts, done = [], 0
    for (begin, end), part in places:
        parts += [text[done:begin], part]
        done = end
    return "".join([*parts, text[done:]])
