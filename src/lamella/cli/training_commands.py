"""Commands that train: train, extract."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from lamella.cli.app import OnBadAnswer, Overwrite, app


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="The run file (TOML), or the config.json of an earlier run.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The run folder to write.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change an option: --set training.epochs=3. Repeatable."),
    ] = None,
    on_bad_answer: OnBadAnswer = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run that --out holds.")] = False,
    auto_batch: Annotated[
        bool, typer.Option("--auto-batch", help="Out of memory, compute a batch in halves, and those in halves.")
    ] = False,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Read hidden states that `lamella extract` wrote there.")
    ] = None,
    overfit: Annotated[
        int | None,
        typer.Option("--overfit", min=1, help="Only check that so many questions can be learnt by heart, say 32."),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Train a reader as a run file describes, or several of them in one pass."""
    from lamella.errors import UsageError
    from lamella.plan import load_plan

    if resume and overwrite:
        raise UsageError("train: expected --resume or --overwrite, not both.")
    overrides = list(settings or [])
    if on_bad_answer:
        overrides.append(f"data.on_bad_answer={on_bad_answer}")
    plan = load_plan(config, overrides)

    from lamella.training.run import train_plan

    train_plan(
        plan,
        out,
        overwrite=overwrite,
        resume=resume,
        auto_batch=auto_batch,
        overfit=overfit,
        cache=cache,
        say=typer.echo,
    )


@app.command()
def extract(
    config: Annotated[Path, typer.Argument(help="The run file (TOML) whose learners will read the hidden states.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write them into.")],
    storage: Annotated[
        Literal["fp32", "fp16", "bf16", "int8"], typer.Option("--storage", help="Number format on disk.")
    ] = "fp16",
    all_layers: Annotated[
        bool, typer.Option("--all-layers", help="Keep every layer, not only those that the learners read.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change an option: --set data.max_train_samples=500. Repeatable."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a cache of other options.")] = False,
) -> None:
    """Write the hidden states of a frozen encoder to disk, to train many heads from with `train --cache`."""
    from lamella.plan import load_plan

    plan = load_plan(config, list(settings or []))

    from lamella.training.extract import extract as extract_states

    extract_states(plan, out, storage=storage, all_layers=all_layers, overwrite=overwrite, say=typer.echo)
