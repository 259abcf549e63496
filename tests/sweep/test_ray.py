"""Sweeps and predictions on a Ray cluster equal those in one process, also if a worker is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from doubles import save_tiny_encoder
from lamella import runs
from lamella.data.examples import Example
from lamella.data.windows import features
from lamella.errors import LamellaError, RunError, UsageError
from lamella.files import read_json
from lamella.inference.predict import predict
from lamella.inference.questions import read_questions
from lamella.models.loading import load_model
from lamella.sweep import ray_engine, ray_predict
from lamella.sweep.engine import Job
from lamella.sweep.ray_cluster import cluster
from lamella.sweep.ray_engine import RayEngine, pack, train_on_worker, unpack
from lamella.sweep.sweep import run_on_ray, run_sweep
from lamella.sweep.sweep_plan import read_sweep
from outcomes import outcome
from run_files import write_run_file

pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # Ray does not close its log files
Lamella = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[None]:
    """Start one small cluster for all tests: starting takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setenv("OMP_NUM_THREADS", "1")
        with cluster(num_cpus=2, object_store_memory=80 * 2**20):
            yield


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("ray") / "tiny")


def write(path: Path, encoder: str, more: str = "", *, steps: int = 4) -> Path:
    return write_run_file(path, encoder, more, steps=steps, training=f'evaluate_every = "{steps} steps"')


def quiet(line: str) -> None:
    pass


def same_except_paths(first: Path, second: Path) -> bool:
    """Compare sweep folders; options and cards contain the folder if a run starts from another."""
    return {name: content.replace(bytes(first), b"") for name, content in outcome(first).items()} == {
        name: content.replace(bytes(second), b"") for name, content in outcome(second).items()
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write(folder / "first.toml", f'name = "{encoder}"')
    write(folder / "heads.toml", 'from = "first"\ntuning = "frozen"', "[grid.learner]\nseed = [0, 1]")
    write(folder / "lost.toml", f'name = "{folder / "nowhere"}"')
    return folder


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, files: Path) -> Path:
    """Run the same sweep in this process."""
    out = tmp_path_factory.mktemp("local") / "out"
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    run_sweep(read_sweep([files], out), out, log=quiet)
    torch.set_num_threads(before)
    return out


