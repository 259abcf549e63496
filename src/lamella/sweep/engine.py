"""Where the passes of a sweep are trained: in this process one after the other, or by the workers of a Ray cluster.

A worker writes into the folder of the sweep where it sees it. Where it does not, being on another machine without a
common disk, it writes into a folder of the same path there, and the run folders travel back through Ray's object store.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lamella import runs
from lamella.errors import LamellaError, one_line
from lamella.files import read_json
from lamella.plan import Pass, Plan
from lamella.plugins import import_plugins

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


class RayEngine:
    """Trains on a Ray cluster, as many passes at once as its resources allow; one whose worker dies is tried again."""

    def __init__(self, out: Path, *, cpus: float = 1, gpus: float = 0, retries: int = 2) -> None:
        self.out, self.retries = out, retries
        self._options = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": retries}
        self._mark = out / f".sweep-{uuid.uuid4().hex}"  # whoever sees this sees the folder
        self._running: dict[Any, tuple[Job, float]] = {}

    def __enter__(self) -> RayEngine:
        return self

    def __exit__(self, *error: object) -> None:
        import ray

        for task in self._running:
            ray.cancel(task, force=True)
        self._mark.unlink(missing_ok=True)

    def start(self, job: Job) -> None:
        self._mark.touch()
        self._submit(job, None, time.perf_counter())

    def wait(self) -> Outcome:
        import ray

        while True:
            (task,), _ = ray.wait(list(self._running), num_returns=1)
            job, began = self._running.pop(task)
            try:
                answer: _Answer = ray.get(task)
            except ray.exceptions.RayError as error:
                lost = f"its worker was lost, {self.retries + 1} times in all ({one_line(error, 100)})"
                return Outcome(job, time.perf_counter() - began, lost)
            if answer.lacks_models:
                self._submit(job, ray.put(pack(self.out, sorted(_stand_on(job.needs, self.out)))), began)
                continue
            if answer.folders is not None:
                unpack(answer.folders, self.out)
            return Outcome(job, answer.seconds, answer.error)

    def _submit(self, job: Job, models: Any, began: float) -> None:
        import ray

        task = ray.remote(train_elsewhere).options(name=f"lamella-{next(iter(job.configs))}", **self._options)
        self._running[task.remote(job, self.out, self._mark, Path.cwd(), models)] = job, began


@dataclass(frozen=True)
class _Answer:
    """What a worker says of a job."""

    seconds: float = 0.0
    error: str | None = None
    folders: bytes | None = None  # where the disk is not common
    lacks_models: bool = False  # what the job starts from is on no disk that the worker sees


def train_elsewhere(job: Job, out: Path, mark: Path, here: Path, models: bytes | None) -> _Answer:
    """What a worker does: train a job, and send its folders home where they are not there already.

    It may be called again after it was killed, and goes on from the checkpoint where it finds one.
    """
    began, error = time.perf_counter(), None
    if here.is_dir():
        os.chdir(here)  # data files may be named relative to where the sweep was called
    common = mark.exists()
    if not common and models is None and not all(runs.run_state(out / name) == "finished" for name in job.needs):
        return _Answer(lacks_models=True)
    if models is not None:
        unpack(models, out)
    try:
        train_job(job, out, lambda line: None)
    except Exception as found:
        error = one_line(found) or type(found).__name__
    folders = None if common else pack(out, [*job.configs, f"{PASSES}/{job.key}"])
    return _Answer(time.perf_counter() - began, error, folders)


def pack(out: Path, names: Iterable[str]) -> bytes:
    """Some folders in a folder, those that exist, as the bytes of an archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in names:
            if (out / name).is_dir():
                archive.add(out / name, arcname=name)
    return buffer.getvalue()


def unpack(archive: bytes, out: Path) -> None:
    """Put packed folders in the place of those of the same names, each when all of it has arrived."""
    arriving = out / PASSES / f"arriving-{uuid.uuid4().hex}"
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            packed.extractall(arriving, filter="data")
            folders = [Path(one.name) for one in packed if (Path(one.name).parent.name in ("", PASSES)) and one.isdir()]
        for folder in folders:
            (out / folder).parent.mkdir(exist_ok=True)
            if (out / folder).exists():
                shutil.rmtree(out / folder)
            os.replace(arriving / folder, out / folder)
    finally:
        shutil.rmtree(arriving, ignore_errors=True)


def _stand_on(names: Iterable[str], out: Path) -> set[str]:
    """Some runs and, of the runs in the same folder, those that their models were trained on."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        found.add(name)
        try:
            base = Path(read_json(out / name / runs.CONFIG)["encoder"]["name"])
        except (LamellaError, KeyError):
            continue
        if out in base.parents and (below := base.relative_to(out).parts[0]) not in found:
            waiting.append(below)
    return found


def train_job(job: Job, out: Path, say: Say) -> None:
    """Train the runs of a pass, each into the folder of its name in `out`; one that was begun goes on."""
    from lamella.training.run import train_plan

    for config in job.configs.values():
        import_plugins(config.plugins)  # a worker is another process than the one that read the run file
    plan = Plan((job.configs,), {name: {} for name in job.configs})
    folder = job.checkpoint(out).parent
    if len(job.configs) == 1:
        train_plan(plan, folder, resume=True, log=say)
        return
    train_plan(plan, folder, resume=True, runs_folder=out, log=say)
    shutil.rmtree(folder)
