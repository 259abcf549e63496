"""Run a sweep: train the runs of its plan pass by pass, each into its own run folder.

A finished run is skipped and a stopped run is resumed, so the same command can be repeated until all runs are done. A
run that fails is reported at the end; only the runs that start from it are blocked.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lamella import runs
from lamella.errors import LamellaError, RunError, UsageError, counted
from lamella.files import read_json, write_json
from lamella.progress import Log
from lamella.sweep.derived import DerivedRow, check_same_row, is_current
from lamella.sweep.engine import Engine, Job, LocalEngine
from lamella.sweep.sweep_plan import Sweep, absolute_path
from lamella.training.early_checks import check_depths, check_lengths
from lamella.training.provenance import check_unchanged
from lamella.training.resume import check_same_options

ADVICE = "Choose another --out, or remove the folder of the run."


@dataclass(frozen=True)
class RunOutcome:
    """The state of a run at the end of a sweep."""

    run: str
    state: str  # finished, failed, or blocked by a failed run
    skipped: bool = False  # it was done before this call
    scores: Mapping[str, Any] | None = None
    seconds: float | None = None  # of its pass, in this call
    error: str | None = None


class _SomeFailedError(RunError):
    """Marks the folder of the sweep as failed; the outcomes have the details."""


def run_sweep(sweep: Sweep, out: Path, *, engine: Engine | None = None, log: Log = print) -> list[RunOutcome]:
    """Train the runs that are not done yet; return the outcome of every run, in the order of the sweep."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("sweep: expected a single process; use --engine ray to train on several.")
    out = absolute_path(out)
    kind = runs.kind_of_run(out)
    if kind is not None and kind[0] != "sweep":
        raise RunError(f"{out}: expected the folder of a sweep, got a run of {kind[0]}; choose another --out.")
    config_of_folder = {out / name: config for name, config in sweep.runs.items()}
    check_same_options(config_of_folder, advice=ADVICE)
    check_unchanged(config_of_folder, advice=ADVICE)
    for row in _derived_rows(sweep):
        check_same_row(row, out, advice=ADVICE)
    check_depths(sweep.runs)
    check_lengths(sweep.runs)
    outcomes = {name: _read_outcome(out, name) for name in sweep.runs if runs.is_over(out / name)}
    outcomes |= {row.name: _read_outcome(out, row.name) for row in _derived_rows(sweep) if is_current(row, out)}
    jobs = _remaining_jobs(sweep, out)
    earlier = [name for name in (kind[1] if kind else []) if (out / name / runs.RUN).is_file()]
    within = dict.fromkeys([*earlier, *sweep.names])  # the record of the folder lists the runs of all its sweeps
    with suppress(_SomeFailedError), runs.new_run(out, "sweep", overwrite=True, resume=True, within=within):
        _remove_checkpoints(sweep, out)
        _run_jobs(jobs, sweep, out, engine or LocalEngine(out, log), outcomes, log)
        failed = [outcome.run for outcome in outcomes.values() if outcome.state != "finished"]
        if failed:
            raise _SomeFailedError(f"{len(failed)} of {counted(len(outcomes), 'run')} failed: {', '.join(failed)}")
    return [outcomes[name] for name in sweep.names]


def run_on_ray(
    sweep: Sweep,
    out: Path,
    *,
    address: str | None = None,
    cpus: float = 1,
    gpus: float = 0,
    retries: int = 2,
    log: Log = print,
) -> list[RunOutcome]:
    """Run a sweep on a Ray cluster, which is joined before anything is written."""
    from lamella.sweep.ray_cluster import check_resources, cluster
    from lamella.sweep.ray_engine import RayEngine

    with cluster(address):
        check_resources(cpus, gpus)
        with RayEngine(absolute_path(out), cpus=cpus, gpus=gpus, retries=retries) as engine:
            return run_sweep(sweep, out, engine=engine, log=log)


