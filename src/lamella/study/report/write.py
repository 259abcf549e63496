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
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the report of run folders, result files, or folders of either; return a summary of what was written.

    `.html` gives one file with plots, tables and sample answers; `.md` gives tables and text. `data` is the file with
    the questions that the runs were scored on, if the runs do not record it.
    """
    suffix = out.suffix.lower()
    check_output_file(out, inputs=[*map(Path, folders), *([data] if data else [])], overwrite=overwrite)
    if suffix not in HTML_SUFFIXES + MARKDOWN_SUFFIXES:
        raise UsageError(
            f"--out {out}: expected a file name that ends in .html, .htm or .md, got {suffix or 'no suffix'!r}."
        )
    notes: list[str] = []
    if suffix in MARKDOWN_SUFFIXES:
        from lamella.study.report.markdown import markdown_report

        text, count = markdown_report(folders, data=data, title=title)
    else:
        from lamella.study.report.html import html_report

        text, count, notes = html_report(folders, data=data, title=title)
    write_text(out, text)
    return {"report": str(out), "runs": count, "bytes": len(text.encode()), "notes": notes}
