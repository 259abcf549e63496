"""Texts of opened files: every kind, encodings, and one line for each file that has no text."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")


from lamella.documents import text_process
from lamella.serve import texts
from lamella.serve.refusals import RefusedError, TooLargeError
from lamella.serve.texts import UnknownTextError, UnreadableTextError, text_of_file
from made_files import make_docx, make_pdf, page, paragraph


def test_texts_and_pages_are_read() -> None:
    assert text_of_file("Größe\r\n😀".encode(), "a.txt") == ("Größe\n😀", "txt")
    assert text_of_file(b"# Titan", "a.MD") == ("# Titan", "md")
    assert text_of_file(b"<h1>Titan</h1><p>Huygens &amp; co</p>", "a.html") == ("Titan\n\nHuygens & co", "html")
    assert text_of_file(b"plain", "", "text/plain; charset=utf-8") == ("plain", "txt")


def test_a_text_that_is_not_unicode_is_guessed() -> None:
    assert text_of_file("Größe und Maß".encode("cp1252"), "a.txt")[0] == "Größe und Maß"
    assert text_of_file("Größe".encode("utf-16"), "a.txt")[0] == "Größe"


def test_a_pdf_is_read_page_by_page_in_a_process_of_its_own() -> None:
    data = make_pdf(page("Huygens discovered Titan."), page("In 1655."), compressed=True)
    assert text_of_file(data, "report.pdf") == ("Huygens discovered Titan.\n\nIn 1655.", "pdf")
    assert text_of_file(data, "a name without an ending")[1] == "pdf"  # the content decides


def test_a_docx_file_is_read() -> None:
    data = make_docx(paragraph("Huygens discovered Titan.") + paragraph("In 1655."))
    assert text_of_file(data, "report.docx") == ("Huygens discovered Titan.\n\nIn 1655.", "docx")


def test_a_long_name_keeps_its_ending() -> None:
    assert text_of_file(b"# Titan", f"{'long' * 40}.md") == ("# Titan", "md")


@pytest.mark.parametrize(
    ("data", "name", "error", "message"),
    [
        (b"x", "a.doc", UnknownTextError, "expected a txt, md, html, pdf or docx file, got '.doc'"),
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


def test_a_pdf_that_unpacks_to_gigabytes_is_refused() -> None:
    bomb = make_pdf(b" " * 300_000_000, compressed=True)
    assert len(bomb) < 400_000
    with pytest.raises(UnreadableTextError, match=r"a\.pdf: expected a PDF of reasonable size"):
        text_of_file(bomb, "a.pdf")


def test_a_slow_pdf_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_process, "PROCESS_SECONDS", 0.01)
    with pytest.raises(UnreadableTextError, match="expected a PDF that is read within"):
        text_of_file(make_pdf(page("Titan")), "a.pdf")


@pytest.mark.parametrize("tag", ["<a ", "<!--"])
def test_a_page_of_tags_that_never_end_is_given_up(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's parser takes minutes for this page, and hours for a megabyte."""
    monkeypatch.setitem(text_process.PROCESSOR_SECONDS, "html", 1)
    # On a busy machine, the time may end before the processor time does.
    with pytest.raises(UnreadableTextError, match=r"a\.html: expected an HTML page (of reasonable size|that is read)"):
        text_of_file(tag.encode() * 60_000, "a.html")
    monkeypatch.setattr(text_process, "PROCESS_SECONDS", 0.2)
    with pytest.raises(UnreadableTextError, match=r"a\.html: expected an HTML page that is read within"):
        text_of_file(tag.encode() * 60_000, "a.html")
