"""Train the passes of a sweep on the workers of a Ray cluster.

A worker that sees the folder of the sweep writes there. A worker on another machine without a shared disk writes into a
folder of the same path on its own disk, and the run folders are sent back through Ray's object store.
"""

from __future__ import annotations

import io
import os
import tarfile
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamella import runs
from lamella.atomic import OLD, replace_folder, temporary_folder
from lamella.errors import LamellaError, counted, one_line
from lamella.files import read_json
from lamella.progress import silent
from lamella.sweep.engine import PASSES, Job, Outcome, run_job


class RayEngine:
    """Trains as many passes at once as the cluster has resources for; a pass whose worker dies is retried."""

    def __init__(self, out: Path, *, cpus: float = 1, gpus: float = 0, retries: int = 2) -> None:
        self.out, self.retries = out, retries
        self._options = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": retries}
        self._marker = out / f".sweep-{uuid.uuid4().hex}"  # a worker that sees this file shares the disk
        self._running: dict[Any, tuple[Job, float]] = {}

    def __enter__(self) -> RayEngine:
        return self

    def __exit__(self, *error: object) -> None:
        import ray

        for task in self._running:
            ray.cancel(task, force=True)
        self._marker.unlink(missing_ok=True)

    def start(self, job: Job) -> None:
        """Submit a job to the cluster."""
        if not self._running:
            for left in self.out.glob(".sweep-*"):  # of a sweep that was killed: the folder is locked for this one
                left.unlink(missing_ok=True)
        self._marker.touch()
        self._submit(job, None, time.perf_counter())

    def wait(self) -> Outcome:
        """Return the next job that ends, with its run folders in place."""
        import ray

        while True:
            (task,), _ = ray.wait(list(self._running), num_returns=1)
            job, began = self._running.pop(task)
            try:
                reply: _Reply = ray.get(task)
            except ray.exceptions.RayError as error:
                times = counted(self.retries + 1, "time")
                return Outcome(
                    job, time.perf_counter() - began, f"its worker was lost {times} ({one_line(error, 100)})"
                )
            if reply.lacks_models:
                self._submit(job, ray.put(pack(self.out, sorted(_with_base_runs(job.reads, self.out)))), began)
                continue
            if reply.folders is not None:
                unpack(reply.folders, self.out)
            return Outcome(job, reply.seconds, reply.error)

    def _submit(self, job: Job, models: Any, began: float) -> None:
        import ray

        task = ray.remote(train_on_worker).options(name=f"lamella-{next(iter(job.configs))}", **self._options)
        self._running[task.remote(job, self.out, self._marker, Path.cwd(), models)] = job, began


@dataclass(frozen=True)
class _Reply:
    """What a worker returns for a job."""

    seconds: float = 0.0
    error: str | None = None
    folders: bytes | None = None  # the run folders, if the disk is not shared
    lacks_models: bool = False  # the runs that the job starts from are not on the disk of the worker


def train_on_worker(job: Job, out: Path, marker: Path, working_folder: Path, models: bytes | None) -> _Reply:
    """Train a job on a worker, and return its run folders if the disk is not shared.

    Ray may call this again after the worker was killed; training then resumes from the checkpoint if there is one.
    """
    began, error = time.perf_counter(), None
    if working_folder.is_dir():
        os.chdir(working_folder)  # data files may be named relative to where the sweep was started
    shared_disk = marker.exists()
    if not shared_disk and models is None and not all(runs.run_state(out / name) == "finished" for name in job.reads):
        return _Reply(lacks_models=True)
    if models is not None:
        unpack(models, out)
    try:
        run_job(job, out, silent)
    except Exception as failure:
        error = one_line(failure) or type(failure).__name__
    folders = None if shared_disk else pack(out, [*job.configs, f"{PASSES}/{job.key}"])
    return _Reply(time.perf_counter() - began, error, folders)


def pack(out: Path, names: Iterable[str]) -> bytes:
    """Return the existing ones of some folders inside `out` as the bytes of an archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in names:
            if (out / name).is_dir():
                archive.add(out / name, arcname=name)
    return buffer.getvalue()


def unpack(archive: bytes, out: Path) -> None:
    """Replace the folders of the same names by the packed ones, each once it is complete."""
    with temporary_folder(out / PASSES / "arriving") as arriving:
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            packed.extractall(arriving, filter="data")
            folders = [
                Path(member.name)
                for member in packed
                if Path(member.name).parent.name in ("", PASSES) and member.isdir()
            ]
        for folder in folders:
            (out / folder).parent.mkdir(exist_ok=True)
            replace_folder(arriving / folder, out / folder, arriving / OLD)


def _with_base_runs(names: Iterable[str], out: Path) -> set[str]:
    """Return some runs, and the runs in the same folder that their models are based on."""
    needed: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        needed.add(name)
        try:
            base = Path(read_json(out / name / runs.CONFIG)["encoder"]["name"])
        except (LamellaError, KeyError):
            continue
        if out in base.parents and (below := base.relative_to(out).parts[0]) not in needed:
            waiting.append(below)
    return needed
