"""Commands about finished runs: compare, recommend."""

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


@app.command()
def recommend(
    folders: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Run folders, or folders that hold several runs.")
    ],
    max_params: Annotated[float | None, typer.Option("--max-params", help="Parameters that are trained.")] = None,
    max_ms: Annotated[
        float | None, typer.Option("--max-ms", help="Milliseconds that a question takes to answer.")
    ] = None,
    max_train_minutes: Annotated[
        float | None, typer.Option("--max-train-minutes", help="Minutes that training takes.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="The data file that they answered; default: as the runs record.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Choose the best run within a budget; says what is as good and cheaper, and what more would buy."""
    from lamella.study.recommend import recommend as choose

    found = choose(folders, max_params=max_params, max_ms=max_ms, max_train_minutes=max_train_minutes, data=data)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
        return
    for line in found.lines():
        typer.echo(line)
