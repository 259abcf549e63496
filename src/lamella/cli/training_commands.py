"""Commands that train: train, extract."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lamella.cli.app import OnBadAnswer, Out, Overwrite, Settings, app

if TYPE_CHECKING:
    from lamella.plan import Plan


@app.command()
def train(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="A run file (TOML), or the config.json of an earlier run.")
    ],
    out: Out,
    settings: Settings = None,
    run: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="NAME", help="Train only this [[run]] of the file. Repeatable."),
    ] = None,
    on_bad_answer: OnBadAnswer = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the interrupted run in --out.")] = False,
    auto_batch: Annotated[
        bool, typer.Option("--auto-batch", help="On out-of-memory, split the batch and retry.")
    ] = False,
    cache: Annotated[
        Path | None,
        typer.Option("--cache", metavar="DIR", help="Read hidden states from a folder that `lamella extract` wrote."),
    ] = None,
    overfit: Annotated[
        int | None,
        typer.Option("--overfit", min=1, help="Sanity check: memorise N training questions, for example 32."),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Train the reader or readers that a run file describes."""
    from lamella.errors import UsageError
    from lamella.plan import load_plan

    if resume and overwrite:
        raise UsageError("train: expected --resume or --overwrite, got both; choose one.")
    overrides = list(settings or [])
    if on_bad_answer:
        overrides.append(f"data.on_bad_answer={on_bad_answer}")
    plan = load_plan(config, overrides, only=run or ())
    _check_starts(plan, config)

    from lamella.training.fitting.interrupts import InterruptedTrainingError
    from lamella.training.run import train_plan

    try:
        train_plan(
            plan,
            out,
            overwrite=overwrite,
            resume=resume,
            auto_batch=auto_batch,
            overfit=overfit,
            cache=cache,
            log=typer.echo,
        )
    except InterruptedTrainingError as interruption:
        if int(os.environ.get("RANK", "0")) == 0:  # of several processes, one reports
            typer.echo(f"lamella: {interruption}; resume with: {_resume_command()}", err=True)
        raise typer.Exit(interruption.exit_code) from None


@app.command()
def extract(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="A run file (TOML) whose learners will read the hidden states.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The cache folder to write.")],
    storage: Annotated[
        Literal["fp32", "fp16", "bf16", "int8"], typer.Option("--storage", help="Number format on disk.")
    ] = "fp16",
    all_layers: Annotated[
        bool, typer.Option("--all-layers", help="Store every layer, not only those that the learners read.")
    ] = False,
    settings: Settings = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a cache with other options.")] = False,
) -> None:
    """Store the hidden states of a frozen encoder on disk.

    Train many heads from them with `lamella train --cache`.
    """
    from lamella.plan import load_plan

    plan = load_plan(config, list(settings or []))

    from lamella.training.extract import extract as extract_states

    extract_states(plan, out, storage=storage, all_layers=all_layers, overwrite=overwrite, log=typer.echo)


def _resume_command() -> str:
    """Return the command line of this process as it continues the run."""
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--resume", "--overwrite")]
    return shlex.join(["lamella", *arguments, "--resume"])


def _check_starts(plan: Plan, file: Path) -> None:
    """Refuse a run that starts from another run of the same file: only `sweep` trains them in that order."""
    from lamella.errors import UsageError

    if plan.derived.copies or plan.derived.ensembles:
        raise UsageError(
            f"{file}: expected runs to train, got [derived] rows too, which only sweep makes; use "
            f"`lamella sweep {file} --out DIR`, or choose runs with --run."
        )
    for name, config in plan.runs.items():
        start = (config.encoder.from_run or "").partition("@")[0]
        if start in plan.runs:
            raise UsageError(
                f"{file}: run {name} starts from run {start} of the same file, and `train` does not order runs; "
                f"use `lamella sweep {file} --out DIR`."
            )
