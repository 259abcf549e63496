"""Commands about many runs: sweep, compare, recommend, analyse, report."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lamella.cli.app import (
    Address,
    AsJson,
    Engine,
    Overwrite,
    OverwriteFile,
    RunData,
    RunFolders,
    Settings,
    app,
    warn_of_unchecked_options,
)

if TYPE_CHECKING:
    from lamella.study.compare import Comparison
    from lamella.study.recommend import Recommendation


@app.command()
def analyse(
    names: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Finished runs with predictions, or folders of several."),
    ],
    data: RunData = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="RUN", help="The folder to write analysis.json and mistakes.md to."),
    ] = None,
    sample: Annotated[
        int,
        typer.Option(
            "--sample", min=0, help="Questions on which to measure the models' attention over layers; 0: none."
        ),
    ] = 200,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Show which questions runs get wrong, and how.

    Counts the kinds of mistakes, weak groups of questions, near misses, and the layers that heads read.
    """
    from lamella.errors import UsageError
    from lamella.runs import check_run_folder, new_run
    from lamella.study.analysis.analyse import analyse as analyse_runs
    from lamella.study.analysis.analyse import write_analysis
    from lamella.study.analysis.terminal_tables import print_analysis

    if overwrite and out is None:
        raise UsageError("analyse --overwrite: needs --out.")
    if out is not None:
        check_run_folder(out, overwrite=overwrite)  # before the work, which may run models
    analysis = analyse_runs(names, data=data, sample=sample)
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
        list[Path], typer.Argument(metavar="RUN", help="Run folders, result files, or folders of them.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The HTML file to write; .md: Markdown tables.")
    ],
    data: RunData = None,
    title: Annotated[str | None, typer.Option("--title", help="The heading of the report.")] = None,
    paper: Annotated[
        str | None,
        typer.Option(
            "--paper",
            metavar="ID",
            help="Compare the runs with a published table (pce-table2), a paper (pce), or all papers (all).",
        ),
    ] = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="Show the layers that sample answers were read from; runs their models.")
    ] = False,
    overwrite: OverwriteFile = False,
    as_json: AsJson = False,
) -> None:
    """Write an HTML report that compares runs.

    It is one file that opens offline: plots, tables, sample answers.
    """
    from lamella.errors import counted, sized
    from lamella.study.report.write import write_report

    written = write_report(folders, out, data=data, title=title, paper=paper, layers=layers, overwrite=overwrite)
    if as_json:
        typer.echo(json.dumps(written, ensure_ascii=False))
        return
    typer.echo(f"{out}: {counted(written['runs'], 'run')}, {sized(written['bytes'])}")
    for note in written["notes"]:
        typer.echo(f"note: {note}")


@app.command()
def compare(
    folders: RunFolders,
    data: RunData = None,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", metavar="RUN", help="The run to compare the others with; default: the first."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            metavar="PATH",
            help="Save each run as a small result file in this folder; a single run: FILE.json.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing result files in --keep.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare runs: quality, cost, and statistical significance."""
    from lamella.errors import UsageError
    from lamella.study.compare import compare as compare_runs
    from lamella.study.compare import keep_and_compare

    if overwrite and keep is None:
        raise UsageError("compare --overwrite: needs --keep.")
    if keep is None:
        _print(compare_runs(folders, data=data, baseline=baseline), as_json)
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
    max_params: Annotated[float | None, typer.Option("--max-params", help="Budget: trained parameters.")] = None,
    max_ms: Annotated[
        float | None, typer.Option("--max-ms", help="Budget: milliseconds to answer one question.")
    ] = None,
    max_train_minutes: Annotated[
        float | None, typer.Option("--max-train-minutes", help="Budget: minutes of training.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="NAME", help="Consider only runs timed on this device; needed if the runs name several."
        ),
    ] = None,
    data: RunData = None,
    as_json: AsJson = False,
) -> None:
    """Recommend the best run within a budget.

    Also lists cheaper runs that are as good, and what a larger budget would gain.
    """
    from lamella.study.recommend import recommend as recommend_run

    recommendation = recommend_run(
        folders, max_params=max_params, max_ms=max_ms, max_train_minutes=max_train_minutes, device=device, data=data
    )
    _print(recommendation, as_json)


