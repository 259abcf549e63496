"""Where the passes of a sweep are trained: in this process, one after the other."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lamella import runs
from lamella.errors import one_line
from lamella.plan import Pass, Plan

PASSES = ".passes"  # in the folder of a sweep: what runs that share a pass need while they train
Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """One pass over the data, with the runs trained in it, and the runs of the sweep that must be there before."""

    configs: Pass
    needs: frozenset[str] = frozenset()

    @property
    def key(self) -> str:
        """Names the folder of its checkpoint: the same for the same runs, in whatever sweep they are asked for."""
        return hashlib.sha256("\n".join(self.configs).encode()).hexdigest()[:12]

    def checkpoint(self, out: Path) -> Path:
        """Where it goes on from."""
        return (out / PASSES / self.key if len(self.configs) > 1 else out / next(iter(self.configs))) / runs.CHECKPOINT


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    job: Job
    seconds: float
    error: str | None = None


class Engine(Protocol):
    """Takes jobs as they become ready, and gives them back as they end."""

    def start(self, job: Job) -> None: ...

    def wait(self) -> Outcome:
        """The next job to end, of those that were started."""


class LocalEngine:
    """Trains in this process, in the order of the starts."""

    def __init__(self, out: Path, say: Say) -> None:
        self.out, self.say = out, say
        self._started: deque[Job] = deque()

    def start(self, job: Job) -> None:
        self._started.append(job)

    def wait(self) -> Outcome:
        job, began = self._started.popleft(), time.perf_counter()
        try:
            train_job(job, self.out, self.say)
        except Exception as error:  # whatever it is, it is this pass's: the others are trained all the same
            return Outcome(job, time.perf_counter() - began, one_line(error) or type(error).__name__)
        return Outcome(job, time.perf_counter() - began)


def train_job(job: Job, out: Path, say: Say) -> None:
    """Train the runs of a pass, each into the folder of its name in `out`; one that was begun goes on."""
    from lamella.training.run import train_plan

    plan = Plan((job.configs,), {name: {} for name in job.configs})
    folder = job.checkpoint(out).parent
    if len(job.configs) == 1:
        train_plan(plan, folder, resume=True, say=say)
        return
    train_plan(plan, folder, resume=True, runs_in=out, say=say)
    shutil.rmtree(folder)
