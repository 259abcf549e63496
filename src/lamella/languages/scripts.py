"""Scripts: which letters belong to which writing system."""

from __future__ import annotations

import re

SCRIPTS = {
    "latin": re.compile("[A-Za-z\u00c0-\u024f\u1e00-\u1eff]"),
    "greek": re.compile("[\u0370-\u03ff\u1f00-\u1fff]"),
    "cyrillic": re.compile("[\u0400-\u052f]"),
    "hebrew": re.compile("[\u0590-\u05ff]"),
    "arabic": re.compile("[\u0600-\u06ff\u0750-\u077f]"),
    "devanagari": re.compile("[\u0900-\u097f]"),
    "thai": re.compile("[\u0e00-\u0e7f]"),
    "hangul": re.compile("[\u1100-\u11ff\u3130-\u318f\uac00-\ud7af]"),
    "kana": re.compile("[\u3040-\u30ff]"),
    "han": re.compile("[\u3400-\u4dbf\u4e00-\u9fff]"),
}

_NOT_LETTERS = bytes(code for code in range(128) if not chr(code).isalpha())


def main_script(text: str) -> str:
    """Return the script of most letters of a text; `other` if no letter is of a known script."""
    if text.isascii():
        return "latin"
    ascii = text.encode("ascii", "ignore")
    if len(ascii.translate(None, _NOT_LETTERS)) >= len(text) - len(ascii):  # the other scripts have no ASCII letter
        return "latin"
    counts = {script: len(letters.findall(text)) for script, letters in SCRIPTS.items()}
    best = max(counts, key=lambda script: counts[script])
    return best if counts[best] else "other"


def script_share(text: str, script: str) -> float:
    """Return the share of the letters of a text that belong to a script."""
    letters = sum(map(str.isalpha, text))
    return len(SCRIPTS[script].findall(text)) / letters if letters else 0.0
