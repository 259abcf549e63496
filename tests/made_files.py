"""Make files of documents: PDFs and docx files, sound and damaged."""

from __future__ import annotations

import io
import zipfile
import zlib


def make_pdf(*pages: bytes, compressed: bool = False) -> bytes:
    """Return a PDF whose pages have these content streams."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /MacRomanEncoding >>",
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


def make_docx(body: str, **parts: str) -> bytes:
    """Return a docx file whose document has this body, with further parts (`footnotes="<w:footnotes…"`)."""
    file = io.BytesIO()
    word = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    relations = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(
            "_rels/.rels",
            '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
            f'<Relationship Id="r" Type="{relations}/officeDocument" Target="word/document.xml"/></Relationships>',
        )
        archive.writestr("word/document.xml", f"<w:document {word}><w:body>{body}</w:body></w:document>")
        for name, content in parts.items():
            archive.writestr(f"word/{name}.xml", content)
    return file.getvalue()


def paragraph(text: str) -> str:
    return f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>"


def make_xlsx(rows: list[list[str | int | None]], cells: str = "") -> bytes:
    """Return an Excel file with these rows, and with `cells` as further XML behind them."""
    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    relations = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    packages = "http://schemas.openxmlformats.org/package/2006"
    types = "application/vnd.openxmlformats-officedocument.spreadsheetml"
    sheet = "".join(f"<row>{''.join(map(_excel_cell, row))}</row>" for row in rows)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {
            "[Content_Types].xml": f'<Types xmlns="{packages}/content-types">'
            '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
            f'<Override PartName="/xl/workbook.xml" ContentType="{types}.sheet.main+xml"/>'
            f'<Override PartName="/xl/worksheets/sheet1.xml" ContentType="{types}.worksheet+xml"/></Types>',
            "_rels/.rels": f'<Relationships xmlns="{packages}/relationships">'
            f'<Relationship Id="r" Type="{relations}/officeDocument" Target="xl/workbook.xml"/></Relationships>',
            "xl/workbook.xml": f'<workbook xmlns="{main}" xmlns:r="{relations}"><sheets>'
            '<sheet name="rows" sheetId="1" r:id="s"/></sheets></workbook>',
            "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{packages}/relationships">'
            f'<Relationship Id="s" Type="{relations}/worksheet" Target="worksheets/sheet1.xml"/></Relationships>',
            "xl/worksheets/sheet1.xml": f'<worksheet xmlns="{main}"><sheetData>{sheet}{cells}</sheetData></worksheet>',
        }.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return file.getvalue()


def _excel_cell(value: str | int | None) -> str:
    if isinstance(value, str):
        return f'<c t="inlineStr"><is><t>{value}</t></is></c>'
    return f"<c><v>{value}</v></c>" if value is not None else "<c/>"
