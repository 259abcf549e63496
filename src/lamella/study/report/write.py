"""Write a report about runs, in the format that the file name asks for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lamella.errors import UsageError
from lamella.files import check_output_file, write_text

HTML_SUFFIXES = (".html", ".htm")
MARKDOWN_SUFFIXES = (".md",)


def write_report(
    folders: Sequence[str | os.PathLike[str]],
    out: Path,
    *,
    data: str | None = None,
    title: str | None = None,
    paper: str | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the report of run folders, result files, or folders of either; return a summary of what was written.

    `.html` gives one file with plots, tables and sample answers; `.md` gives tables and text. `data` is the file with
    the questions that the runs were scored on, if the runs do not record it. `paper` names a published table, such as
    `pce-table2`, or a paper: then the report compares its values and findings with those of the runs.
    """
    suffix = out.suffix.lower()
    check_output_file(out, inputs=[*map(Path, folders), *([data] if data else [])], overwrite=overwrite)
    if suffix not in HTML_SUFFIXES + MARKDOWN_SUFFIXES:
        raise UsageError(
            f"--out {out}: expected a file name that ends in .html, .htm or .md, got {suffix or 'no suffix'!r}."
        )
    if paper is not None:
        return _write_paper(paper, folders, out, data=data, title=title, overwrite=overwrite)
    notes: list[str] = []
    if suffix in MARKDOWN_SUFFIXES:
        from lamella.study.report.markdown import markdown_report

        text, count = markdown_report(folders, data=data, title=title)
    else:
        from lamella.study.report.html import html_report

        text, count, notes = html_report(folders, data=data, title=title)
    write_text(out, text)
    return {"report": str(out), "runs": count, "bytes": len(text.encode()), "notes": notes}


def _write_paper(
    paper: str,
    folders: Sequence[str | os.PathLike[str]],
    out: Path,
    *,
    data: str | None,
    title: str | None,
    overwrite: bool,
) -> dict[str, Any]:
    """Write the page of a published table or paper; the figures of a Markdown page are files beside it."""
    from lamella.study.papers.paper_page import paper_page
    from lamella.study.report.page_blocks import Figure, html_page, markdown_page

    page = paper_page(paper, folders, data=data, title=title)
    files: dict[Path, str] = {}
    if out.suffix.lower() in MARKDOWN_SUFFIXES:
        files[out] = markdown_page(page.blocks)
        files |= {out.with_name(block.name): block.svg for block in page.blocks if isinstance(block, Figure)}
        for path in list(files)[1:]:
            check_output_file(path, inputs=map(Path, folders), overwrite=overwrite)
    else:
        files[out] = html_page(page.blocks, title=page.title)
    for path, text in reversed(files.items()):  # the figures first: the page never links to a missing one
        write_text(path, text)
    return {
        "report": str(out),
        "runs": page.runs,
        "bytes": len(files[out].encode()),
        "figures": [str(path) for path in files if path != out],
        "notes": list(page.notes),
        "tables": list(page.tables),
    }
