"""Hangul: write syllables as one character each, whatever normal form a text has.

A syllable is one character (NFC, "한") or two to three jamo (NFD, "ㅎㅏㄴ", as some file systems and editors write it).
Tokenizers know the first form only.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

# A leading consonant, a vowel, perhaps a trailing consonant; or a syllable without a trailing consonant, and one.
_JAMO = re.compile("[\u1100-\u1112][\u1161-\u1175][\u11a8-\u11c2]?|[\uac00-\ud7a3][\u11a8-\u11c2]")


def compose_hangul(text: str) -> str:
    """Return the text with every syllable of jamo as one character; nothing else changes.

    >>> compose_hangul("\u1112\u1161\u11ab\u1100\u1173\u11af cafe\u0301") == "한글 cafe\u0301"
    True
    """
    return text if text.isascii() else _JAMO.sub(_compose, text)


def compose_with_places(text: str) -> tuple[str, Sequence[int] | None]:
    """Return the composed text, and where each of its characters begins in `text`, with the end of `text` at last.

    The places are None if nothing changes.
    """
    if text.isascii():
        return text, None
    pieces: list[str] = []
    places: list[int] = []
    done = 0
    for match in _JAMO.finditer(text):
        composed = _compose(match)
        if len(composed) == 1:
            pieces += text[done : match.start()], composed
            places += range(done, match.start() + 1)
            done = match.end()
    if not pieces:
        return text, None
    return "".join((*pieces, text[done:])), [*places, *range(done, len(text) + 1)]


def _compose(match: re.Match[str]) -> str:
    return unicodedata.normalize("NFC", match[0])