@app.command()
def sweep(
    configs: Annotated[
        list[Path], typer.Argument(metavar="CONFIG", help="Run files, files that list run files, or folders of them.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The folder to write the run folders to.")],
    settings: Settings = None,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="N,N,…", help="Train every run once per seed, as NAME-seedN: 0,1,2."),
    ] = None,
    engine: Engine = "local",
    address: Address = None,
    cpus: Annotated[
        float | None, typer.Option("--cpus-per-run", min=0, help="CPUs per pass, with --engine ray; default: 1.")
    ] = None,
    gpus: Annotated[
        float | None,
        typer.Option("--gpus-per-run", min=0, help="GPUs per pass, with --engine ray; may be a fraction; default: 0."),
    ] = None,
    retries: Annotated[
        int | None, typer.Option("--retries", min=0, help="Retries when a worker dies, with --engine ray; default: 2.")
    ] = None,
    only_list: Annotated[bool, typer.Option("--list", help="List the passes and runs without training.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train the runs of many run files; call again to continue."""
    from lamella.errors import RunError, UsageError, counted
    from lamella.sweep.sweep_plan import plan_lines, read_sweep

    of_ray = {"--address": address, "--cpus-per-run": cpus, "--gpus-per-run": gpus, "--retries": retries}
    chosen = {option: value for option, value in of_ray.items() if value is not None}
    if engine == "local" and chosen:
        raise UsageError(f"sweep {next(iter(chosen))}: needs --engine ray.")

    planned = read_sweep(configs, out, list(settings or []), _parse_seeds(seeds))
    for note in planned.notes:
        typer.echo(f"note: {note}", err=True)
    if only_list:
        warn_of_unchecked_options(", ".join(map(str, configs)))
        passes = [list(job.configs) for job in planned.jobs]
        listed = {"passes": passes, "derived": list(planned.derived)}
        typer.echo(json.dumps(listed, indent=2) if as_json else "\n".join(plan_lines(planned, out)))
        return

    import lamella.training.run  # noqa: F401 - without torch, fail here, not in every run
    from lamella.sweep.sweep import run_on_ray, run_sweep, table_lines
    from lamella.training.fitting.interrupts import InterruptedTrainingError

    def log(line: str) -> None:
        typer.echo(line, err=as_json)

    try:
        if engine == "ray":
            outcomes = run_on_ray(
                planned,
                out,
                address=address,
                cpus=1.0 if cpus is None else cpus,
                gpus=0.0 if gpus is None else gpus,
                retries=2 if retries is None else retries,
                log=log,
            )
        else:
            outcomes = run_sweep(planned, out, log=log)
    except InterruptedTrainingError as interruption:
        typer.echo(f"lamella: {interruption}; repeat the command to continue", err=True)
        raise typer.Exit(interruption.exit_code) from None
    typer.echo(json.dumps({"runs": [asdict(outcome) for outcome in outcomes]}, indent=2) if as_json else "")
    if not as_json:
        typer.echo("\n".join(table_lines(outcomes)))
    failed = [outcome.run for outcome in outcomes if outcome.state != "finished"]
    if failed:
        raise RunError(
            f"{out}: {len(failed)} of {counted(len(outcomes), 'run')} failed; repeat the command to retry them."
        )


def _parse_seeds(text: str | None) -> list[int]:
    from lamella.errors import UsageError

    words = [] if text is None else [word.strip() for word in text.split(",")]
    seeds = [int(word) for word in words if word.isascii() and word.isdecimal()]
    if len(seeds) < len(words) or len(set(seeds)) < len(seeds):
        raise UsageError(f"sweep --seeds: expected different whole numbers, as in 0,1,2, got {text!r}.")
    return seeds


def _print(result: Comparison | Recommendation, as_json: bool) -> None:
    typer.echo(json.dumps(result.to_dict(), indent=2, ensure_ascii=False) if as_json else str(result))
