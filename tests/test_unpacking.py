"""A small file that unpacks to gigabytes is refused after a few megabytes of it."""

from __future__ import annotations

import gzip
import io
import json
import resource
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from lamella import unpacking
from lamella.data.file_formats.file_types import recognise_binary
from lamella.data.file_formats.formats import read
from lamella.errors import UnreadableError
from lamella.unpacking import ALWAYS_ALLOWED, TooLargeFileError, unpack_gzip
from made_files import make_xlsx

MIB = 1 << 20
ZEROS = gzip.compress(bytes(64 * MIB), 6, mtime=0)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def test_a_gzip_bomb_is_refused_after_its_first_megabytes() -> None:
    begun = cpu_seconds()
    once = unpack_gzip(ZEROS, "zeros.gz")  # as much as any file may unpack to
    middle = cpu_seconds()
    with pytest.raises(TooLargeFileError, match="unpacks to at most 64 MiB and 200 times its size"):
        unpack_gzip(ZEROS * 256, "bomb.gz")  # 16 GiB: gzip files that follow each other are one file
    assert len(once) == ALWAYS_ALLOWED
    assert cpu_seconds() - middle < 4 * (middle - begun) + 0.1


def test_data_that_repeats_itself_is_no_bomb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "ALWAYS_ALLOWED", MIB)
    context = " ".join(str(number**3) for number in range(1500))  # 11,000 characters, the same for all questions
    text = "\n".join(json.dumps({"id": f"{number:08}", "context": context}) for number in range(500)).encode()
    packed = gzip.compress(text, mtime=0)
    assert len(text) > max(5 * MIB, 50 * len(packed))
    assert unpack_gzip(packed, "rows.gz") == text


def test_several_gzip_files_in_one_and_padding_are_read_as_gunzip_does() -> None:
    assert unpack_gzip(gzip.compress(b"a") + gzip.compress(b"b") + bytes(512), "two.gz") == b"ab"


@pytest.mark.parametrize("cut", [1, 4, 9, 12, 30])
def test_a_damaged_gzip_file_is_an_error(cut: int) -> None:
    with pytest.raises(UnreadableError, match=r"^data\.gz: the gzip file is truncated or damaged"):
        unpack_gzip(gzip.compress(b"The probe landed on Titan.", mtime=0)[:-cut], "data.gz")


def test_a_data_file_that_is_a_bomb_ends_the_command(
    tmp_path: Path, lamella: Callable[..., tuple[int, str, str]]
) -> None:
    bomb = tmp_path / "train.json.gz"
    bomb.write_bytes(ZEROS * 256)
    code, _, err = lamella("check", bomb)
    assert code == 2
    assert err.startswith(f"lamella: {bomb}: expected a gzip file that unpacks to at most 64 MiB")
    assert err.endswith("if you trust it, unpack it yourself.\n")
    with pytest.raises(TooLargeFileError):
        read(str(bomb))


def zip_bomb(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(name, "w") as file:
        for _ in range(100):
            file.write(bytes(MIB))
    return buffer.getvalue()


def test_a_spreadsheet_that_is_a_bomb_is_refused_before_pandas_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace())
    (tmp_path / "rows.xlsx").write_bytes(zip_bomb("xl/worksheets/sheet1.xml"))
    with pytest.raises(TooLargeFileError, match=r"rows\.xlsx: expected a ZIP archive that unpacks to at most"):
        read(tmp_path / "rows.xlsx")


@pytest.mark.parametrize("cell", ["XFD1048576", "A1048576", "XFD99"])
def test_a_value_far_from_its_table_is_refused_before_pandas_fills_the_gap(
    cell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace())
    row = f'<row><c r="{cell}"><v>1</v></c></row>'
    (tmp_path / "rows.xlsx").write_bytes(make_xlsx([["question", "context"]], row))
    with pytest.raises(TooLargeFileError, match=r"rows\.xlsx: expected a table of ordinary data, got [0-9,]+ rows and"):
        read(tmp_path / "rows.xlsx")


def test_the_kind_of_an_archive_is_recognised_without_unpacking_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile.ZipFile, "read", None)
    kind = recognise_binary(zip_bomb("mimetype"))
    assert kind is not None
    assert kind.name == "a ZIP archive"
