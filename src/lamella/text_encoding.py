"""Decode the bytes of a text file: UTF-8, Unicode with a byte order mark, or an encoding given by name."""

from __future__ import annotations

import codecs
import unicodedata

from lamella.errors import UnreadableError, UsageError

_MARKS = (  # UTF-32 first: its little-endian mark begins with the mark of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_SAMPLE = 100_000  # bytes that a guess looks at


def decode_text(data: bytes, name: str, encoding: str | None = None, *, advice: str = "save it as UTF-8") -> str:
    """Decode text; `name` and `advice` are used in errors, and `{encoding}` in `advice` is the suspected encoding."""
    codec = encoding or next((codec for mark, codec in _MARKS if data.startswith(mark)), "utf-8-sig")
    try:
        text = data.decode(codec)
    except LookupError:
        raise UsageError(
            f"--encoding: expected the name of a text encoding, such as utf-8, cp949 or latin-1, got {encoding!r}."
        ) from None
    except UnicodeDecodeError as error:
        wanted = encoding or codec.removesuffix("-sig").upper()
        message = f"{name}: expected {wanted} text, got byte 0x{data[error.start]:02x} at position {error.start}"
        if codec == "utf-8-sig":
            suspect = guess_encoding(data)
            raise UnreadableError(f"{message} (probably {suspect}); {advice.format(encoding=suspect)}.") from None
        raise UnreadableError(f"{message}; the file is damaged or has another encoding.") from None
    if codec == "utf-8-sig" and (utf16 := _guess_utf16(data)):
        raise UnreadableError(
            f"{name}: expected UTF-8 text, got zero bytes (probably {utf16}); {advice.format(encoding=utf16)}."
        )
    return text


def guess_encoding(data: bytes) -> str:
    """Guess the encoding of text that is not UTF-8, from the characters that each candidate would give."""
    sample = data[:_SAMPLE]
    if utf16 := _guess_utf16(data):
        return utf16
    if sum(byte > 127 for byte in sample) < 0.3 * len(sample.translate(None, b" \t\r\n")):
        return "cp1252"  # mostly ASCII, so a language of western Europe
    for codec, script, least in (
        ("cp949", "HANGUL SYLLABLE", 0.8),
        ("shift_jis", ("HIRAGANA", "KATAKANA"), 0.2),
        ("euc_jp", ("HIRAGANA", "KATAKANA"), 0.2),
        ("gb18030", "CJK", 0.7),
        ("cp1251", "CYRILLIC", 0.8),
    ):
        try:
            text = codecs.getincrementaldecoder(codec)().decode(sample)  # the sample may end inside a character
        except UnicodeDecodeError:
            continue
        letters = [character for character in text if ord(character) > 127 and character.isalpha()]
        matching = sum(unicodedata.name(letter, "").startswith(script) for letter in letters)
        if matching > least * len(letters):
            return codec
    return "cp1252"


def _guess_utf16(data: bytes) -> str | None:
    """Return the kind of UTF-16 if every second byte is often zero, as in text of a western language."""
    sample = data[:_SAMPLE]
    first, second = sample[0::2].count(0), sample[1::2].count(0)
    if max(first, second) <= len(sample) / 8 or min(first, second) > len(sample) / 8:
        return None
    return "utf-16-le" if second > first else "utf-16-be"
