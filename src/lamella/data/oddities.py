"""Characters that a text should not have: control characters, traces of lost ones, text decoded wrongly."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from lamella.data.problems import quote


def odd_characters(text: str) -> Iterator[tuple[str, str]]:
    if text.isascii() and text.isprintable():
        return
    controls = _CONTROL.findall(text)
    if controls:
        yield "control_character", f"has {_code_points(controls)}"
    if "\ufffd" in text:
        yield "replacement_character", f"has U+FFFD {text.count(chr(0xFFFD))} times"
    for match in _MOJIBAKE.finditer(text):
        original = _undo_wrong_decoding(match[0])
        if original is not None:
            yield "mojibake", f"{quote(match[0])} was once {quote(original)}"
            return


_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")

# UTF-8 read as Windows-1252, where `é` becomes `Ã©` and `’` becomes `â€™`. The first byte of a character is followed by
# those that continue it; where letters of real texts would do (`CAFÉ »`), a mark or space does not count as one.
_NEXT = "[\x80-¿€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]"
_NEXT_NOT_MARK = "[\x80-\x9f¡-ª¬-º¼-¿€‚ƒ„†‡ˆ‰ŠŒŽ•˜™šœžŸ]"
_MOJIBAKE = re.compile(
    f"[ÂÃ]{_NEXT}|[ÄÅ]{_NEXT_NOT_MARK}|(?:[ÐÑ]{_NEXT}){{2}}|[âãïìëê]{_NEXT_NOT_MARK}{_NEXT}|ð{_NEXT_NOT_MARK}{_NEXT}{{2}}|ï»¿"
)


def _code_points(characters: Iterable[str]) -> str:
    return ", ".join(f"U+{ord(character):04X}" for character in sorted(set(characters)))


def _undo_wrong_decoding(text: str) -> str | None:
    """The text that UTF-8 bytes read as Windows-1252 once were; bytes that it lacks were read as C1 controls."""
    try:
        return b"".join(character.encode("latin-1" if character <= "\xff" else "cp1252") for character in text).decode(
            "utf-8"
        )
    except UnicodeError:
        return None