def table_lines(outcomes: Sequence[RunOutcome]) -> list[str]:
    """Return the outcomes as a table in plain text."""
    cells = [["run", "state", "F1", "seconds", "error"]]
    for outcome in outcomes:
        scores = outcome.scores or {}
        f1 = scores.get("f1", scores.get("answerability_f1"))  # of a model that predicts answerability only
        cells.append(
            [
                outcome.run,
                f"{outcome.state} before" if outcome.skipped else outcome.state,
                "-" if f1 is None else f"{f1:.2f}",
                "-" if outcome.seconds is None else f"{outcome.seconds:.0f}",
                outcome.error or "",
            ]
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _remaining_jobs(sweep: Sweep, out: Path) -> list[Job]:
    """Return the passes without the runs that are done; a stopped pass is resumed whole, from its checkpoint."""
    remaining = []
    for job in sweep.jobs:
        rest = {name: config for name, config in job.configs.items() if not runs.is_over(out / name)}
        if rest:
            remaining.append(job if job.checkpoint(out).is_file() else replace(job, configs=rest))
    return remaining + [job for job in sweep.derived.values() if job.derived and not is_current(job.derived, out)]


def _remove_checkpoints(sweep: Sweep, out: Path) -> None:
    """Remove the checkpoints of passes whose runs are done: a kill at the end of a pass leaves them."""
    for job in sweep.jobs:
        if len(job.configs) > 1 and all(runs.is_over(out / name) for name in job.configs):
            shutil.rmtree(job.checkpoint(out).parent, ignore_errors=True)


def _derived_rows(sweep: Sweep) -> list[DerivedRow]:
    return [job.derived for job in sweep.derived.values() if job.derived is not None]


def _run_jobs(
    jobs: Sequence[Job], sweep: Sweep, out: Path, engine: Engine, outcomes: dict[str, RunOutcome], log: Log
) -> None:
    """Start every pass once the runs it needs are finished; write the summary after each."""
    waiting, running = list(jobs), 0
    _write_summary(sweep, out, outcomes)
    while waiting or running:
        for job in list(waiting):
            failed = sorted(name for name in job.needs if name in outcomes and outcomes[name].state != "finished")
            if failed:
                waiting.remove(job)
                reason = f"{'is made from' if job.derived else 'starts from'} {failed[0]}"
                outcomes.update({name: RunOutcome(name, "blocked", error=reason) for name in job.configs})
            elif job.needs <= set(outcomes):
                waiting.remove(job)
                engine.start(job)
                running += 1
        if running:
            ended = engine.wait()
            running -= 1
            for name in ended.job.configs:
                outcome = outcomes[name] = _read_outcome(out, name, seconds=ended.seconds, error=ended.error)
                log(f"{name}: {outcome.state}" + (f" ({outcome.error})" if outcome.error else ""))
        _write_summary(sweep, out, outcomes)


def _read_outcome(out: Path, name: str, *, seconds: float | None = None, error: str | None = None) -> RunOutcome:
    """Read the outcome of a run from its folder; its pass may have failed with `error` before it had one."""
    folder, record, scores = out / name, {}, None
    with suppress(LamellaError):
        record = read_json(folder / runs.RUN)
    finished = record.get("state") == "finished"
    if finished and (folder / runs.RESULTS).is_file():
        scores = read_json(folder / runs.RESULTS)
    reason = None if finished else error or record.get("error") or "ended without a result"
    state = "finished" if finished else "failed"
    return RunOutcome(name, state, skipped=seconds is None, scores=scores, seconds=seconds, error=reason)


def _write_summary(sweep: Sweep, out: Path, outcomes: Mapping[str, RunOutcome]) -> None:
    """Write the options that vary, the scores and the state of every run, in the format of `train` for several runs."""
    flat = {name: config.flat() for name, config in sweep.runs.items()}
    first = next(iter(flat.values()))
    varied = sorted(key for key in first if any(options[key] != first[key] for options in flat.values()))
    summaries = []
    for name in sweep.names:
        options = flat.get(name)  # a derived row has none of its own
        outcome = outcomes.get(name, RunOutcome(name, "unfinished"))
        summaries.append(
            {
                "run": name,
                "options": {key: options[key] for key in varied} if options else {},
                "scores": dict(outcome.scores or {}),
                "state": outcome.state,
                "error": outcome.error,
            }
        )
    write_json(out / runs.SUMMARY, {"varied": varied, "runs": summaries})
