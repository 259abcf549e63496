"""On a Ray cluster a sweep and a prediction give what they give in one process, also when a worker is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from doubles import save_tiny_encoder
from lamella import runs
from lamella.data import features
from lamella.errors import LamellaError, RunError, UsageError
from lamella.files import read_json
from lamella.inference.predict import predict
from lamella.inference.questions import read_questions
from lamella.models.loading import load_model
from lamella.sweep import engine, ray_predict
from lamella.sweep.engine import Job, RayEngine, pack, train_elsewhere, unpack
from lamella.sweep.ray_cluster import cluster
from lamella.sweep.sweep import read_sweep, run_on_ray, run_sweep
from outcomes import outcome
from run_files import write_run_file

pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # Ray leaves its log files to the collector
Lamella = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[None]:
    """One small cluster for all tests: a start takes seconds."""
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


def same_but_for_the_place(one: Path, other: Path) -> bool:
    """Options and cards name the folder of the sweep where a run starts from another."""
    return {name: content.replace(bytes(one), b"") for name, content in outcome(one).items()} == {
        name: content.replace(bytes(other), b"") for name, content in outcome(other).items()
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write(folder / "first.toml", f'name = "{encoder}"')
    write(folder / "heads.toml", 'from = "first"\ntuning = "frozen"', "[grid.learner]\nseed = [0, 1]")
    write(folder / "lost.toml", f'name = "{folder / "nowhere"}"')
    return folder


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, files: Path) -> Path:
    """The same sweep in this process."""
    out = tmp_path_factory.mktemp("local") / "out"
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    run_sweep(read_sweep([files], out), out, say=quiet)
    torch.set_num_threads(before)
    return out


@pytest.mark.parametrize("common_disk", [True, False])
def test_a_sweep_on_ray_is_the_sweep_in_this_process(
    files: Path, here: Path, tmp_path: Path, common_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not common_disk:
        monkeypatch.setattr(Path, "touch", lambda self: None)  # no worker sees the mark
    arrived: list[int] = []
    whole = engine.unpack
    monkeypatch.setattr(engine, "unpack", lambda archive, out: (arrived.append(len(archive)), whole(archive, out)))
    out = tmp_path / "out"
    rows = run_on_ray(read_sweep([files], out), out, say=quiet)
    assert {row.run: row.state for row in rows} == {
        "first": "finished",
        "heads-seed0": "finished",
        "heads-seed1": "finished",
        "lost": "failed",
    }
    assert "nowhere" in str(rows[-1].error)
    assert len(arrived) == (0 if common_disk else 3)
    for name in ("first", "heads-seed0", "heads-seed1"):
        assert outcome(out / name).keys() == outcome(here / name).keys()
    assert same_but_for_the_place(out, here)
    assert not list(out.glob(".sweep-*"))
    assert all(row.skipped for row in run_on_ray(read_sweep([files], out), out, say=quiet)[:3])


def test_a_worker_without_the_disk_asks_for_the_models_and_sends_its_runs(
    files: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same path on another machine, played by another folder here."""
    monkeypatch.chdir(tmp_path)  # as the worker does, but for this test alone
    there = tmp_path / "there"
    there.mkdir()
    job = read_sweep([files], there).jobs[-1]
    assert set(job.needs) == {"first"}
    mark = tmp_path / "mark"
    assert train_elsewhere(job, there, mark, tmp_path, None).lacks_models
    answer = train_elsewhere(job, there, mark, tmp_path, pack(here, ["first"]))
    assert answer.error is None
    assert answer.folders is not None
    unpack(answer.folders, tmp_path / "home")
    assert sorted(path.name for path in (tmp_path / "home").iterdir() if path.name != ".passes") == sorted(job.configs)
    for name in job.configs:
        assert outcome(tmp_path / "home" / name) == outcome(there / name)
        assert outcome(there / name)["predictions.json"] == outcome(here / name)["predictions.json"]


