"""Texts of opened files: every kind, encodings, and one line for each file that has no text."""

from __future__ import annotations

import io
import zlib

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from lamella.serve import texts
from lamella.serve.pdf_text import text_of_pdf
from lamella.serve.refusals import RefusedError, TooLargeError
from lamella.serve.texts import UnknownTextError, UnreadableTextError, text_of_file


def make_pdf(*pages: bytes, compressed: bool = False) -> bytes:
    """Return a PDF whose pages have these content streams."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, content in enumerate(pages):
        page = f"<< /Type /Page /Parent 2 0 R /Resources << /Font << /F 3 0 R >> >> /Contents {5 + 2 * number} 0 R >>"
        stream = zlib.compress(content) if compressed else content
        coding = b" /Filter /FlateDecode" if compressed else b""
        objects += [page.encode(), b"<< /Length %d%s >>\nstream\n%s\nendstream" % (len(stream), coding, stream)]
    file, places = io.BytesIO(), []
    file.write(b"%PDF-1.4\n")
    for number, content in enumerate(objects, start=1):
        places.append(file.tell())
        file.write(b"%d 0 obj\n%s\nendobj\n" % (number, content))
    begin = file.tell()
    file.write(b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1))
    file.writelines(b"%010d 00000 n \n" % place for place in places)
    file.write(b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, begin))
    return file.getvalue()


def page(text: str) -> bytes:
    return f"BT /F 12 Tf 72 720 Td ({text}) Tj ET".encode()


def test_texts_and_pages_are_read() -> None:
    assert text_of_file("Größe\r\n😀".encode(), "a.txt") == ("Größe\n😀", "txt")
    assert text_of_file(b"# Titan", "a.MD") == ("# Titan", "md")
    assert text_of_file(b"<h1>Titan</h1><p>Huygens &amp; co</p>", "a.html") == ("Titan\nHuygens & co", "html")
    assert text_of_file(b"plain", "", "text/plain; charset=utf-8") == ("plain", "txt")


def test_a_text_that_is_not_unicode_is_guessed() -> None:
    assert text_of_file("Größe und Maß".encode("cp1252"), "a.txt")[0] == "Größe und Maß"
    assert text_of_file("Größe".encode("utf-16"), "a.txt")[0] == "Größe"


def test_a_pdf_is_read_page_by_page_in_a_process_of_its_own() -> None:
    data = make_pdf(page("Huygens discovered Titan."), page("In 1655."), compressed=True)
    assert text_of_file(data, "report.pdf") == ("Huygens discovered Titan.\n\nIn 1655.", "pdf")
    assert text_of_file(data, "a name without an ending")[1] == "pdf"  # the content decides


@pytest.mark.parametrize(
    ("data", "name", "error", "message"),
    [
        (b"x", "a.docx", UnknownTextError, "expected a txt, md, html or pdf file, got '.docx'"),
        (b"x", "a", UnknownTextError, "a name without an ending"),
        (b"  \n", "a.txt", UnreadableTextError, "got an empty file"),
        (b"a\0b" * 50, "a.txt", UnreadableTextError, "binary data"),
        (b"no PDF", "a.pdf", UnreadableTextError, "does not begin with %PDF"),
        (b"x" * (texts.MOST_CHARACTERS + 1), "a.txt", TooLargeError, "at most 2,000,000 characters"),
        (b"x" * (texts.MOST_BYTES + 1), "a.txt", TooLargeError, "at most 20 MiB"),
    ],
)
def test_a_file_without_text_gets_one_line(data: bytes, name: str, error: type[RefusedError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        text_of_file(data, name)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{name}: ")


def test_damaged_scanned_and_locked_pdfs_have_their_own_reasons() -> None:
    from pypdf import PdfReader, PdfWriter

    with pytest.raises(ValueError, match="damaged"):
        text_of_pdf(b"%PDF-1.7 nothing follows", 1000)
    with pytest.raises(ValueError, match="pictures only, such as a scan"):
        text_of_pdf(make_pdf(b"q Q"), 1000)
    with pytest.raises(ValueError, match="at most 10 characters"):
        text_of_pdf(make_pdf(page("more than ten characters")), 10)
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(make_pdf(page("secret")))))
    writer.encrypt("password", algorithm="RC4-128")
    locked = io.BytesIO()
    writer.write(locked)
    with pytest.raises(ValueError, match="password"):
        text_of_pdf(locked.getvalue(), 1000)


def test_a_pdf_that_unpacks_to_gigabytes_is_refused() -> None:
    bomb = make_pdf(b" " * 300_000_000, compressed=True)
    assert len(bomb) < 400_000
    with pytest.raises(UnreadableTextError, match=r"a\.pdf: expected a PDF of reasonable size"):
        text_of_file(bomb, "a.pdf")


def test_a_slow_pdf_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "PROCESS_SECONDS", 0.01)
    with pytest.raises(UnreadableTextError, match="expected a PDF that is read within"):
        text_of_file(make_pdf(page("Titan")), "a.pdf")


@pytest.mark.parametrize("tag", ["<a ", "<!--"])
def test_a_page_of_tags_that_never_end_is_given_up(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's parser takes minutes for this page, and hours for a megabyte."""
    monkeypatch.setitem(texts.PROCESSOR_SECONDS, "html", 1)
    with pytest.raises(UnreadableTextError, match=r"a\.html: expected an HTML page of reasonable size"):
        text_of_file(tag.encode() * 60_000, "a.html")
    monkeypatch.setattr(texts, "PROCESS_SECONDS", 0.2)
    with pytest.raises(UnreadableTextError, match=r"a\.html: expected an HTML page that is read within"):
        text_of_file(tag.encode() * 60_000, "a.html")
