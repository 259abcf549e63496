"""Turn the bytes of a file into text: txt, md, html, pdf or docx."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from pathlib import PurePath

from lamella.data.html_text import BETWEEN
from lamella.documents.text_process import TextProcess
from lamella.errors import UnreadableError, shorten
from lamella.text_encoding import decode_text, guess_encoding, unify_line_ends
from lamella.unpacking import TooLargeFileError, unpack_gzip

KINDS = {
    ".txt": "txt",
    ".text": "txt",
    ".md": "md",
    ".markdown": "md",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".pdf": "pdf",
    ".docx": "docx",
}
TYPES = {
    "text/plain": "txt",
    "text/markdown": "md",
    "text/html": "html",
    "application/pdf": "pdf",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": "docx",
}
COMPRESSED = ".gz"
PDF_SIGNATURE = b"%PDF-"


class UnknownKindError(UnreadableError):
    """A file of a kind that is not supported."""


@dataclass(frozen=True)
class FileText:
    """The text of a file; `pages` are the places in it where the pages of a PDF begin."""

    kind: str
    text: str
    pages: tuple[int, ...] = ()


def kind_of_name(name: str) -> str | None:
    """Return the kind of a file by the ending of its name, before `.gz` if it has that, or None if it is unknown."""
    return KINDS.get(PurePath(_without_gz(name)).suffix.lower())


def text_of_file(
    data: bytes,
    name: str,
    content_type: str = "",
    *,
    process: TextProcess,
    most_bytes: int,
    most_characters: int,
    encoding: str | None = None,
) -> FileText:
    """Return the text of a file; its kind is that of its name, or of `content_type` if the name has no ending.

    Without an `encoding`, text that is not Unicode is decoded by a guess.
    """
    if name.lower().endswith(COMPRESSED):
        data = unpack_gzip(data, name, most_bytes=most_bytes)
    if len(data) > most_bytes:
        size = f"{len(data) / (1 << 20):.1f} MiB"
        raise TooLargeFileError(f"{name}: expected at most {most_bytes >> 20} MiB, got {size}; split the file.")
    kind = _kind(data, name, content_type)
    pages: tuple[int, ...] = ()
    if kind in ("txt", "md"):
        text = _decode(data, name, encoding)
    else:
        if kind == "html":
            data = _decode(data, name, encoding).encode("utf-8", "replace")
        parts = [_clean(part) for part in process.read(data, name, kind, most_characters)]
        text = BETWEEN.join(filter(None, parts))
        if kind == "pdf":
            lengths = (len(part) + len(BETWEEN) if part else 0 for part in parts[:-1])
            pages = tuple(accumulate(lengths, initial=0))
    text = _clean(text)
    if not text.strip():
        raise UnreadableError(f"{name}: expected a text, got an empty file.")
    if len(text) > most_characters:
        raise TooLargeFileError(
            f"{name}: expected at most {most_characters:,} characters, got {len(text):,}; split the file."
        )
    return FileText(kind, text, pages)


def _kind(data: bytes, name: str, content_type: str) -> str:
    if data.startswith(PDF_SIGNATURE):
        return "pdf"
    suffix = PurePath(_without_gz(name)).suffix.lower()
    kind = KINDS.get(suffix) or (None if suffix else TYPES.get(content_type.partition(";")[0].strip().lower()))
    if kind is None:
        found = f"{suffix!r}" if suffix else (shorten(content_type) if content_type else "a name without an ending")
        raise UnknownKindError(
            f"{name}: expected a txt, md, html, pdf or docx file, got {found}; save it as one of these."
        )
    if kind == "pdf":
        raise UnreadableError(f"{name}: expected a PDF, got a file that does not begin with %PDF; save it again.")
    return kind


def _decode(data: bytes, name: str, encoding: str | None) -> str:
    """Decode a text; outside of Unicode, guess: whoever opened the file sees at once whether that was right."""
    if encoding is not None:
        return decode_text(data, name, encoding)
    try:
        text = decode_text(data, name)
    except UnreadableError:
        text = data.decode(guess_encoding(data), "replace")
    if "\0" in text:
        raise UnreadableError(f"{name}: expected a text, got binary data; save it as text first.")
    return text


def _without_gz(name: str) -> str:
    return name[: -len(COMPRESSED)] if name.lower().endswith(COMPRESSED) else name


def _clean(text: str) -> str:
    """Return a text with `\\n` as line ends and without halves of surrogate pairs, which have no UTF-8 form."""
    return unify_line_ends(text).encode("utf-8", "replace").decode("utf-8")
