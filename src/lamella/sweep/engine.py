"""Where the passes of a sweep are trained: the interface, and the engine that trains them in this process."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lamella import runs
from lamella.errors import one_line
from lamella.plan import Pass, Plan
from lamella.plugins import import_plugins
from lamella.progress import Log
from lamella.sweep.derived import DerivedRow, make_row

PASSES = ".passes"  # in the folder of a sweep: the checkpoints of passes that several runs share


@dataclass(frozen=True)
class Job:
    """One pass over the data with the runs trained in it, and the runs of the sweep that must be finished before.

    Or a row that is made from such runs without training.
    """

    configs: Pass
    needs: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()  # those, and the runs of earlier sweeps in the same folder that it starts from
    derived: DerivedRow | None = None  # the row to make, with the options of the run that it is made from

    @property
    def key(self) -> str:
        """The name of its checkpoint folder: the same for the same runs, in any sweep."""
        return hashlib.sha256("\n".join(self.configs).encode()).hexdigest()[:12]

    def checkpoint(self, out: Path) -> Path:
        """Return the path of the checkpoint that it resumes from."""
        return (out / PASSES / self.key if len(self.configs) > 1 else out / next(iter(self.configs))) / runs.CHECKPOINT


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    job: Job
    seconds: float
    error: str | None = None


class Engine(Protocol):
    """Accepts jobs as they become ready, and returns them as they end."""

    def start(self, job: Job) -> None:
        """Accept a job."""

    def wait(self) -> Outcome:
        """Return the next of the started jobs that ends."""


class LocalEngine:
    """Trains in this process, in the order in which the jobs were started."""

    def __init__(self, out: Path, log: Log) -> None:
        self.out, self.log = out, log
        self._started: deque[Job] = deque()

    def start(self, job: Job) -> None:
        """Put a job into the queue."""
        self._started.append(job)

    def wait(self) -> Outcome:
        """Train the next job of the queue."""
        job, began = self._started.popleft(), time.perf_counter()
        try:
            run_job(job, self.out, self.log)
        except Exception as error:  # an error of any kind ends this pass only: the others are still trained
            return Outcome(job, time.perf_counter() - began, one_line(error) or type(error).__name__)
        return Outcome(job, time.perf_counter() - began)


def run_job(job: Job, out: Path, log: Log) -> None:
    """Train the runs of a pass, each into the folder of its name in `out`; a run that was started is resumed."""
    from lamella.training.run import train_plan

    for config in job.configs.values():
        import_plugins(config.plugins)  # a worker is not the process that read the run file
    if job.derived is not None:
        make_row(job.derived, job.configs[job.derived.name], out, log)
        return
    plan = Plan((job.configs,), {name: {} for name in job.configs})
    folder = job.checkpoint(out).parent
    started = runs.run_state(folder) is not None
    if len(job.configs) == 1:
        train_plan(plan, folder, resume=started, overwrite=not started, log=log)
        return
    train_plan(plan, folder, resume=started, overwrite=not started, runs_folder=out, log=log)
    shutil.rmtree(folder)