def workers_of(title: str) -> list[int]:
    """The processes of this cluster, and of no other on the machine, that Ray has named after a task."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(f"ray::{title}".encode()) and os.getpid() in ancestors(path.parent):
                found.append(int(path.parent.name))
        except OSError:  # it has just ended
            continue
    return found


def ancestors(process: Path) -> list[int]:
    """The parent of a process, its parent, and so on."""
    found: list[int] = []
    while process.name != "0":
        status = (process / "status").read_text()
        found.append(int(status.partition("PPid:")[2].split()[0]))
        process = process.with_name(str(found[-1]))
    return found


def kill_once_it_trains(name: str, checkpoint: Path, killed: list[int]) -> None:
    for _ in range(2000):
        if checkpoint.is_file() and (there := workers_of(f"lamella-{name}")):
            os.kill(there[0], signal.SIGKILL)
            killed.append(there[0])
            return
        time.sleep(0.01)


def test_a_run_whose_worker_is_killed_goes_on_and_ends_the_same(tmp_path: Path, encoder: Path) -> None:
    file = write(tmp_path / "slow.toml", f'name = "{encoder}"', steps=60)
    run_on_ray(read_sweep([file], tmp_path / "whole"), tmp_path / "whole", say=quiet)
    out = tmp_path / "out"
    killed: list[int] = []
    killer = threading.Thread(target=kill_once_it_trains, args=("slow", out / "slow" / runs.CHECKPOINT, killed))
    killer.start()
    (row,) = run_on_ray(read_sweep([file], out), out, retries=1, say=quiet)
    killer.join()
    assert killed
    assert row.state == "finished"
    assert "resumed" in read_json(out / "slow" / runs.RUN)
    assert outcome(out / "slow") == outcome(tmp_path / "whole" / "slow")


def test_a_run_whose_worker_dies_too_often_is_a_failed_run(tmp_path: Path, encoder: Path) -> None:
    file = write(tmp_path / "doomed.toml", f'name = "{encoder}"', steps=60)
    out = tmp_path / "out"
    killed: list[int] = []
    killer = threading.Thread(target=kill_once_it_trains, args=("doomed", out / "doomed" / runs.CHECKPOINT, killed))
    killer.start()
    (row,) = run_on_ray(read_sweep([file], out), out, retries=0, say=quiet)
    killer.join()
    assert killed
    assert row.state == "failed"
    assert "its worker was lost, 1 times in all" in str(row.error)


def test_more_than_a_machine_has_is_refused_before_anything_is_written(files: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected what one machine has \(2 CPUs and"):
        run_on_ray(read_sweep([files], tmp_path / "out"), tmp_path / "out", cpus=3)
    assert not (tmp_path / "out").exists()


def test_an_address_where_nobody_answers_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with (
        pytest.raises(RunError, match=r"--address 127\.0\.0\.1:1: no Ray cluster answers there"),
        cluster("127.0.0.1:1"),
    ):
        pass
    with pytest.raises(UsageError, match="expected host:port of a Ray cluster"), cluster("somewhere"):
        pass


def test_an_engine_that_is_left_cancels_what_runs(tmp_path: Path, encoder: Path) -> None:
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


def test_a_prediction_on_ray_is_that_of_one_process(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lamella: Lamella
) -> None:
    monkeypatch.setattr(features, "PIECE", 300)  # of the cuts here; a worker cuts each shard no further
    examples = read_questions("demo:dev")[:40]
    shards = list(features.slices(examples))
    assert len(shards) > 2
    reader = load_model(here / "first", precision="fp32", device="cpu")
    plain = predict(reader, examples, batch_size=4)
    spread_out = ray_predict.predict_on_ray(str(here / "first"), examples, batch_size=4, precision="fp32")
    assert list(spread_out) == list(plain)
    assert spread_out == plain

    monkeypatch.undo()
    command = ("predict", "demo:dev", "--model", here / "first", "--precision", "fp32", "--out")
    for name, more in {"plain": (), "ray": ("--engine", "ray")}.items():
        code, _, err = lamella(*command, tmp_path / name, *more)
        assert code == 0, err
    assert outcome(tmp_path / "plain") == outcome(tmp_path / "ray")


def kill_what_answers(times: int, killed: list[int]) -> None:
    """Kill workers that answer, each of them once, until it was so often."""
    for _ in range(6000):
        for worker in workers_of("Worker.answer"):
            if worker not in killed:
                os.kill(worker, signal.SIGKILL)
                killed.append(worker)
                if len(killed) == times:
                    return
        time.sleep(0.01)


@pytest.mark.parametrize(("times", "outlived"), [(1, True), (ray_predict.RETRIES + 1, False)])
def test_a_prediction_outlives_a_killed_worker_and_not_a_massacre(here: Path, times: int, outlived: bool) -> None:
    examples = read_questions("demo:dev")[:40]  # one shard, so one worker
    plain = predict(load_model(here / "first", precision="fp32", device="cpu"), examples, batch_size=4)
    killed: list[int] = []
    killer = threading.Thread(target=kill_what_answers, args=(times, killed))
    killer.start()
    try:
        if outlived:
            assert ray_predict.predict_on_ray(str(here / "first"), examples, batch_size=4, precision="fp32") == plain
        else:
            with pytest.raises(RunError, match=r"^predict --engine ray: a worker was lost \(.*\)\.$"):
                ray_predict.predict_on_ray(str(here / "first"), examples, batch_size=4, precision="fp32")
    finally:
        killer.join()
    assert len(killed) == times


def test_what_is_wrong_with_a_model_there_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(LamellaError, match="nowhere"):
        ray_predict.predict_on_ray(str(tmp_path / "nowhere"), read_questions("demo:dev")[:2])
