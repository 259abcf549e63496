"""Extract the text of a Word document (docx), with the standard library: it is a zip archive of XML files.

This is done in a process of its own: see `text_process`.
"""

from __future__ import annotations

import io
import posixpath
import re
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO
from xml.etree import ElementTree  # nosec B405  # expat limits how far entities expand

MOST_XML = 64 << 20  # bytes of an unpacked part; a book has 10 MB
OLD_WORD = b"\xd0\xcf\x11\xe0"  # how files of Word 97 begin, and docx files with a password
LOCKED = "expected a docx file, got one with a password or in the older format doc; save it as docx without a password"
HUGE = "expected a docx file of reasonable size, got one that unpacks to far too much; save it as text"
DAMAGED = "expected a docx file, got a damaged one; open it in a word processor and save it again"
MAIN_PART = "/officeDocument"  # end of the relation from the package to the main part
NOTES = ("footnotes.xml", "endnotes.xml")
BREAKS = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
_BLANK_LINES = re.compile(r"[\r\n]\s*[\r\n]")  # blank lines separate paragraphs, so a paragraph has none


class UnreadableDocxError(ValueError):
    """The reason why a docx file has no text that can be read."""


def paragraphs_of_docx(data: bytes, most_characters: int) -> list[str]:
    """Return the paragraphs of a docx file, footnotes last; a row of a table is a paragraph.

    Deleted text, headers, footers and comments are left out.
    """
    if data.startswith(OLD_WORD):
        raise UnreadableDocxError(LOCKED)
    found: list[str] = []
    length = 0
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            main = _main_part(archive)
            notes = [posixpath.join(posixpath.dirname(main), name) for name in NOTES]
            for part in [main, *(name for name in notes if name in archive.NameToInfo)]:
                with archive.open(part) as file:
                    for paragraph in _paragraphs(_Limited(file)):
                        found.append(paragraph)
                        length += len(paragraph)
                        if length > most_characters:
                            raise UnreadableDocxError(
                                f"expected at most {most_characters:,} characters, got more; split it"
                            )
    except MemoryError:
        raise UnreadableDocxError(HUGE) from None
    except UnreadableDocxError:
        raise
    # An unknown encoding is a LookupError, one of several bytes per character a ValueError.
    except (zipfile.BadZipFile, zlib.error, ElementTree.ParseError, LookupError, ValueError, EOFError, OSError):
        raise UnreadableDocxError(DAMAGED) from None
    except (RuntimeError, NotImplementedError):  # an encrypted part, or an unknown compression
        raise UnreadableDocxError(LOCKED) from None
    if not found:
        raise UnreadableDocxError("expected a docx file with text, got one without any")
    return found


def _main_part(archive: zipfile.ZipFile) -> str:
    """Return the name of the main part: `word/document.xml` in nearly all files."""
    with archive.open("_rels/.rels") as file:
        for _, element in ElementTree.iterparse(_Limited(file)):  # nosec B314
            if element.get("Type", "").endswith(MAIN_PART):
                return element.get("Target", "").lstrip("/")
    raise KeyError(MAIN_PART)


def _paragraphs(file: _Limited) -> Iterator[str]:
    """Yield the paragraphs of a part in the order of their ends; cells of a table are joined by tabs."""
    open_paragraphs: list[list[str]] = []  # a text box has paragraphs inside a paragraph
    open_rows: list[list[str]] = []  # the cells of rows; a cell may hold a table
    skipped = 0
    for event, element in ElementTree.iterparse(file, events=("start", "end")):  # nosec B314
        name = element.tag.rpartition("}")[2]  # the namespace differs between the two variants of the standard
        if name in ("Fallback", "del", "moveFrom"):  # another form of what precedes it; deleted; moved elsewhere
            skipped += 1 if event == "start" else -1
        if event == "start":
            if name == "p":
                open_paragraphs.append([])
            elif name == "tr":
                open_rows.append([])
            continue
        if skipped:
            open_paragraphs[-1:] = [] if name == "p" and open_paragraphs else open_paragraphs[-1:]
            open_rows[-1:] = [] if name == "tr" and open_rows else open_rows[-1:]
        elif name == "t" and open_paragraphs:
            open_paragraphs[-1].append(element.text or "")
        elif name in BREAKS and open_paragraphs:
            open_paragraphs[-1].append(BREAKS[name])
        elif name in ("p", "tr"):
            pieces = open_paragraphs.pop() if name == "p" else open_rows.pop()
            text = ("" if name == "p" else "\t").join(pieces).strip()
            text = _BLANK_LINES.sub("\n", text)
            if text and open_rows:
                open_rows[-1].append(text)
            elif text:
                yield text
        if name in ("p", "tr"):
            element.clear()  # its memory


class _Limited(io.RawIOBase):
    """A file that ends with an error after `MOST_XML` bytes: a small archive can unpack to gigabytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._left = file, MOST_XML

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size if size >= 0 else self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise UnreadableDocxError(HUGE)
        return data
