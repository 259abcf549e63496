"""The text of PDFs and docx files, and the reason where there is none."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest

from lamella.documents import text_process
from lamella.documents.docx_text import paragraphs_of_docx
from lamella.documents.file_text import FileText, text_of_file
from lamella.documents.markdown_text import blank_markup, close_marks
from lamella.documents.pdf_text import join_divided_words, pages_of_pdf
from lamella.documents.text_process import TextProcess
from lamella.errors import UnreadableError
from made_files import make_docx, make_pdf, page, paragraph


def test_damaged_scanned_and_locked_pdfs_have_their_own_reasons() -> None:
    from pypdf import PdfReader, PdfWriter

    with pytest.raises(ValueError, match="damaged"):
        pages_of_pdf(b"%PDF-1.7 nothing follows", 1000)
    with pytest.raises(ValueError, match="pictures only, such as a scan"):
        pages_of_pdf(make_pdf(b"q Q"), 1000)
    with pytest.raises(ValueError, match="at most 10 characters"):
        pages_of_pdf(make_pdf(page("more than ten characters")), 10)
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(make_pdf(page("secret")))))
    writer.encrypt("password", algorithm="RC4-128")
    locked = io.BytesIO()
    writer.write(locked)
    with pytest.raises(ValueError, match="password"):
        pages_of_pdf(locked.getvalue(), 1000)


def test_ligatures_of_a_pdf_are_letters() -> None:
    content = rb"BT /F 12 Tf 72 720 Td (The of\336ce is in a \337at.) Tj ET"  # the codes of fi and fl
    assert pages_of_pdf(make_pdf(content), 1000) == ["The office is in a flat."]


def test_a_word_that_a_pdf_divides_at_the_end_of_a_line_is_whole() -> None:
    content = rb"BT /F 12 Tf 14 TL 72 720 Td (Huygens found the larg-) Tj T* (est moon of Saturn.) Tj ET"
    assert pages_of_pdf(make_pdf(content), 1000) == ["Huygens found the largest moon of Saturn."]


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        ("an-\nswering", "answering"),
        ("an- \n swering", "answering"),
        ("OPTIONAL, or OP-\nTIONAL", "OPTIONAL, or OPTIONAL"),
        ("Fluß-\nufer, Fluß\u2010\nufer, Fluß\u00ad\nufer", "Flußufer, Flußufer, Flußufer"),
        ("fine-tuned, then fine-\ntuned", "fine-tuned, then fine-tuned"),
        ("fine-tuning is fine, and fine-\ntuned", "fine-tuning is fine, and fine-tuned"),
        ("false, positive, false-\npositive", "false, positive, false-positive"),
        ("false, positive, falsepositive, false-\npositive", "false, positive, falsepositive, falsepositive"),
        ("state-of-the-\nart", "state-of-the-art"),
        ("HCV-\npositive", "HCV-positive"),
        ("short-\nand long-term", "short-\nand long-term"),
        ("Nord-\nund Südkorea", "Nord-\nund Südkorea"),
        ("Anne-\nMarie", "Anne-\nMarie"),
        ("pages 3-\n5", "pages 3-\n5"),
        ("a list:\n-\nitem", "a list:\n-\nitem"),
        ("new-\n\nparagraph", "new-\n\nparagraph"),
    ],
)
def test_compounds_keep_their_hyphen(text: str, joined: str) -> None:
    assert join_divided_words([text]) == [joined]


def test_other_pages_tell_which_words_are_compounds() -> None:
    assert join_divided_words(["well-known", "the well-\nknown"]) == ["well-known", "the well-known"]


def test_words_are_joined_in_linear_time() -> None:
    began = time.process_time()
    join_divided_words(["x" * 1_000_000, "x-" * 500_000, "-\n" * 500_000, ("x" * 1000 + " ") * 1000])
    assert time.process_time() - began < 20


def test_the_paragraphs_of_a_docx_file() -> None:
    cell = "<w:tc>{}</w:tc>".format
    body = (
        paragraph("Titan &amp; Rhea")
        + "<w:p><w:r><w:t>found</w:t><w:tab/><w:t>in 16</w:t></w:r><w:r><w:t>55</w:t></w:r></w:p>"
        + f"<w:tbl><w:tr>{cell(paragraph('moon'))}{cell(paragraph('year'))}</w:tr></w:tbl>"
        + "<w:p><w:del><w:r><w:delText>gone</w:delText></w:r></w:del><w:ins><w:r><w:t>new</w:t></w:r></w:ins></w:p>"
        + '<w:p xmlns:mc="urn:x"><mc:AlternateContent>'
        + f"<mc:Choice>{paragraph('in a box')}</mc:Choice><mc:Fallback>{paragraph('in a box')}</mc:Fallback>"
        + "</mc:AlternateContent><w:r><w:t>beside the box</w:t></w:r></w:p>"
        + paragraph(" ")
        + "<w:p><w:r><w:t>two</w:t><w:br/> <w:br/><w:br/><w:t>lines</w:t></w:r></w:p>"
    )
    word = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    data = make_docx(
        body, footnotes=f"<w:footnotes {word}><w:footnote>{paragraph('a note')}</w:footnote></w:footnotes>"
    )
    expected = [
        "Titan & Rhea",
        "found\tin 1655",
        "moon\tyear",
        "new",
        "in a box",
        "beside the box",
        "two\nlines",
        "a note",
    ]
    assert paragraphs_of_docx(data, 1000) == expected
    with pytest.raises(ValueError, match="at most 10 characters"):
        paragraphs_of_docx(data, 10)


def test_damaged_and_locked_docx_files_have_their_own_reasons() -> None:
    sound = make_docx(paragraph("Titan"))
    for data in (
        b"",
        b"text",
        sound[:-30],
        make_docx("<w:p>"),
        sound.replace(b"word/document.xml", b"word/documenT.xml"),
        make_docx(paragraph("Titan"), footnotes="<?xml version='1.0' encoding='unheard-of'?><a/>"),
        make_docx(paragraph("Titan"), footnotes="<?xml version='1.0' encoding='shift_jis'?><a/>"),
    ):
        with pytest.raises(ValueError, match="damaged"):
            paragraphs_of_docx(data, 1000)
    with pytest.raises(ValueError, match="password"):
        paragraphs_of_docx(b"\xd0\xcf\x11\xe0 old", 1000)
    with pytest.raises(ValueError, match="without any"):
        paragraphs_of_docx(make_docx(""), 1000)


def test_a_docx_file_that_unpacks_to_gigabytes_is_refused() -> None:
    bomb = make_docx("<w:p><w:r><w:t>" + " " * 100_000_000 + "</w:t></w:r></w:p>")
    assert len(bomb) < 400_000
    with (
        TextProcess() as process,
        pytest.raises(UnreadableError, match=r"a\.docx: expected a (docx )?file of reasonable"),
    ):
        process.read(bomb, "a.docx", "docx", 1_000_000)


def test_a_process_reads_on_after_a_file_that_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(data: bytes, name: str) -> FileText:
        return text_of_file(data, name, process=process, most_bytes=10_000_000, most_characters=10_000)

    with TextProcess() as process:
        assert read(b"<p>Titan", "a.html").text == "Titan"
        assert read(b"<p>2005.</p><![foo[ x ]]><p>Rhea.", "a.html").text == "2005.\n\nRhea."
        with monkeypatch.context() as patch:
            patch.setitem(text_process.PROCESSOR_SECONDS, "html", 1)
            with pytest.raises(UnreadableError, match="expected an HTML page"):  # of reasonable size, or in time
                read(b"<a " * 60_000, "a.html")
        with pytest.raises(UnreadableError, match="damaged"):
            read(b"%PDF-1.7 nothing follows", "a.pdf")
        found = read(make_pdf(page("One."), b"q Q", page("Three.")), "a.pdf")
        assert found == FileText("pdf", "One.\n\nThree.", (0, 6, 6))


def test_code_beside_the_documents_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("json.py", "contextlib.py", "lamella.py"):
        (tmp_path / module).write_text("open('was-run', 'w').close()\nraise SystemExit")
    monkeypatch.chdir(tmp_path)
    with TextProcess() as process:
        assert process.read(b"<p>Titan", "a.html", "html", 1000) == ["Titan"]
    assert not (tmp_path / "was-run").exists()


def test_the_markup_of_markdown_is_blanked_in_place() -> None:
    text = (
        "# Titan\n\n| moon | year |\n|---|---:|\n| [Titan](https://a.b/c_d) | **1655** |\n\n"
        "```sh\nlamella ask --in docs\n```\nRead `a_b` and snake_case, 3 * 4 < 5.\n"
    )
    blanked = blank_markup(text)
    assert len(blanked) == len(text)
    assert [line.split() for line in blanked.split("\n")] == [
        ["Titan"], [], ["moon", "year"], [], ["Titan", "1655"], [], [], ["lamella", "ask", "--in", "docs"], [],
        ["Read", "a_b", "and", "snake_case,", "3", "*", "4", "<", "5."], [],
    ]  # fmt: skip
    assert blanked.index("1655") == text.index("1655")


def test_an_error_of_a_parser_means_a_damaged_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[str]:
        raise AssertionError("unexpected structure")

    requests, replies = io.BytesIO(), io.BytesIO()
    for _ in range(2):
        text_process._send(requests, ["html", 10, 1], b"<p>")
    requests.seek(0)
    for name in ("_limit_memory", "_limit_time"):
        monkeypatch.setattr(text_process, name, lambda *_: None)
    monkeypatch.setattr(text_process, "_read", fail)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(requests))
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(replies))
    text_process.main()
    replies.seek(0)
    expected = ("expected an HTML page, got a damaged one; save it again", b"")
    assert [text_process._receive(replies) for _ in range(2)] == [expected, expected]


def test_a_process_that_ended_before_it_got_all_data_is_closed() -> None:
    process = TextProcess()
    ended = process._started()
    assert ended.stdin is not None
    ended.stdin.write(b"not sent yet")
    ended.kill()
    ended.wait()
    process.close()


@pytest.mark.parametrize(
    ("text", "blanked"),
    [
        ("*it*, _it_, **two\nwords**, __two words__, ***x***", " it ,  it ,   two\nwords  ,   two words  ,    x   "),
        ("2**20 is 2**10 * 2**10", None),
        ("f(*args, **kwargs) of a_b_c in a/*.py b/*.md", None),
        ("__main__.py calls __init__", None),
        ("List<String> or <name>, see <https://a.b>; a <b and c> d", None),
        ('H<sub>2</sub>O <img src="a">', "H     2      O              "),
        ("P(A|B), |x| < 1", None),
        ("a | b\n-|-\n1 | c\\|d\n\ne | f", "a   b\n   \n1   c\\|d\n\ne | f"),
        ("**`x**y|`** and ``a`b``, an odd `", "   x**y|    and   a`b  , an odd `"),
        ("```py\n**a** | <b>\n```\n**c**", "     \n**a** | <b>\n   \n  c  "),
        ("a <!-- `b`\n --> c <!-- d", "a         \n     c <!-- d"),
        ("[![alt](a)](b) > c\n> # d", "   alt         > c\n    d"),
    ],
)
def test_only_markup_is_blanked(text: str, blanked: str | None) -> None:
    assert blank_markup(text) == (text if blanked is None else blanked)


@pytest.mark.parametrize(
    "prefix",
    [
        "<!--",
        "[",
        "](",
        "[a](",
        '[a](b "',
        " ",
        "|",
        "|-|\n",
        "> ",
        " *a",
        " __a",
        "*a\n",
        "` ",
        "```\n",
        "<a ",
        "<p a=",
    ],
)
def test_the_time_to_blank_markup_is_proportional_to_the_text(prefix: str) -> None:
    text = prefix * (250_000 // len(prefix))
    begin = time.process_time()
    assert len(blank_markup(text)) == len(text)
    assert time.process_time() - begin < 5  # quadratic time would be minutes


def test_an_answer_has_both_marks_of_its_code_or_none() -> None:
    text = "Found **in 1655** with `lamella ask`, 2**20 times."

    def closed(part: str) -> str:
        begin = text.index(part)
        begin, end = close_marks(text, begin, begin + len(part))
        return text[begin:end]

    assert closed("with `lamella ask") == "with `lamella ask`"
    assert closed("lamella ask`, 2") == "`lamella ask`, 2"
    assert closed("Found **in 1655") == "Found **in 1655**"
    for whole in ("lamella ask", "with `lamella ask`", "in 1655", "2**20"):
        assert closed(whole) == whole
