"""Commands that read run folders: report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lamella.cli.app import AsJson, app


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Run folders, or folders of run folders.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.")],
    data: Annotated[
        str | None,
        typer.Option("--data", help="The data file that the runs were scored on, where they do not say it themselves."),
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="The heading of the report.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file that --out names.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show runs side by side in one HTML file that opens offline: plots, tables, sample answers."""
    from lamella.study.report import write_report

    written = write_report(folders, out, data=data, title=title, overwrite=overwrite)
    if as_json:
        typer.echo(json.dumps(written, ensure_ascii=False))
        return
    count = written["runs"]
    typer.echo(f"{out}: {count} run{'s' if count != 1 else ''}, {written['bytes'] / 1e6:.1f} MB")
    for note in written["notes"]:
        typer.echo(f"note: {note}")
