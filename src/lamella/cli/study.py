"""Commands that study many runs: sweep."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from lamella.cli.app import AsJson, app


@app.command()
def sweep(
    configs: Annotated[
        list[Path], typer.Argument(metavar="CONFIG...", help="Run files, files that list them, or folders with them.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write the run folders into.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change an option in every run: --set training.epochs=3. Repeatable."),
    ] = None,
    engine: Annotated[
        Literal["local", "ray"], typer.Option("--engine", help="Train in this process, or on a Ray cluster.")
    ] = "local",
    address: Annotated[
        str | None, typer.Option("--address", help="The Ray cluster, host:port or auto; default: one on this machine.")
    ] = None,
    cpus: Annotated[float, typer.Option("--cpus-per-run", min=0, help="CPUs that Ray gives a pass.")] = 1.0,
    gpus: Annotated[float, typer.Option("--gpus-per-run", min=0, help="GPUs, or a part of one.")] = 0.0,
    retries: Annotated[int, typer.Option("--retries", min=0, help="Times to try again when a worker dies.")] = 2,
    only_list: Annotated[bool, typer.Option("--list", help="Only say which passes and runs there are.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train the runs of many run files; called again, it goes on with what is not done."""
    from lamella.errors import RunError, UsageError
    from lamella.study.sweep import list_lines, read_sweep, run_on_ray, run_sweep, table_lines

    if engine == "local" and address is not None:
        raise UsageError("sweep --address: is for --engine ray.")

    planned = read_sweep(configs, out, list(settings or []))
    if only_list:
        passes = [list(job.configs) for job in planned.jobs]
        typer.echo(json.dumps({"passes": passes}, indent=2) if as_json else "\n".join(list_lines(planned, out)))
        return

    def say(line: str) -> None:
        typer.echo(line, err=as_json)

    if engine == "ray":
        rows = run_on_ray(planned, out, address=address, cpus=cpus, gpus=gpus, retries=retries, say=say)
    else:
        rows = run_sweep(planned, out, say=say)
    typer.echo(json.dumps({"runs": [asdict(row) for row in rows]}, indent=2) if as_json else "")
    if not as_json:
        typer.echo("\n".join(table_lines(rows)))
    failed = [row.run for row in rows if row.state != "finished"]
    if failed:
        raise RunError(f"{out}: {len(failed)} of {len(rows)} runs failed; called again, the sweep tries them again.")