@pytest.mark.parametrize("shared_disk", [True, False])
def test_a_sweep_on_ray_equals_one_in_this_process(
    files: Path, local: Path, tmp_path: Path, shared_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shared_disk:
        monkeypatch.setattr(Path, "touch", lambda self: None)  # no worker sees the marker
    arrived: list[int] = []
    original = ray_engine.unpack
    monkeypatch.setattr(
        ray_engine, "unpack", lambda archive, out: (arrived.append(len(archive)), original(archive, out))
    )
    out = tmp_path / "out"
    outcomes = run_on_ray(read_sweep([files], out), out, log=quiet)
    assert {ended.run: ended.state for ended in outcomes} == {
        "first": "finished",
        "heads-seed0": "finished",
        "heads-seed1": "finished",
        "lost": "failed",
    }
    assert "nowhere" in str(outcomes[-1].error)
    assert len(arrived) == (0 if shared_disk else 3)
    for name in ("first", "heads-seed0", "heads-seed1"):
        assert outcome(out / name).keys() == outcome(local / name).keys()
    assert same_except_paths(out, local)
    assert not list(out.glob(".sweep-*"))
    assert all(ended.skipped for ended in run_on_ray(read_sweep([files], out), out, log=quiet)[:3])


def test_a_worker_without_a_shared_disk_requests_models_and_returns_its_runs(
    files: Path, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another folder simulates the same path on another machine."""
    monkeypatch.chdir(tmp_path)  # as the worker does, for this test only
    remote = tmp_path / "remote"
    remote.mkdir()
    job = read_sweep([files], remote).jobs[-1]
    assert set(job.needs) == {"first"}
    marker = tmp_path / "marker"
    assert train_on_worker(job, remote, marker, tmp_path, None).lacks_models
    reply = train_on_worker(job, remote, marker, tmp_path, pack(local, ["first"]))
    assert reply.error is None
    assert reply.folders is not None
    unpack(reply.folders, tmp_path / "home")
    assert sorted(path.name for path in (tmp_path / "home").iterdir() if path.name != ".passes") == sorted(job.configs)
    for name in job.configs:
        assert outcome(tmp_path / "home" / name) == outcome(remote / name)
        assert outcome(remote / name)["predictions.json"] == outcome(local / name)["predictions.json"]


def test_a_worker_without_a_shared_disk_requests_runs_of_an_earlier_sweep(
    files: Path, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (job,) = read_sweep([files / "heads.toml"], local).jobs  # `first` is in the folder, but not in this sweep
    assert (set(job.needs), set(job.reads)) == (set(), {"first"})
    (tmp_path / "remote").mkdir()
    assert train_on_worker(job, tmp_path / "remote", tmp_path / "marker", tmp_path, None).lacks_models


def workers_of(title: str) -> list[int]:
    """Return the processes of this cluster, and of no other on the machine, that Ray has named after a task."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(f"ray::{title}".encode()) and os.getpid() in ancestors(path.parent):
                processes.append(int(path.parent.name))
        except OSError:  # it has just ended
            continue
    return processes


def ancestors(process: Path) -> list[int]:
    """Return the parent of a process, its parent, and so on."""
    parents: list[int] = []
    while process.name != "0":
        status = (process / "status").read_text()
        parents.append(int(status.partition("PPid:")[2].split()[0]))
        process = process.with_name(str(parents[-1]))
    return parents


def kill_once_it_trains(name: str, checkpoint: Path, killed: list[int]) -> None:
    for _ in range(2000):
        if checkpoint.is_file() and (workers := workers_of(f"lamella-{name}")):
            os.kill(workers[0], signal.SIGKILL)
            killed.append(workers[0])
            return
        time.sleep(0.01)


def test_a_run_whose_worker_is_killed_resumes_with_the_same_result(tmp_path: Path, encoder: Path) -> None:
    file = write(tmp_path / "slow.toml", f'name = "{encoder}"', steps=60)
    run_on_ray(read_sweep([file], tmp_path / "whole"), tmp_path / "whole", log=quiet)
    out = tmp_path / "out"
    killed: list[int] = []
    killer = threading.Thread(target=kill_once_it_trains, args=("slow", out / "slow" / runs.CHECKPOINT, killed))
    killer.start()
    (ended,) = run_on_ray(read_sweep([file], out), out, retries=1, log=quiet)
    killer.join()
    assert killed
    assert ended.state == "finished"
    assert "resumed" in read_json(out / "slow" / runs.RUN)
    assert outcome(out / "slow") == outcome(tmp_path / "whole" / "slow")


def test_a_run_whose_worker_dies_too_often_fails_and_resumes_when_the_sweep_is_repeated(
    tmp_path: Path, encoder: Path
) -> None:
    file = write(tmp_path / "doomed.toml", f'name = "{encoder}"', steps=60)
    out = tmp_path / "out"
    killed: list[int] = []
    killer = threading.Thread(target=kill_once_it_trains, args=("doomed", out / "doomed" / runs.CHECKPOINT, killed))
    killer.start()
    (ended,) = run_on_ray(read_sweep([file], out), out, retries=0, log=quiet)
    killer.join()
    assert killed
    assert ended.state == "failed"
    assert "its worker was lost 1 time (" in str(ended.error)
    left = out / f".sweep-{'0' * 32}"  # of a sweep that was killed itself
    left.touch()
    (ended,) = run_on_ray(read_sweep([file], out), out, log=quiet)
    assert ended.state == "finished"
    assert "resumed" in read_json(out / "doomed" / runs.RUN)
    assert not left.exists()


def test_more_resources_than_a_machine_has_are_an_error_before_anything_is_written(files: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected at most what one machine has \(2 CPUs and"):
        run_on_ray(read_sweep([files], tmp_path / "out"), tmp_path / "out", cpus=3)
    assert not (tmp_path / "out").exists()


def test_an_address_without_a_cluster_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with (
        pytest.raises(RunError, match=r"--address 127\.0\.0\.1:1: no Ray cluster answers there"),
        cluster("127.0.0.1:1"),
    ):
        pass
    with pytest.raises(UsageError, match="expected host:port of a Ray cluster"), cluster("somewhere"):
        pass


def test_leaving_the_engine_cancels_running_tasks(tmp_path: Path, encoder: Path) -> None:
    file = write(tmp_path / "left.toml", f'name = "{encoder}"', steps=100_000)
    out = tmp_path / "out"
    out.mkdir()
    (job,) = read_sweep([file], out).jobs
    assert isinstance(job, Job)
    with RayEngine(out) as started:
        started.start(job)
        for _ in range(2000):
            if (out / "left" / runs.CHECKPOINT).is_file():
                break
            time.sleep(0.01)
        assert workers_of("lamella-left")
    for _ in range(500):
        if not workers_of("lamella-left"):
            break
        time.sleep(0.01)
    assert not workers_of("lamella-left")


def test_a_prediction_on_ray_equals_one_in_this_process(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lamella: Lamella
) -> None:
    monkeypatch.setattr(features, "LONG", 3000)  # splits here; a worker does not split its shard further
    examples = read_questions("demo:dev")[:40]
    shards = list(features.slices(examples))
    assert len(shards) > 2
    reader = load_model(local / "first", precision="fp32", device="cpu")
    plain = predict(reader, examples, batch_size=4)
    on_ray = ray_predict.predict_on_ray(str(local / "first"), examples, batch_size=4, precision="fp32")
    assert list(on_ray) == list(plain)
    assert on_ray == plain

    monkeypatch.undo()
    command = ("predict", "demo:dev", "--model", local / "first", "--precision", "fp32", "--out")
    for name, more in {"plain": (), "ray": ("--engine", "ray")}.items():
        code, _, err = lamella(*command, tmp_path / name, *more)
        assert code == 0, err
    assert outcome(tmp_path / "plain") == outcome(tmp_path / "ray")


@pytest.mark.parametrize(("length", "threads"), [(3000, 1), (features.LONG, 2)], ids=["two workers", "one worker"])
def test_workers_compute_with_the_cores_they_reserve(
    local: Path, length: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    class Reporting(ray_predict.Worker):
        def answer(self, shard: Sequence[Example]) -> Any:
            (first, *_), reserved = shard, ray.get_runtime_context().get_assigned_resources()["CPU"]
            super().answer([first])
            return {example.id: (self._model.threads, reserved) for example in shard}

    monkeypatch.setattr(features, "LONG", length)
    monkeypatch.setattr(ray_predict, "Worker", Reporting)
    examples = read_questions("demo:dev")[:40]
    reported = ray_predict.predict_on_ray(str(local / "first"), examples, precision="fp32")
    assert set(reported.values()) == {(threads, threads)}  # type: ignore[comparison-overlap]


def kill_what_answers(times: int, killed: list[int]) -> None:
    """Kill answering workers, each of them once, `times` in all."""
    for _ in range(6000):
        for worker in workers_of("Worker.answer"):
            if worker not in killed:
                os.kill(worker, signal.SIGKILL)
                killed.append(worker)
                if len(killed) == times:
                    return
        time.sleep(0.01)


@pytest.mark.parametrize(("times", "survives"), [(1, True), (ray_predict.RETRIES + 1, False)])
def test_a_prediction_survives_a_killed_worker_but_not_all_retries_failing(
    local: Path, times: int, survives: bool
) -> None:
    examples = read_questions("demo:dev")[:40]  # one shard, so one worker
    plain = predict(load_model(local / "first", precision="fp32", device="cpu"), examples, batch_size=4)
    killed: list[int] = []
    killer = threading.Thread(target=kill_what_answers, args=(times, killed))
    killer.start()
    try:
        if survives:
            assert ray_predict.predict_on_ray(str(local / "first"), examples, batch_size=4, precision="fp32") == plain
        else:
            with pytest.raises(RunError, match=r"^predict --engine ray: a worker was lost \(.*\)\.$"):
                ray_predict.predict_on_ray(str(local / "first"), examples, batch_size=4, precision="fp32")
    finally:
        killer.join()
    assert len(killed) == times


def test_an_error_of_the_model_on_a_worker_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(LamellaError, match="nowhere"):
        ray_predict.predict_on_ray(str(tmp_path / "nowhere"), read_questions("demo:dev")[:2])
