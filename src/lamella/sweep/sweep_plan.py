"""The plan of a sweep: the runs of many run files, grouped into passes and ordered by what they start from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lamella import runs
from lamella.config import RunConfig
from lamella.errors import ConfigError, UnreadableError, UsageError, counted
from lamella.plan import DerivedOptions, Plan, is_folder_name, load_plan, share_passes
from lamella.run_file import read_table
from lamella.sweep.derived import DerivedRow, derived_rows, is_current, source_config, with_seed
from lamella.sweep.engine import Job
from lamella.sweep.override_notes import override_notes

LIST_KEY = "runs"  # the only key of a file that lists run files


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep by name, its passes, and the rows that are made from the runs.

    A pass comes after the runs that it starts from.
    """

    runs: Mapping[str, RunConfig]
    jobs: tuple[Job, ...]
    derived: Mapping[str, Job] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # about overrides

    @property
    def names(self) -> list[str]:
        """The names of all its run folders."""
        return [*self.runs, *self.derived]


def read_sweep(paths: Sequence[Path], out: Path, overrides: Sequence[str] = (), seeds: Sequence[int] = ()) -> Sweep:
    """Read run files, files that list run files, and folders of either. Nothing is loaded or written.

    With `seeds`, every run is planned once per seed, as NAME-seedN.
    """
    files = list(dict.fromkeys(file for path in paths for file in _run_files(path)))
    configs: dict[str, RunConfig] = {}
    file_of: dict[str, Path] = {}
    derived: dict[Path, DerivedOptions] = {}
    notes: list[str] = []
    for file in files:
        plan = load_plan(file, overrides)
        derived[file] = plan.derived
        notes += override_notes(file, plan, overrides)
        if seeds:
            _check_one_seed(plan, file, overrides)
        for plan_name, config in plan.runs.items():
            if plan.named:
                name = plan_name
            else:
                alone = len(plan.runs) == 1
                name = file.stem if alone else plan_name if len(files) == 1 else f"{file.stem}-{plan_name}"
            if not is_folder_name(name):
                raise UsageError(f"{file}: expected a name for a run folder, got {name!r}; rename the file.")
            if name in configs:
                raise UsageError(
                    f"{file}: expected a single run named {name}, got another from {file_of[name]}; "
                    "rename one, or sweep them into different folders."
                )
            configs[name], file_of[name] = config, file
    out = absolute_path(out)
    rows = [(row, file) for file, options in derived.items() for row in derived_rows(options, configs, seeds)]
    if seeds:
        _check_no_paths(configs, file_of, out)
        file_of = {with_seed(name, seed): file for name, file in file_of.items() for seed in seeds}
        configs = _with_seeds(configs, seeds)
    needs = {name: _needed_runs(config, out) - {name} for name, config in configs.items()}
    for name, needed in needs.items():
        for missing in sorted(needed - set(configs)):
            if runs.run_state(out / missing) is None:
                raise UsageError(
                    f"{file_of[name]}: expected the run {missing!r} to start from, but it is neither in this sweep nor "
                    f"in {out}; add its run file."
                )
    jobs = _ordered_jobs(configs, {name: needed & set(configs) for name, needed in needs.items()})
    jobs = tuple(replace(job, reads=frozenset[str]().union(*map(needs.__getitem__, job.configs))) for job in jobs)
    return Sweep(configs, jobs, _derived_jobs(rows, configs, out), tuple(notes))


def plan_lines(sweep: Sweep, out: Path) -> list[str]:
    """Describe what a sweep would do, one line per pass."""
    done = {name for name in sweep.runs if runs.is_over(absolute_path(out) / name)}
    head = f"{counted(len(sweep.runs), 'run')} in {counted(len(sweep.jobs), 'pass', 'passes')}"
    if sweep.derived:
        head += f", {counted(len(sweep.derived), 'derived row')}"
        rows = {name: job.derived for name, job in sweep.derived.items() if job.derived is not None}
        done |= {name for name, row in rows.items() if is_current(row, absolute_path(out))}
    lines = [head + (f", {len(done)} done" if done else "")]
    for number, job in enumerate(sweep.jobs, 1):
        config = next(iter(job.configs.values()))
        start = config.encoder.from_run or config.encoder.name
        lines.append(f"{number}. {start}, {config.encoder.tuning['name']}: {_listed(job.configs, done)}")
    for title, ensembles in (("copies", False), ("ensembles", True)):
        names = [name for name, job in sweep.derived.items() if job.derived and bool(job.derived.how) == ensembles]
        if names:
            lines.append(f"{title}: {_listed(names, done)}")
    return lines


def _listed(names: Iterable[str], done: set[str]) -> str:
    return ", ".join(f"{name} (done)" if name in done else name for name in names)


