"""Commands about many runs: sweep, compare, recommend, analyse, report."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lamella.cli.app import Address, AsJson, DataOfRuns, Overwrite, RunFolders, app

if TYPE_CHECKING:
    from lamella.study.compare import Comparison
    from lamella.study.recommend import Recommendation


@app.command()
def analyse(
    names: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Finished runs with predictions, or folders of several."),
    ],
    data: Annotated[
        str | None,
        typer.Option("--data", help="The data file that they were scored on; default: as the runs say."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A folder for analysis.json and mistakes.md.")] = None,
    sample: Annotated[
        int,
        typer.Option(
            "--sample", min=0, help="Questions to run models on whose attention over layers is shown; 0: none."
        ),
    ] = 200,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Show what runs get right and wrong, and where: by kind of mistake, of question, and by layer."""
    from lamella.runs import new_run
    from lamella.study.analysis.analyse import analyse as look
    from lamella.study.analysis.analyse import write_analysis
    from lamella.study.analysis.tables import print_analysis

    analysis = look(names, data=data, sample=sample)
    if out is not None:
        with new_run(out, "analyse", overwrite=overwrite, needs=[run.folder for run in analysis.runs]) as folder:
            write_analysis(folder, analysis)
    if as_json:
        typer.echo(json.dumps(analysis.numbers, indent=2))
        return
    print_analysis(analysis.numbers)
    if out is not None:
        typer.echo(f"{out}: analysis.json and mistakes.md written")


@app.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUNS...", help="Run folders, result files, or folders of them.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write; .md: a page of tables.")],
    data: Annotated[
        str | None,
        typer.Option("--data", help="The data file that the runs were scored on, where they do not say it themselves."),
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="The heading of the report.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file that --out names.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show runs side by side in one HTML file that opens offline: plots, tables, sample answers."""
    from lamella.errors import counted
    from lamella.study.report.write import write_report

    written = write_report(folders, out, data=data, title=title, overwrite=overwrite)
    if as_json:
        typer.echo(json.dumps(written, ensure_ascii=False))
        return
    count, size = written["runs"], written["bytes"]
    size_text = f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.0f} kB"
    typer.echo(f"{out}: {counted(count, 'run')}, {size_text}")
    for note in written["notes"]:
        typer.echo(f"note: {note}")


@app.command()
def compare(
    folders: RunFolders,
    data: DataOfRuns = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", help="The run to compare the others with; default: the first.")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option("--keep", help="Keep each run as a small result file in this folder; a single run: FILE.json."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace other result files in --keep.")] = False,
    as_json: AsJson = False,
) -> None:
    """Lay runs side by side: quality, cost, and which differences are more than chance."""
    from lamella.errors import UsageError
    from lamella.study.compare import compare as compare_runs
    from lamella.study.compare import keep_and_compare

    if overwrite and keep is None:
        raise UsageError("compare --overwrite: goes with --keep.")
    if keep is None:
        _show(compare_runs(folders, data=data, baseline=baseline), as_json)
        return
    comparison, files = keep_and_compare(folders, keep, data=data, baseline=baseline, overwrite=overwrite)
    if as_json:
        content = comparison.to_dict() if comparison else {}
        typer.echo(json.dumps({**content, "kept": [str(file) for file in files]}, indent=2, ensure_ascii=False))
        return
    lines = [f"{file}: kept, {file.stat().st_size / 1000:.0f} kB" for file in files]
    typer.echo("\n".join([*(comparison.lines() if comparison else []), *lines]))


@app.command()
def recommend(
    folders: RunFolders,
    max_params: Annotated[float | None, typer.Option("--max-params", help="Parameters that are trained.")] = None,
    max_ms: Annotated[
        float | None, typer.Option("--max-ms", help="Milliseconds that a question takes to answer.")
    ] = None,
    max_train_minutes: Annotated[
        float | None, typer.Option("--max-train-minutes", help="Minutes that training takes.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Consider only runs timed on this device; needed if the runs name several."),
    ] = None,
    data: DataOfRuns = None,
    as_json: AsJson = False,
) -> None:
    """Choose the best run within a budget; shows what is as good and cheaper, and what more would buy."""
    from lamella.study.recommend import recommend as choose

    recommendation = choose(
        folders, max_params=max_params, max_ms=max_ms, max_train_minutes=max_train_minutes, device=device, data=data
    )
    _show(recommendation, as_json)


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
    address: Address = None,
    cpus: Annotated[float, typer.Option("--cpus-per-run", min=0, help="CPUs that Ray gives a pass.")] = 1.0,
    gpus: Annotated[float, typer.Option("--gpus-per-run", min=0, help="GPUs, or a part of one.")] = 0.0,
    retries: Annotated[int, typer.Option("--retries", min=0, help="Times to try again when a worker dies.")] = 2,
    only_list: Annotated[bool, typer.Option("--list", help="Only say which passes and runs there are.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train the runs of many run files; called again, it goes on with what is not done."""
    from lamella.errors import RunError, UsageError
    from lamella.sweep.sweep import list_lines, read_sweep, run_on_ray, run_sweep, table_lines

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


def _show(result: Comparison | Recommendation, as_json: bool) -> None:
    typer.echo(json.dumps(result.to_dict(), indent=2, ensure_ascii=False) if as_json else str(result))
