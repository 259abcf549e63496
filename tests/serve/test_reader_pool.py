"""The readers of a server in memory: they share an encoder, come, leave and return, and are replaced."""

from __future__ import annotations

import gc
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lamella import Reader
from lamella.documents import passages
from lamella.encoder.sources import MODEL_CONFIG
from lamella.errors import LamellaError, ModelError
from lamella.files import read_json, write_json
from lamella.graph.support import NoGraphError
from lamella.inference.answer_list import Answer
from lamella.models.shared_encoder import SharedReader
from lamella.models.window_engine import Pace, Row
from lamella.serve import catalogue, reader_pool, shown_layers
from lamella.serve.calls import CALL, Call
from lamella.serve.catalogue import Catalogue, Listed
from lamella.serve.micro_batch import MicroBatcher
from lamella.serve.reader_pool import BESIDE_TENSORS, LoadedReader, ReaderPool
from lamella.serve.refusals import TimedOutError
from lamella.serve.service import Service
from lamella.serve.settings import Settings
from samples import needs_torch
from tiny_reader import save_tiny_bert, save_tiny_reader

QUESTION, TEXT = "Who found Titan?", "Titan was found by Christiaan Huygens in 1655. Galileo found four other moons."
READERS = 6


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readers")
    encoder = save_tiny_bert(folder / "encoder", layers=2)
    for seed in range(READERS):
        save_tiny_reader(folder / "saved" / f"r{seed}", encoder, seed=seed)
    return folder / "saved"


@pytest.fixture(scope="module")
def expected(saved: Path) -> list[Any]:
    return [Reader.load(saved / f"r{seed}", threads=1).ask(QUESTION, TEXT, top_k=2) for seed in range(READERS)]


@pytest.fixture
def listed(saved: Path) -> list[Listed]:
    return [Listed(f"r{seed}", str(saved / f"r{seed}")) for seed in range(READERS)]


@pytest.fixture
def pool() -> Iterator[ReaderPool]:
    pool = ReaderPool(Settings(threads=1), pinned="r0")
    yield pool
    pool.close()


def ask(pool: ReaderPool, listed: Listed) -> Any:
    return pool.get(listed).reader.ask(QUESTION, TEXT, top_k=2)


def test_readers_share_an_encoder_and_a_queue(pool: ReaderPool, listed: list[Listed], expected: list[Any]) -> None:
    with ThreadPoolExecutor(READERS) as threads:
        for _ in range(3):
            assert list(threads.map(lambda each: ask(pool, each), listed)) == expected
    assert all(pool.get(each).shares_encoder and pool.get(each).why is None for each in listed)
    assert len(pool._encoders._encoders) == 1


def test_the_least_recently_used_leave_memory_and_return(
    pool: ReaderPool, listed: list[Listed], expected: list[Any]
) -> None:
    room = sum(pool.get(each).nbytes for each in listed[:3])
    assert room > 3 * BESIDE_TENSORS
    pool = ReaderPool(Settings(threads=1, memory=room), pinned="r0")
    for number in (0, 1, 2, 1, 3):
        assert ask(pool, listed[number]) == expected[number]
    assert [name for name in ("r0", "r1", "r2", "r3") if pool.loaded(name)] == ["r0", "r1", "r3"]
    held = pool.get(listed[1])
    for number in (4, 5, 2):
        assert ask(pool, listed[number]) == expected[number]
    assert pool.loaded("r0") is not None, "it is pinned"
    assert pool.loaded("r1") is None
    assert held.reader.ask(QUESTION, TEXT, top_k=2) == expected[1], "requests that use it finish"
    assert ask(pool, listed[1]) == expected[1]
    pool.close()