def absolute_path(path: Path) -> Path:
    """Return a path that means the same in the options of a run and in another process."""
    return Path(os.path.realpath(os.path.expanduser(path)))


def _run_files(path: Path) -> list[Path]:
    """Return the run files that a path names, in order."""
    if path.is_dir():
        inside = sorted(path.glob("*.toml"))
        if not inside:
            raise UsageError(f"{path}: expected run files (*.toml), got none.")
        return [file for child in inside for file in _run_files(child)]
    table = read_table(path)
    if LIST_KEY not in table:
        return [path]
    names = table[LIST_KEY]
    if set(table) != {LIST_KEY} or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(str(path), [f"{LIST_KEY}: expected a list of run files and no other key."])
    if not names:
        raise ConfigError(str(path), [f"{LIST_KEY}: expected run files, got an empty list."])
    for name in names:
        if not (path.parent / name).is_file():
            raise UnreadableError(f"{path}: lists {name}, but there is no such file.")
    return [path.parent / name for name in names]


def _needed_runs(config: RunConfig, out: Path) -> frozenset[str]:
    """Return the runs in the folder of the sweep that a run reads: its base model, start and teachers."""
    needed = [] if config.encoder.from_run is None else [config.encoder.from_run.partition("@")[0]]
    for name in config.model_names:
        path = absolute_path(Path(name))
        if out in path.parents:
            needed.append(path.relative_to(out).parts[0])
    return frozenset(needed)


def _with_seeds(configs: Mapping[str, RunConfig], seeds: Sequence[int]) -> dict[str, RunConfig]:
    """Return every run once per seed; a run that starts from another of the sweep starts from the one with its seed."""
    seeded = {}
    for name, config in configs.items():
        for seed in seeds:
            update: dict[str, Any] = {"learner": config.learner.model_copy(update={"seed": seed})}
            base, at, epoch = (config.encoder.from_run or "").partition("@")
            if base in configs:
                update["encoder"] = config.encoder.model_copy(update={"from_run": with_seed(base + at + epoch, seed)})
            seeded[with_seed(name, seed)] = config.model_copy(update=update)
    return seeded


def _derived_jobs(
    rows: Sequence[tuple[DerivedRow, Path]], configs: Mapping[str, RunConfig], out: Path
) -> dict[str, Job]:
    jobs: dict[str, Job] = {}
    for row, file in rows:
        if row.name in configs or row.name in jobs:
            raise UsageError(f"{file}: expected a single row named {row.name}, got another; rename one.")
        config = source_config(row, configs, out, file)
        jobs[row.name] = Job({row.name: config}, row.sources & set(configs), row.sources, row)
    return jobs


def _check_one_seed(plan: Plan, file: Path, overrides: Sequence[str]) -> None:
    """Refuse to replace seeds that the run file or `--set` chose on purpose."""
    found = sorted({config.learner.seed for config in plan.runs.values()})
    if len(found) > 1:
        raise UsageError(
            f"{file}: expected runs of one learner.seed to train with --seeds, got {', '.join(map(str, found))}; "
            "remove the seeds from the run file, or leave out --seeds."
        )
    if any(override.partition("=")[0].strip() == "learner.seed" for override in overrides):
        raise UsageError("sweep: expected --seeds or --set learner.seed, got both; choose one.")


def _check_no_paths(configs: Mapping[str, RunConfig], file_of: Mapping[str, Path], out: Path) -> None:
    """Refuse the path of another run of the sweep: with seeds, there are several runs instead of it."""
    for name, config in configs.items():
        from_run = (config.encoder.from_run or "").partition("@")[0]
        for read in sorted(_needed_runs(config, out) & set(configs) - {from_run}):
            raise UsageError(
                f"{file_of[name]}: run {name} reads {out / read} by its path, but --seeds trains {read} once per "
                f"seed; use encoder.from, or leave out --seeds."
            )


def _ordered_jobs(configs: Mapping[str, RunConfig], needs: Mapping[str, frozenset[str]]) -> tuple[Job, ...]:
    """Group the runs into passes and order them. Runs with different needs share no pass: it might wait for itself."""
    groups: dict[frozenset[str], dict[str, RunConfig]] = {}
    for name, config in configs.items():
        groups.setdefault(needs[name], {})[name] = config
    waiting = [Job(shared, needed) for needed, group in groups.items() for shared in share_passes(group)]
    ordered: list[Job] = []
    finished: set[str] = set()
    while waiting:
        ready = [job for job in waiting if job.needs <= finished]
        if not ready:
            stuck = sorted(name for job in waiting for name in job.configs)
            raise UsageError(
                f"sweep: the runs {', '.join(stuck)} start from one another in a circle; "
                "let one of them start from another model."
            )
        ordered += ready
        finished |= {name for job in ready for name in job.configs}
        waiting = [job for job in waiting if job not in ready]
    return tuple(ordered)
