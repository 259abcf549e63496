"""A sweep: the runs of many run files, trained pass by pass, each in its own run folder.

A finished run is left as it is and one that was stopped goes on, so that a sweep is called again until all is done. A
run that fails is told of at the end and stops no other, but for those that start from it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lamella import runs
from lamella.config import RunConfig
from lamella.errors import ConfigError, LamellaError, RunError, UnreadableError, UsageError
from lamella.files import read_json, write_json
from lamella.plan import is_folder_name, load_plan, share_passes
from lamella.run_file import read_table
from lamella.sweep.engine import Engine, Job, LocalEngine, RayEngine, Say
from lamella.training.provenance import check_unchanged
from lamella.training.resume import check_same_options

ADVICE = "Choose another --out, or remove the folder of the run."

LIST = "runs"  # the one key of a file that lists run files


@dataclass(frozen=True)
class Row:
    """What a sweep says of a run at its end."""

    run: str
    state: str  # finished, failed, or blocked by another that failed
    skipped: bool = False  # it was over before
    scores: Mapping[str, Any] | None = None
    seconds: float | None = None  # of its pass, in this call
    error: str | None = None


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep, by name and pass by pass; a pass comes after those it starts from."""

    runs: Mapping[str, RunConfig]
    jobs: tuple[Job, ...]


class _SomeFailedError(RunError):
    """Marks the folder of the sweep as failed; its rows say the rest."""


def read_sweep(paths: Sequence[Path], out: Path, overrides: Sequence[str] = ()) -> Sweep:
    """The runs of run files, of files that list them, and of folders with such files; nothing is loaded or written."""
    files = list(dict.fromkeys(file for path in paths for file in _run_files(path)))
    configs: dict[str, RunConfig] = {}
    came_from: dict[str, Path] = {}
    for file in files:
        plan = load_plan(file, overrides)
        for name, config in plan.runs.items():
            if plan.named:
                own = name
            else:
                own = file.stem if len(plan.runs) == 1 else name if len(files) == 1 else f"{file.stem}-{name}"
            if not is_folder_name(own):
                raise UsageError(
                    f"{file}: its run would be called {own!r}, which names no run folder; rename the file."
                )
            if own in configs:
                raise UsageError(
                    f"{file}: expected one run called {own}. {came_from[own]} has one too; "
                    "rename one, or sweep them into different folders."
                )
            configs[own], came_from[own] = config, file
    out = absolute(out)
    needs = {name: _needs(config, out) - {name} for name, config in configs.items()}
    for name, needed in needs.items():
        for other in sorted(needed - set(configs)):
            if runs.run_state(out / other) is None:
                raise UsageError(
                    f"{came_from[name]}: starts from the run {other!r}, which is neither in this sweep nor in {out}."
                )
    return Sweep(configs, _in_order(configs, {name: needed & set(configs) for name, needed in needs.items()}))


