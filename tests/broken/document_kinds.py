"""Kinds of documents: the files of a folder that is searched, and its index."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

from broken.damage import Damage
from broken.data_kinds import TITAN
from broken.kind import Files, Folders, Kind, damage_file
from broken.oracle import Outcome, run_command
from made_files import make_docx, make_pdf, page, paragraph
from tiny_reader import save_tiny_bert, save_tiny_reader

INDEX = ".lamella-index.safetensors"
HTML = (
    f"<!doctype html><html><head><title>Titan</title></head><body><p>{TITAN}</p><table><tr><td>1655</td></tr></table>"
)
DOCUMENTS = {
    "a.txt": (TITAN.encode(), "text"),
    "b.md": (f"# Titan\n\n{TITAN}\n\n- one\n- *two*\n\n```\ncode\n```\n".encode(), "text"),
    "c.html": (f"{HTML}</body></html>".encode(), "text"),
    "d.pdf": (make_pdf(page("Huygens discovered Titan."), page("In 1655."), compressed=True), ""),
    "e.docx": (make_docx(paragraph(TITAN)), "zip"),
}


def _documents(name: str) -> Kind:
    data, structure = DOCUMENTS[name]

    def sound(folder: Path, beside: Path) -> None:
        (folder / name).write_bytes(data)
        (folder / "sound.txt").write_text(TITAN)

    def damages(files: Files) -> Iterator[Damage]:
        yield from damage_file(name, data, structure=structure)
        if name == "e.docx":
            for entities in (3, 9):
                yield Damage(f"{name}: entities nested {entities} times", name, entities_docx(entities))
        if name == "c.html":
            for tag in ("table", "p", "li", "svg", "script", "math", "!--", "![CDATA[", "!DOCTYPE"):
                for count in (1, 2000):
                    yield Damage(f"{name}: <{tag}> {count} times", name, HTML.encode() + f"<{tag}>x".encode() * count)

    def index(folders: Folders) -> Outcome:
        outcome = run_command(["index", folders.inputs, "--json"])
        (folders.inputs / INDEX).unlink(missing_ok=True)
        return outcome

    def commands(folders: Folders) -> Iterator[object]:
        yield lambda: index(folders)
        if name == "c.html" and (folders.inputs / name).is_file():
            model = _reader(folders.beside)
            yield ["ask", "Who?", "--context", folders.inputs / name, "--model", model]

    sampled = 5 if name in ("d.pdf", "e.docx") else 10  # each is parsed in a process of its own
    return Kind(f"documents {name[2:]}", sound, damages, commands, refuses=False, sampled=sampled)


def entities_docx(depth: int) -> bytes:
    """Return a docx file in which each entity consists of ten others."""
    names = [f'<!ENTITY e{number} "{f"&e{number - 1};" * 10}">' for number in range(1, depth)]
    types = f'<!DOCTYPE d [<!ENTITY e0 "Titan">{"".join(names)}]>'
    with zipfile.ZipFile(io.BytesIO(make_docx(paragraph(f"&e{depth - 1};")))) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    entries["word/document.xml"] = types.encode() + entries["word/document.xml"]
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in entries.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return file.getvalue()


def _indexes() -> Kind:
    def sound(folder: Path, beside: Path) -> None:
        (folder / "a.txt").write_text(TITAN)
        os.utime(folder / "a.txt", (1e9, 1e9))
        assert run_command(["index", folder]).code == 0

    def damages(files: Files) -> Iterator[Damage]:
        yield from damage_file(INDEX, files[INDEX], structure="safetensors")

    def commands(folders: Folders) -> Iterator[list[object]]:
        yield ["ask", "Who?", "--in", folders.inputs, "--model", _reader(folders.beside)]

    return Kind("indexes", sound, damages, commands, refuses=False)


def _reader(beside: Path) -> Path:
    if not (beside / "reader").is_dir():
        save_tiny_bert(beside / "encoder")
        save_tiny_reader(beside / "reader", beside / "encoder")
    return beside / "reader"


def document_kinds() -> Iterator[Kind]:
    """Yield the kinds of documents."""
    for name in DOCUMENTS:
        yield _documents(name)
    yield _indexes()
