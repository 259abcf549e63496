"""Commands about finished runs: compare."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from lamella.cli.app import AsJson, app


@app.command()
def compare(
    folders: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Run folders, or folders that hold several runs.")
    ],
    data: Annotated[
        str | None, typer.Option("--data", help="The data file that they answered; default: as the runs record.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", help="The run to compare the others with; default: the first.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Lay runs side by side: quality, cost, and which differences are more than chance."""
    from lamella.study.compare import compare as compare_runs

    found = compare_runs(folders, data=data, baseline=baseline)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
        return
    for line in found.lines():
        typer.echo(line)