def run_sweep(sweep: Sweep, out: Path, *, engine: Engine | None = None, say: Say = print) -> list[Row]:
    """Train what is not done yet; gives a row for every run, in the order of the sweep."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("sweep: expected one process; --engine ray spreads the runs over several.")
    out = absolute(out)
    kind = runs.kind_of_run(out)
    if kind is not None and kind[0] != "sweep":
        raise RunError(f"{out}: holds a run of {kind[0]}, not a sweep; choose another --out.")
    by_folder = {out / name: config for name, config in sweep.runs.items()}
    check_same_options(by_folder, advice=ADVICE)
    check_unchanged(by_folder, advice=ADVICE)
    rows = {name: _row_of(out, name) for name in sweep.runs if runs.is_over(out / name)}
    jobs = _left_to_do(sweep, out)
    earlier = [name for name in (kind[1] if kind else []) if (out / name / runs.RUN).is_file()]
    within = dict.fromkeys([*earlier, *sweep.runs])  # the folder stands for all that was ever trained into it
    with suppress(_SomeFailedError), runs.new_run(out, "sweep", overwrite=True, resume=True, within=within):
        _run_jobs(jobs, sweep, out, engine or LocalEngine(out, say), rows, say)
        failed = [row.run for row in rows.values() if row.state != "finished"]
        if failed:
            raise _SomeFailedError(f"{len(failed)} of {len(rows)} runs failed: {', '.join(failed)}")
    return [rows[name] for name in sweep.runs]


def run_on_ray(
    sweep: Sweep,
    out: Path,
    *,
    address: str | None = None,
    cpus: float = 1,
    gpus: float = 0,
    retries: int = 2,
    say: Say = print,
) -> list[Row]:
    """The same on a Ray cluster, which is joined before anything is written."""
    from lamella.sweep.ray_cluster import cluster, refuse_too_much

    with cluster(address):
        refuse_too_much(cpus, gpus)
        with RayEngine(absolute(out), cpus=cpus, gpus=gpus, retries=retries) as engine:
            return run_sweep(sweep, out, engine=engine, say=say)


def list_lines(sweep: Sweep, out: Path) -> list[str]:
    """What a sweep would do, a line for every pass."""
    done = {name for name in sweep.runs if runs.is_over(absolute(out) / name)}
    passes = f"{len(sweep.jobs)} {'pass' if len(sweep.jobs) == 1 else 'passes'}"
    runs_ = f"{len(sweep.runs)} {'run' if len(sweep.runs) == 1 else 'runs'}"
    lines = [f"{runs_} in {passes}" + (f", {len(done)} done" if done else "")]
    for number, job in enumerate(sweep.jobs, 1):
        config = next(iter(job.configs.values()))
        start = config.encoder.from_run or config.encoder.name
        names = ", ".join(f"{name} (done)" if name in done else name for name in job.configs)
        lines.append(f"{number}. {start}, {config.encoder.tuning['name']}: {names}")
    return lines


def table_lines(rows: Sequence[Row]) -> list[str]:
    """The rows as columns of text."""
    cells = [["run", "state", "F1", "seconds", "error"]]
    for row in rows:
        scores = row.scores or {}
        f1 = scores.get("f1", scores.get("answerability_f1"))  # of a reader that gives no text
        cells.append(
            [
                row.run,
                f"{row.state} before" if row.skipped else row.state,
                "-" if f1 is None else f"{f1:.2f}",
                "-" if row.seconds is None else f"{row.seconds:.0f}",
                row.error or "",
            ]
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _run_files(path: Path) -> list[Path]:
    """The run files that a path stands for, in order."""
    if path.is_dir():
        inside = sorted(path.glob("*.toml"))
        if not inside:
            raise UsageError(f"{path}: expected run files, *.toml. Found none.")
        return [file for one in inside for file in _run_files(one)]
    table = read_table(path)
    if LIST not in table:
        return [path]
    listed = table[LIST]
    if set(table) != {LIST} or not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise ConfigError(str(path), [f"{LIST}: expected a list of run files, and nothing beside it."])
    if not listed:
        raise ConfigError(str(path), [f"{LIST}: expected run files. The list is empty."])
    for one in listed:
        if not (path.parent / one).is_file():
            raise UnreadableError(f"{path}: lists {one}, and there is no such file.")
    return [path.parent / one for one in listed]


def _needs(config: RunConfig, out: Path) -> frozenset[str]:
    """The runs of a sweep's folder that a run reads: the one it starts from, its teachers."""
    found = [] if config.encoder.from_run is None else [config.encoder.from_run.partition("@")[0]]
    for named in config.model_names:
        path = absolute(Path(named))
        if out in path.parents:
            found.append(path.relative_to(out).parts[0])
    return frozenset(found)


