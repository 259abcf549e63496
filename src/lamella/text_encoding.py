"""Decode the bytes of a text file: UTF-8, Unicode with a byte order mark, or an encoding given by name."""

from __future__ import annotations

import codecs
import re
import unicodedata

from lamella.errors import UnreadableError, UsageError

_MARKS = (  # UTF-32 first: its little-endian mark begins with the mark of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_SAMPLE = 100_000  # bytes that a guess looks at
_DECLARATION = re.compile(  # of an HTML page, at its beginning
    rb"<(?:meta\s|\?xml\s)[^<>]{0,200}?(?:charset|encoding)\s{0,9}=\s{0,9}[\"']?([\w:.-]{1,40})", re.I
)
_DECLARED = 4096  # bytes in which it is looked for
_PAGES = re.compile(r"big5\w*|cp\d+|euc_\w+|gb\w+|iso8859-\d+|iso2022_\w+|koi8-\w|mac-\w+|shift_jis\w*|tis-620")
_LARGER = {"euc_kr": "cp949", "gb2312": "gb18030", "gbk": "gb18030", "iso8859-1": "cp1252", "shift_jis": "cp932"}


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
            if suspect == "utf-8-sig":
                advice = "nearly all else is UTF-8, so the file is damaged there; save it again"
                raise UnreadableError(f"{message}; {advice}.") from None
            raise UnreadableError(f"{message} (probably {suspect}); {advice.format(encoding=suspect)}.") from None
        raise UnreadableError(f"{message}; the file is damaged or has another encoding.") from None
    if codec == "utf-8-sig" and (utf16 := _guess_utf16(data)):
        raise UnreadableError(
            f"{name}: expected UTF-8 text, got zero bytes (probably {utf16}); {advice.format(encoding=utf16)}."
        )
    return text


def guess_encoding(data: bytes) -> str:
    """Guess the encoding of text that is not UTF-8, from the characters that each candidate would give.

    The encoding that an HTML page declares is believed: most of its bytes are markup, whatever its language. UTF-8 with
    a few wrong bytes, such as a file that was cut inside a character, is still UTF-8 (`utf-8-sig`).
    """
    sample = data[:_SAMPLE]
    if utf16 := _guess_utf16(data):
        return utf16
    if _is_damaged_utf8(sample):
        return "utf-8-sig"
    if declared := _declared_encoding(data):
        return declared
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


def page_encoding(data: bytes) -> str | None:
    """Return the encoding that an HTML page declares if it is not UTF-8, which some declare otherwise; else None."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return None if _is_damaged_utf8(data[:_SAMPLE]) else _declared_encoding(data)
    return None


def unify_line_ends(text: str) -> str:
    """Return a text with `\\n` as line ends, as Python's `open` returns it."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _declared_encoding(data: bytes) -> str | None:
    """Return the encoding that an HTML page declares, or the one that browsers read instead, which has more letters."""
    found = _DECLARATION.search(data[:_DECLARED])
    if found is None:
        return None
    try:
        name = codecs.lookup(found[1].decode("ascii", "replace")).name
    except LookupError:
        return None
    return _LARGER.get(name, name) if _PAGES.fullmatch(name) else None


def _is_damaged_utf8(sample: bytes) -> bool:
    """Whether nearly all characters beyond ASCII are UTF-8; in other encodings, hardly any is by chance."""
    text = sample.decode("utf-8", "replace")
    wrong = text.count("\ufffd")
    return sum(character > "\x7f" for character in text) - wrong > 3 * wrong


def _guess_utf16(data: bytes) -> str | None:
    """Return the kind of UTF-16 if every second byte is often zero, as in text of a western language."""
    sample = data[:_SAMPLE]
    first, second = sample[0::2].count(0), sample[1::2].count(0)
    if max(first, second) <= len(sample) / 8 or min(first, second) > len(sample) / 8:
        return None
    return "utf-16-le" if second > first else "utf-16-be"
