"""Turn an opened file into text: bytes and a file name in, text out. Nothing is read from disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import PurePath

from lamella.errors import UnreadableError, counted, shorten, truncate
from lamella.serve.refusals import RefusedError, TooLargeError
from lamella.text_encoding import decode_text, guess_encoding

KINDS = {
    ".txt": "txt",
    ".text": "txt",
    ".md": "md",
    ".markdown": "md",
    ".html": "html",
    ".htm": "html",
    ".pdf": "pdf",
}
TYPES = {"text/plain": "txt", "text/markdown": "md", "text/html": "html", "application/pdf": "pdf"}

MOST_BYTES = 20 << 20
MOST_CHARACTERS = 2_000_000
PROCESS_SECONDS = 30.0  # for the process that reads a file
PROCESSOR_SECONDS = {"html": 15, "pdf": 25}  # the same, of processor time; 20 MiB of ordinary HTML take 13
PDF_SIGNATURE = b"%PDF-"
NAMES = {"html": "an HTML page", "pdf": "a PDF"}  # of the kinds that are read in a process of their own


class UnreadableTextError(RefusedError):
    """A file from which no text can be read."""

    kind = "unreadable_text"


class UnknownTextError(RefusedError):
    """A file of a kind that is not supported."""

    status = 415
    kind = "unsupported_file"


def text_of_file(data: bytes, name: str, content_type: str = "") -> tuple[str, str]:
    """Return the text of a file and its kind: txt, md, html or pdf."""
    name = truncate(PurePath(name).name or "text", 60)
    if len(data) > MOST_BYTES:
        raise TooLargeError(
            f"{name}: expected at most {MOST_BYTES >> 20} MiB, got {len(data) / (1 << 20):.1f} MiB; split the file."
        )
    kind = _kind(data, name, content_type)
    if kind == "pdf":
        text = _read_apart(data, name, kind)
    else:
        text = _decode(data, name)
        text = _read_apart(text.encode("utf-8", "replace"), name, kind) if kind == "html" else text
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise UnreadableTextError(f"{name}: expected a text, got an empty file.")
    if len(text) > MOST_CHARACTERS:
        raise TooLargeError(
            f"{name}: expected at most {MOST_CHARACTERS:,} characters, got {len(text):,}; split the file."
        )
    return text, kind


def _kind(data: bytes, name: str, content_type: str) -> str:
    if data.startswith(PDF_SIGNATURE):
        return "pdf"
    suffix = PurePath(name).suffix.lower()
    kind = KINDS.get(suffix) or (None if suffix else TYPES.get(content_type.partition(";")[0].strip().lower()))
    if kind is None:
        found = f"{suffix!r}" if suffix else (shorten(content_type) if content_type else "a name without an ending")
        raise UnknownTextError(f"{name}: expected a txt, md, html or pdf file, got {found}; save it as one of these.")
    if kind == "pdf":
        raise UnreadableTextError(f"{name}: expected a PDF, got a file that does not begin with %PDF; save it again.")
    return kind


def _decode(data: bytes, name: str) -> str:
    """Decode a text; outside of Unicode, guess: whoever opened the file sees at once whether that was right."""
    try:
        text = decode_text(data, name)
    except UnreadableError:
        text = data.decode(guess_encoding(data), "replace")
    if "\0" in text:
        raise UnreadableTextError(f"{name}: expected a text, got binary data; save it as text first.")
    return text


def _read_apart(data: bytes, name: str, kind: str) -> str:
    """Read a file in a process of its own, with limits on time and memory.

    A small PDF can unpack to gigabytes, and Python's HTML parser takes hours for a megabyte of tags that never end.
    """
    limits = [str(MOST_CHARACTERS), str(PROCESSOR_SECONDS[kind])]
    command = [sys.executable, "-m", "lamella.serve.text_process", kind, *limits]
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=PROCESS_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        most = counted(int(PROCESS_SECONDS), "second")
        raise UnreadableTextError(
            f"{name}: expected {NAMES[kind]} that is read within {most}, got a larger one; split it or save it as text."
        ) from None
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        huge = f"expected {NAMES[kind]} of reasonable size, got one that takes too long to read; save it as text"
        raise UnreadableTextError(f"{name}: {lines[-1] if done.returncode == 1 and lines else huge}.")
    return done.stdout.decode("utf-8")
