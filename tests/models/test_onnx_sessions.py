"""How a graph uses the machine: few windows share the cores, many have one each, waiting threads use none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamella import Reader
from lamella.data.file_formats.formats import read
from lamella.data.windows.features import featurise
from lamella.data.windows.padding import Padded, pad
from lamella.models import onnx_sessions
from lamella.models.loading import load_model
from lamella.models.onnx_model import OnnxModel
from lamella.models.onnx_sessions import FEW_WINDOWS, MOST_THREADS
from tiny_reader import save_tiny_bert, save_tiny_reader

PAUSE, PAUSES = 0.02, 20  # seconds after a window, and their number
SPIN = "while True: pass"
THREADS = Path("/proc/self/task")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sessions")
    return save_tiny_reader(folder / "reader", save_tiny_bert(folder / "encoder"))


def load(saved: Path, **options: Any) -> OnnxModel:
    model = load_model(saved, backend="onnx", **options)
    assert isinstance(model, OnnxModel)
    return model


def windows(model: OnnxModel, count: int) -> Padded:
    features = featurise(read("demo:dev").examples[:count], model.tokenizer, model.windows)
    return pad(features, np.arange(count))


@pytest.mark.parametrize("few", [False, True])
def test_few_windows_share_the_cores_and_many_have_one_each(few: bool, saved: Path) -> None:
    model, reference = load(saved, threads=3, few_questions=few), load(saved, threads=1)
    assert list(model._sessions._opened) == [3 if few else 1]
    for count in (1, FEW_WINDOWS, FEW_WINDOWS + 1):
        padded = windows(model, count)
        assert np.array_equal(model.logits(padded), reference.logits(padded))
        alone = count > FEW_WINDOWS  # each on a core, so that the last ones leave cores idle
        assert model.cores.overlap(count) == (3 if alone else 0)
    assert set(model._sessions._opened) == {1, 3}
    assert list(reference._sessions._opened) == [1]


@pytest.mark.skipif(not THREADS.is_dir(), reason="counts threads as Linux lists them")
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_session_has_the_threads_that_it_was_asked_for(threads: int, saved: Path) -> None:
    """The calling thread is one of them. More would take cores from others, and fewer leave cores idle."""
    padded = windows(load(saved, threads=1), 1)  # libraries start threads of their own on first use
    before = set(THREADS.iterdir())
    model = load(saved, threads=threads, few_questions=True)
    model.logits(padded)
    assert len(set(THREADS.iterdir()) - before) == threads - 1


def test_threads_that_share_a_window_are_limited(saved: Path) -> None:
    model = load(saved, threads=MOST_THREADS + 1, few_questions=True)
    assert list(model._sessions._opened) == [MOST_THREADS]


def test_one_session_serves_all_if_no_other_can_be_opened(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAMELLA_CACHE", str(tmp_path))
    removed = load(saved, threads=2)
    for file in tmp_path.rglob("model.onnx"):
        file.unlink()
    monkeypatch.setenv("LAMELLA_CACHE", "")  # no cache: the graph is only in memory
    in_memory = load(saved, threads=2)
    for model in (removed, in_memory):
        assert model.logits(windows(model, 1)).shape[1] == 1
        assert len(set(map(id, model._sessions._opened.values()))) == 1


def test_threads_of_a_program_open_one_session(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    open_session = onnx_sessions.open_session

    def count(graph: Path | bytes, threads: int) -> Any:
        opened.append(threads)
        return open_session(graph, threads)

    monkeypatch.setattr(onnx_sessions, "open_session", count)
    reader = Reader(load(saved, threads=2))
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: reader.ask("Who?", "Huygens found Titan."), range(8)))
    assert all(answer == answers[0] for answer in answers)
    assert opened == [1, 2]


@pytest.fixture(params=["idle", "busy"])
def other_work(request: pytest.FixtureRequest) -> Iterator[None]:
    """Two processes that keep two cores busy, or none."""
    processes = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(2 if request.param == "busy" else 0)]
    yield
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.usefixtures("other_work")
def test_waiting_threads_use_no_processor_time(saved: Path) -> None:
    """A thread that spins would use a large share of each pause, on a busy machine too."""
    model = load(saved, threads=2, few_questions=True)
    padded = windows(model, 1)
    used = 0.0
    for _ in range(PAUSES):
        model.logits(padded)
        began = time.process_time()
        time.sleep(PAUSE)
        used += time.process_time() - began
    assert used < 0.05 * PAUSE * PAUSES


def test_onnxruntime_reports_nothing(saved: Path, tmp_path: Path) -> None:
    """Where it reports its use, it first writes an identifier of the device to the user's cache."""
    script = "import sys; from lamella import Reader; print(Reader.load(sys.argv[1]).ask('Who?', 'Bob.'))"
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "ORT_DISABLE_TELEMETRY")}
    homes = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"), str(tmp_path))
    subprocess.run([sys.executable, "-c", script, str(saved)], env={**environment, **homes}, check=True)
    assert list(tmp_path.iterdir()) == []