def _in_order(configs: Mapping[str, RunConfig], needs: Mapping[str, frozenset[str]]) -> tuple[Job, ...]:
    """The passes of all runs. Runs that wait for different ones share none: it would wait for itself."""
    groups: dict[frozenset[str], dict[str, RunConfig]] = {}
    for name, config in configs.items():
        groups.setdefault(needs[name], {})[name] = config
    waiting = [Job(one, needed) for needed, group in groups.items() for one in share_passes(group)]
    ordered: list[Job] = []
    there: set[str] = set()
    while waiting:
        ready = [job for job in waiting if job.needs <= there]
        if not ready:
            stuck = sorted(name for job in waiting for name in job.configs)
            raise UsageError(f"sweep: the runs {', '.join(stuck)} start from one another, so that none can be first.")
        ordered += ready
        there |= {name for job in ready for name in job.configs}
        waiting = [job for job in waiting if job not in ready]
    return tuple(ordered)


def _left_to_do(sweep: Sweep, out: Path) -> list[Job]:
    """The passes without the runs that are over; one that was stopped goes on whole, from its checkpoint."""
    left = []
    for job in sweep.jobs:
        rest = {name: config for name, config in job.configs.items() if not runs.is_over(out / name)}
        if rest:
            left.append(job if job.checkpoint(out).is_file() else replace(job, configs=rest))
    return left


def _run_jobs(jobs: Sequence[Job], sweep: Sweep, out: Path, engine: Engine, rows: dict[str, Row], say: Say) -> None:
    """Start every pass once the runs it needs are there; write down what is known after each."""
    waiting, running = list(jobs), 0
    _write_summary(sweep, out, rows)
    while waiting or running:
        for job in list(waiting):
            bad = sorted(name for name in job.needs if name in rows and rows[name].state != "finished")
            if bad:
                waiting.remove(job)
                rows.update({name: Row(name, "blocked", error=f"starts from {bad[0]}") for name in job.configs})
            elif job.needs <= set(rows):
                waiting.remove(job)
                engine.start(job)
                running += 1
        if running:
            outcome = engine.wait()
            running -= 1
            for name in outcome.job.configs:
                rows[name] = _row_of(out, name, seconds=outcome.seconds, error=outcome.error)
                say(f"{name}: {rows[name].state}" + (f" ({rows[name].error})" if rows[name].error else ""))
        _write_summary(sweep, out, rows)


def _row_of(out: Path, name: str, *, seconds: float | None = None, error: str | None = None) -> Row:
    """What the folder of a run says of it; `error` is that of its pass, which may have ended before it had a folder."""
    folder, record, scores = out / name, {}, None
    with suppress(LamellaError):
        record = read_json(folder / runs.RUN)
    finished = record.get("state") == "finished"
    if finished and (folder / runs.RESULTS).is_file():
        scores = read_json(folder / runs.RESULTS)
    told = None if finished else error or record.get("error") or "ended without a result"
    state = "finished" if finished else "failed"
    return Row(name, state, skipped=seconds is None, scores=scores, seconds=seconds, error=told)


def _write_summary(sweep: Sweep, out: Path, rows: Mapping[str, Row]) -> None:
    """What the runs differ in beside what they scored, as `train` writes it of several, and what became of each."""
    flat = {name: config.flat() for name, config in sweep.runs.items()}
    first = next(iter(flat.values()))
    varied = sorted(key for key in first if any(one[key] != first[key] for one in flat.values()))
    listed = []
    for name, options in flat.items():
        row = rows.get(name, Row(name, "unfinished"))
        listed.append(
            {
                "run": name,
                "options": {key: options[key] for key in varied},
                "scores": dict(row.scores or {}),
                "state": row.state,
                "error": row.error,
            }
        )
    write_json(out / runs.SUMMARY, {"varied": varied, "runs": listed})


def absolute(path: Path) -> Path:
    """The same wherever it is read from: in the run's options, and in another process."""
    return Path(os.path.realpath(os.path.expanduser(path)))
