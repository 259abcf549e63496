"""Binary files: named in the error, or read with pandas."""

from __future__ import annotations

import bz2
import io
import lzma
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from lamella.cli import app
from lamella.data.examples import Answer
from lamella.data.file_formats.formats import read
from lamella.errors import UnreadableError
from lamella.unpacking import TooLargeFileError

ROW = {"id": 7, "question": "Who?", "context": "Huygens found it.", "answers": "Huygens"}


def zipped(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            content = "application/vnd.oasis.opendocument.spreadsheet" if name == "mimetype" else "x"
            archive.writestr(name, content)
    return buffer.getvalue()


def tarred() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("data.json"))
    return buffer.getvalue()


XLSX = zipped("[Content_Types].xml", "xl/workbook.xml")
PARQUET = b"PAR1\x15\x04 and so on PAR1"


@pytest.mark.parametrize(
    ("data", "name", "advice"),
    [
        (bz2.compress(b"{}"), "a bzip2 file", "unpack it"),
        (lzma.compress(b"{}"), "an xz file", "unpack it"),
        (zipped("data.json"), "a ZIP archive", "unpack it"),
        (zipped("data.json")[:40], "a ZIP archive", "unpack it"),
        (zipped("word/document.xml"), "a Word document", "extract the text"),
        (tarred(), "a tar archive", "unpack it"),
        (b"%PDF-1.7\n", "a PDF file", "extract the text"),
        (b"SQLite format 3\x00", "an SQLite database", "export its table to CSV"),
        (b"ARROW1\x00\x00", "an Arrow file", "convert it to CSV or JSONL"),
    ],
    ids=["bzip2", "xz", "zip", "truncated zip", "word", "tar", "pdf", "sqlite", "arrow"],  # archives contain the time
)
def test_a_binary_file_is_named(data: bytes, name: str, advice: str, tmp_path: Path) -> None:
    (tmp_path / "data.json").write_bytes(data)
    with pytest.raises(UnreadableError) as error:
        read(tmp_path / "data.json")
    message = str(error.value)
    assert message.startswith(f"{tmp_path / 'data.json'}: expected JSON, JSONL or CSV, got {name}; ")
    assert advice in message
    assert "\n" not in message


@pytest.mark.parametrize("data", [XLSX, zipped("mimetype")], ids=["xlsx", "ods"])
def test_spreadsheets_are_read_with_pandas(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_frame(file: Any, **options: Any) -> Any:
        assert file.read() == data
        return SimpleNamespace(to_dict=lambda orient: [ROW | {"title": float("nan")}])

    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(read_excel=make_frame))
    (tmp_path / "table").write_bytes(data)
    file = read(tmp_path / "table")
    (example,) = file.examples
    assert (file.format, example.id, example.answers, file.problems) == ("flat", "7", (Answer("Huygens", 0),), ())
    assert file.size == len(data)


@pytest.mark.parametrize(
    ("data", "libraries"), [(PARQUET, "pyarrow"), (XLSX, "pandas openpyxl")], ids=["parquet", "xlsx"]
)
def test_without_the_libraries_the_error_names_what_to_install(
    data: bytes, libraries: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "table").write_bytes(data)
    with pytest.raises(UnreadableError) as error:
        read(tmp_path / "table")
    assert f"; install them with: pip install {libraries}, or convert the file to CSV or JSONL." in str(error.value)


def test_a_parquet_file_is_read_with_pyarrow(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    answers = [{"text": ["Huygens"], "answer_start": [0]}, {"text": [], "answer_start": []}]
    columns = {
        "id": ["a", "b"],
        "question": ["Who?", "Why?"],
        "context": ["Huygens did."] * 2,
        "title": ["Titan", None],
    }
    parquet.write_table(arrow.table({**columns, "answers": answers}), tmp_path / "table")
    file = read(tmp_path / "table")
    assert [example.answers for example in file.examples] == [(Answer("Huygens", 0),), ()]
    assert file.problems == ()


@pytest.mark.parametrize(("text", "rows"), [("Titan", 2_000_000), ("Titan " * 20_000, 2_000)], ids=["rows", "bytes"])
def test_a_parquet_file_that_repeats_a_text_too_often_is_refused(text: str, rows: int, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    cells = arrow.DictionaryArray.from_arrays(arrow.repeat(arrow.scalar(0, arrow.int32()), rows), [text])
    parquet.write_table(arrow.table({"question": cells, "context": cells}), tmp_path / "table")
    with pytest.raises(TooLargeFileError, match=r"table: expected a (table|Parquet file) .*ordinary data"):
        read(tmp_path / "table")


def test_a_damaged_table_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: Any, **options: Any) -> Any:
        raise ValueError("broken\nfooter")

    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(read_excel=fail))
    (tmp_path / "table").write_bytes(XLSX)
    with pytest.raises(UnreadableError, match=r"pandas cannot read this file \(broken footer\)"):
        read(tmp_path / "table")


def test_check_prints_nothing_about_problems_of_a_file_it_could_not_read(tmp_path: Path) -> None:
    (tmp_path / "data.zip").write_bytes(zipped("data.json"))
    result = CliRunner().invoke(app, ["check", str(tmp_path / "data.zip")])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "a ZIP archive" in result.stderr
    result = CliRunner().invoke(app, ["check", "demo:dev", str(tmp_path / "data.zip")])
    assert result.exit_code == 2
    assert "demo:dev: squad" in result.stdout
    assert "no problems" not in result.stdout


def test_text_of_another_encoding_is_converted(tmp_path: Path) -> None:
    text = "id,question,context,answers\nk1,수도는 어디인가?,서울은 대한민국의 수도이다.,서울\n"
    (tmp_path / "ko.csv").write_bytes(text.encode("cp949"))
    result = CliRunner().invoke(app, ["check", str(tmp_path / "ko.csv")])
    assert "(probably cp949); save it as UTF-8, or convert it: lamella convert IN OUT --encoding cp949" in result.stderr
    out = tmp_path / "ko.jsonl"
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "ko.csv"), str(out), "--encoding", "cp949"])
    assert result.exit_code == 0
    assert read(out).examples[0].answers == (Answer("서울", 0),)


def test_utf_16_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    text = "id,question,context,answers\nk1,수도는 어디인가?,서울은 대한민국의 수도이다.,서울\n"
    (tmp_path / "ko.csv").write_bytes(text.encode("utf-16"))
    assert read(tmp_path / "ko.csv").examples[0].answers == (Answer("서울", 0),)