def test_a_reader_is_replaced_while_others_answer(
    pool: ReaderPool, saved: Path, expected: list[Any], tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    mine = Listed("mine", str(folder))
    shutil.copytree(saved / "r1", folder)
    assert ask(pool, mine) == expected[1]
    shutil.rmtree(folder)
    shutil.copytree(saved / "r2", folder)
    assert ask(pool, mine) == expected[1], "until it is loaded again"
    pool.replace(mine)
    assert ask(pool, mine) == expected[2]
    pool.remove("mine")
    assert pool.loaded("mine") is None


def test_readers_that_cannot_share_have_a_reason(listed: list[Listed]) -> None:
    pool = ReaderPool(Settings(threads=1, precision="int8", most_loaded=2))
    assert pool.get(listed[0]).why == "readers in int8 share no encoder"
    assert not pool.get(listed[0]).shares_encoder
    for each in listed[1:3]:
        pool.get(each)
    assert [pool.loaded(each.name) is not None for each in listed[:3]] == [False, True, True]
    pool.close()
    for settings in (Settings(device="cuda:99"), Settings(device="cuda:99", backend="onnx")):
        pool = ReaderPool(settings)
        with pytest.raises(LamellaError, match=r"cuda:99|needs torch"):
            pool.get(listed[0])
        pool.close()


@needs_torch
def test_readers_on_torch_share_an_encoder_and_a_queue(saved: Path, listed: list[Listed]) -> None:
    pool = ReaderPool(Settings(device="cpu", backend="torch", threads=1), pinned="r0")
    own = [Reader.load(saved / each.name, device="cpu", backend="torch") for each in listed]
    expected = [reader.ask(QUESTION, TEXT, top_k=2) for reader in own]
    with ThreadPoolExecutor(READERS) as threads:
        for _ in range(3):
            for answers, right in zip(threads.map(lambda each: ask(pool, each), listed), expected, strict=True):
                assert [answer["answer"] for answer in answers] == [answer["answer"] for answer in right]
                scores = [answer["score"] for answer in right]
                assert [answer["score"] for answer in answers] == pytest.approx(scores, abs=1e-4)
    assert all(pool.get(each).shares_encoder and pool.get(each).why is None for each in listed)
    assert len(pool._encoders._encoders) == 1
    pool.close()


def test_a_reason_names_no_folder_of_the_server() -> None:
    hidden = "no graph can be made that it could share; the log of the server has the reason"
    for reason in ("its base /srv/encoder is another", "~/x is", "C:\\x cannot be read"):
        assert reader_pool._without_paths(NoGraphError(reason)) == hidden
    for reason in ("its base org/encoder is another file", "DoRA rescales whole weight matrices"):
        assert reader_pool._without_paths(NoGraphError(reason)) == reason


def test_a_request_does_not_wait_for_those_behind_it() -> None:
    """Each of two requests in one batch gets its logits when they are computed; a failure is that of one request."""
    second_may_run, asked = threading.Event(), threading.Event()

    class SlowEngine:
        pace = Pace(lists=2, windows=None, patience=0.2)  # both come into one batch

        def overlap(self, windows: int) -> int:
            return 0

        def run(self, rows: Sequence[Row]) -> Iterator[NDArray[np.float32]]:
            for row in rows:
                if row.delta == "second":
                    asked.set()
                    assert second_may_run.wait(10)
                    raise ModelError("damaged")
                yield np.full((2, len(row.input_ids)), 7, np.float32)

    def row(name: str) -> Row:
        ids = np.arange(3)
        return Row(name, ids, ids, ids > 0)

    batcher = MicroBatcher(SlowEngine(), most_tokens=100)
    with batcher.announced(), ThreadPoolExecutor(2) as threads:
        first = threads.submit(batcher.logits, [row("first")])
        time.sleep(0.01)
        second = threads.submit(batcher.logits, [row("second")])
        assert first.result(10)[0].tolist() == [[7.0] * 3] * 2
        assert asked.wait(10)
        assert not second.done()
        second_may_run.set()
        with pytest.raises(ModelError, match="damaged"):
            second.result(10)
    batcher.close()


def test_a_reader_that_is_alone_gets_a_graph_of_its_own(saved: Path, expected: list[Any]) -> None:
    service = Service(Settings(models=(str(saved / "r1"),), threads=1))
    service.start()
    loaded = service.pool.get(service.catalogue.get(None))
    assert loaded.why == "it is the only reader of this server"
    assert loaded.reader.ask(QUESTION, TEXT, top_k=2) == expected[1]
    service.close()
    service = Service(Settings(models=(str(saved / "r1"), str(saved / "r2")), threads=1))
    service.start()
    assert service.pool.get(service.catalogue.get(None)).shares_encoder
    assert service.describe_model("r1")["shares_encoder"] is True
    assert service.pool.loaded("r2") is None
    assert service.describe_model("r2")["shares_encoder"] is True, "its configuration lets expect it"
    service.close()


def test_many_registered_readers_cost_nothing_per_request(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(50):
        shutil.copytree(saved / f"r{number % READERS}", tmp_path / f"copy{number}")
    service = Service(Settings(folder=tmp_path, models=(str(saved / "r0"),), threads=1))
    service.start()
    names = [model["name"] for model in service.describe_models()]
    assert names == ["r0", *sorted(f"copy{number}" for number in range(50))]
    loaded = service.pool.get(service.catalogue.get("copy7"))
    for module, name in ((catalogue, "read_json"), (Catalogue, "scan"), (SharedReader, "__init__")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("read again"))
    assert service.pool.get(service.catalogue.get("copy7")) is loaded
    assert [model["name"] for model in service.describe_models()] == names
    service.close()


def test_loading_a_reader_looks_at_its_folder_only(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        shutil.copytree(saved / "r1", tmp_path / name)
    served, looked_at = Catalogue([str(saved / "r0")], tmp_path), []
    holds_model = catalogue._holds_model
    monkeypatch.setattr(catalogue, "_holds_model", lambda path: [looked_at.append(path.name), holds_model(path)][1])
    assert served.find("b") == Listed("b", str(tmp_path / "b"))
    shutil.copytree(saved / "r2", tmp_path / "aa")
    assert served.find("aa") == Listed("aa", str(tmp_path / "aa"))
    assert looked_at == ["b", "aa"]
    assert served.names() == ["r0", "a", "aa", "b", "c"]
    shutil.rmtree(tmp_path / "b")
    shutil.copytree(saved / "r2", tmp_path / "d")
    with pytest.raises(LamellaError, match="r0, a, aa, c, d"):
        served.find("b")


# Loads that overlap


def test_an_encoder_that_takes_long_delays_only_those_that_need_one(
    saved: Path, listed: list[Listed], expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = []
    for name in ("full", "more", "again"):  # its base is a reader, so it has an encoder of its own
        folder = shutil.copytree(saved / "r1", tmp_path / name)
        config = read_json(folder / MODEL_CONFIG)
        config["base"]["name"] = str(saved / "r2")
        write_json(folder / MODEL_CONFIG, config)
        own.append(Listed(name, str(folder)))
    pool, waits, may_end = ReaderPool(Settings(threads=1)), threading.Event(), threading.Event()

    def load_own(listed: Listed) -> Any:
        waits.set()
        assert may_end.wait(10)
        raise ModelError("damaged")

    monkeypatch.setattr(pool, "_load_own", load_own)
    with ThreadPoolExecutor(len(own)) as threads:
        failing = [threads.submit(pool.get, each) for each in own]
        assert waits.wait(10)
        assert ask(pool, listed[1]) == expected[1]
        assert not any(load.done() for load in failing)
        may_end.set()
        for load in failing:
            with pytest.raises(ModelError):
                load.result(10)
    pool.close()


def load_slowly(pool: ReaderPool, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Make the next load of a pool wait at its end; return when it waits, and what lets it end."""
    load, waits, may_end = pool._load, threading.Event(), threading.Event()

    def first(listed: Listed) -> LoadedReader:
        monkeypatch.setattr(pool, "_load", load)
        loaded = load(listed)
        waits.set()
        assert may_end.wait(10)
        return loaded

    monkeypatch.setattr(pool, "_load", first)
    return waits, may_end


def test_an_old_load_does_not_replace_a_newer_version(
    pool: ReaderPool, saved: Path, expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(saved / "r1", tmp_path / "mine")
    mine = Listed("mine", str(folder))
    waits, may_end = load_slowly(pool, monkeypatch)
    with ThreadPoolExecutor(1) as threads:
        old = threads.submit(pool.get, mine)
        assert waits.wait(10)
        shutil.rmtree(folder)
        shutil.copytree(saved / "r2", folder)
        pool.replace(mine)
        may_end.set()
        assert old.result(10).reader.ask(QUESTION, TEXT, top_k=2) == expected[1], "its request is answered"
    assert ask(pool, mine) == expected[2]


def test_a_reader_that_is_removed_while_it_is_loaded_does_not_stay(
    pool: ReaderPool, listed: list[Listed], expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, may_end = load_slowly(pool, monkeypatch)
    with ThreadPoolExecutor(1) as threads:
        answers = threads.submit(ask, pool, listed[1])
        assert waits.wait(10)
        pool.remove("r1")
        may_end.set()
        assert answers.result(10) == expected[1]
    assert pool.loaded("r1") is None
    assert not pool._loading


def test_a_request_does_not_wait_for_a_load_beyond_its_time(
    pool: ReaderPool, listed: list[Listed], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, may_end = load_slowly(pool, monkeypatch)
    with in_call(seconds=0.1), pytest.raises(TimedOutError):
        pool.get(listed[1])
    may_end.set()
    assert pool.get(listed[1]) is pool.loaded("r1"), "the load goes on for others"


@contextmanager
def in_call(*, seconds: float) -> Iterator[Call]:
    call = Call(time.perf_counter() + seconds, seconds)
    token = CALL.set(call)
    yield call
    CALL.reset(token)


def test_encoders_in_memory_are_limited(tmp_path: Path) -> None:
    listed = []
    for seed in range(4):
        encoder = save_tiny_bert(tmp_path / f"encoder{seed}", seed=seed)
        folders = [save_tiny_reader(tmp_path / f"{name}{seed}", encoder, seed=seed) for name in "ab"]
        listed += [Listed(folder.name, str(folder)) for folder in folders]
    pool = ReaderPool(Settings(threads=1, most_loaded=2), pinned="a0")

    def in_memory() -> set[str]:
        gc.collect()
        assert len(pool._encoders._encoders) <= 2
        return {each.name for each in listed if pool.loaded(each.name)}

    for each in listed[:4]:
        pool.get(each)
    assert in_memory() == {"a0", "b0", "a1", "b1"}
    pool.get(listed[4])
    assert in_memory() == {"a0", "b0", "a2"}, "the encoder of the pinned reader stays"
    pool.get(listed[6])
    assert in_memory() == {"a0", "b0", "a3"}
    pool.close()


def test_long_texts_are_kept_once_for_all_readers(
    pool: ReaderPool, listed: list[Listed], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[object] = []
    index = passages.PassageIndex
    monkeypatch.setattr(passages, "PassageIndex", lambda texts: [built.append(texts), index(texts)][1])
    for each in listed[:3]:
        pool.get(each).reader.ask(QUESTION, f"{TEXT}\n\n" * 40, passages=2)
    assert len(built) == 1


# Layers


class Shown:
    """Stands for torch: counts the models that are loaded, and returns the number of a model as its layers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads: list[str] = []
        monkeypatch.setattr(shown_layers.importlib.util, "find_spec", lambda name: True)
        monkeypatch.setattr(shown_layers, "load_model", self.load)
        monkeypatch.setattr(shown_layers, "layers_of_answer", lambda model, question, answer: model.number)

    def load(self, source: str, **options: Any) -> Any:
        self.loads.append(Path(source).name)
        return SimpleNamespace(number=len(self.loads))


def show(pool: ReaderPool, listed: Listed, count: int = 1) -> list[Any]:
    answers = [Answer({}, text="") for _ in range(count)]
    pool.shown_layers.add(pool.get(listed).reader, listed.source, QUESTION, answers)
    return [answer["layers"] for answer in answers]


def test_readers_whose_layers_are_shown_together_are_loaded_once_each(
    pool: ReaderPool, listed: list[Listed], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Shown(monkeypatch)
    with ThreadPoolExecutor(2) as threads:
        layers = list(threads.map(lambda each: show(pool, each, 10), listed[:2]))
    assert sorted(shown.loads) == ["r0", "r1"]
    assert all(len(set(each)) == 1 for each in layers)


def test_layers_are_those_of_the_version_in_memory(
    pool: ReaderPool, listed: list[Listed], monkeypatch: pytest.MonkeyPatch
) -> None:
    Shown(monkeypatch)
    assert show(pool, listed[1]) == show(pool, listed[1]) == [1]
    pool.replace(listed[1])
    assert show(pool, listed[1]) == [2]
    pool.remove("r1")
    gc.collect()
    assert not pool.shown_layers._models, "it has left with its reader"


def test_a_request_does_not_wait_for_layers_beyond_its_time(
    pool: ReaderPool, listed: list[Listed], monkeypatch: pytest.MonkeyPatch
) -> None:
    Shown(monkeypatch)
    pool.get(listed[1])
    with pool.shown_layers._turn, in_call(seconds=0.05), pytest.raises(TimedOutError):
        show(pool, listed[1])
    assert show(pool, listed[1])
