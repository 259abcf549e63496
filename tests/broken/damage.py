"""Damage to bytes and to the place of a file, whatever the file holds."""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path


class Special(Enum):
    """What may be where a file is expected."""

    MISSING = auto()
    FOLDER = auto()
    LOOP = auto()  # a symbolic link to itself
    UNREADABLE = auto()  # a symbolic link to a file that does not exist


Content = bytes | Special


@dataclass(frozen=True)
class Damage:
    """The new content of one file of an input; `name` states what is wrong with it."""

    name: str
    file: str
    content: Content


def write_content(path: Path, content: Content) -> None:
    """Write a file, or whatever is in its place; what was there before is replaced."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is Special.FOLDER:
        path.mkdir()
    elif content is not Special.MISSING:
        path.symlink_to(path.name if content is Special.LOOP else f"{path.name}.gone")


def broken_places() -> Iterator[tuple[str, Content]]:
    """Yield everything that may be where a file is expected."""
    for special in Special:
        yield special.name.lower(), special


def broken_bytes(data: bytes, *, cuts: int = 20, flips: int = 40) -> Iterator[tuple[str, bytes]]:
    """Yield damaged copies of a file: cut, with other bytes, repeated, in other encodings, compressed."""
    choose = random.Random(zlib.crc32(data))
    yield "empty", b""
    yield "white space", b" \n\t\r\n"
    yield "zeros", bytes(200)
    yield "noise", choose.randbytes(2000)
    for number in range(cuts):
        end = len(data) * number // cuts if number < cuts - 3 else len(data) - (cuts - number)
        yield f"cut after {end} bytes", data[:end]
    for _ in range(flips):
        place, bit = choose.randrange(len(data)), choose.randrange(8)
        yield f"bit {bit} of byte {place} flipped", _with_byte(data, place, data[place] ^ 1 << bit)
    for byte in (0x00, 0x0A, 0x22, 0x7F, 0x80, 0xC0, 0xFF):
        place = choose.randrange(len(data))
        yield f"byte {byte:#04x} inserted at {place}", data[:place] + bytes([byte]) + data[place:]
    for number in range(4):
        begin = choose.randrange(len(data))
        end = min(len(data), begin + choose.randrange(1, 60))
        yield f"bytes {begin} to {end} removed ({number})", data[:begin] + data[end:]
        yield f"bytes {begin} to {end} repeated ({number})", data[:end] + data[begin:]
    yield "twice", data + data
    yield "more at the end", data + b"\x00garbage"
    yield "a byte order mark", b"\xef\xbb\xbf" + data
    yield "two byte order marks", b"\xef\xbb\xbf" * 2 + data
    yield "a wrong byte order mark", b"\xff\xfe" + data
    packed = gzip.compress(data, mtime=0)
    yield "gzip", packed
    yield "gzip in gzip", gzip.compress(packed, mtime=0)
    for share in (0.1, 0.5, 0.9):
        yield f"gzip cut at {share}", packed[: int(len(packed) * share)]
    yield "gzip with a wrong sum", packed[:-8] + bytes(8)
    yield "gzip of zeros", gzip.compress(bytes(1 << 20), mtime=0)


def broken_text(text: str) -> Iterator[tuple[str, bytes]]:
    """Yield a text in encodings that are not expected, and with line ends that are not."""
    for encoding in ("utf-16", "utf-16-le", "utf-32", "utf-7", "cp949", "latin-1"):
        yield f"as {encoding}", text.encode(encoding, "replace")
    yield "with lone surrogates", text.encode() + b"\xed\xa0\x80"
    yield "with line ends of Windows", text.replace("\n", "\r\n").encode()
    yield "with line ends of old Macs", text.replace("\n", "\r").encode()
    yield "in one line", text.replace("\n", "").encode()


def _with_byte(data: bytes, place: int, byte: int) -> bytes:
    return data[:place] + bytes([byte]) + data[place + 1 :]
