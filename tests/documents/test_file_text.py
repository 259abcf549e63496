"""The text of PDFs and docx files, and the reason where there is none."""

from __future__ import annotations

import io

import pytest

from lamella.documents.pdf_text import pages_of_pdf
from made_files import make_pdf, page


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
