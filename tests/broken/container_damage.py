"""Damage to containers: the header of a safetensors file, the entries of a ZIP archive."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Iterator

from broken.json_damage import broken_json

# Values that are no numbers, or too large for the next product, as the bytes of fp32.
ODD_FLOATS = {"NaN": b"\x00\x00\xc0\x7f", "infinity": b"\x00\x00\x80\x7f", "3e38": b"\x99\x76\x61\x7f"}


def broken_safetensors(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield copies of a safetensors file with another header, or with other values."""
    (length,) = struct.unpack("<Q", data[:8])
    header, tensors = json.loads(data[8 : 8 + length]), data[8 + length :]
    for number in (0, 1, length - 1, length + 1, len(data), 2**31, 2**63, 2**64 - 1):
        yield f"a header of {number} bytes", struct.pack("<Q", number) + data[8:]
    for name, text in broken_json(header):
        yield f"header: {name}", struct.pack("<Q", len(text)) + text + tensors
    for name, number in ODD_FLOATS.items():
        yield f"all values are {name}", data[: 8 + length] + number * (len(tensors) // 4)
    yield "no tensors", struct.pack("<Q", 2) + b"{}"


def broken_zip(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield copies of a ZIP archive with an entry that is missing, repeated, empty, too large or named by a path."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    for name in entries:
        yield f"without {name}", _zip([(key, value) for key, value in entries.items() if key != name])
        yield f"{name} is empty", _zip([(key, b"" if key == name else value) for key, value in entries.items()])
        yield f"{name} is cut", _zip([(key, value[:40] if key == name else value) for key, value in entries.items()])
        yield f"{name} is noise", _zip([(key, b"\xff\x00<" if key == name else v) for key, v in entries.items()])
        yield f"{name} is huge", _zip([(key, bytes(80 << 20) if key == name else v) for key, v in entries.items()])
        path = f"../../{name}"
        yield f"{name} is outside", _zip([(path if key == name else key, value) for key, value in entries.items()])
    yield "no entries", _zip([])
    yield "unpacked", b"".join(entries.values())
    yield "encrypted", _encrypted(data)


def _zip(entries: list[tuple[str, bytes]]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries:
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return file.getvalue()


def _encrypted(data: bytes) -> bytes:
    """Set the flag of encryption of every entry, in both headers."""
    changed = bytearray(data)
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = data.find(signature)
        while place >= 0:
            changed[place + offset] |= 1
            place = data.find(signature, place + 1)
    return bytes(changed)
