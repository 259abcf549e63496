"""The service behind the HTTP API: several readers of one question, and where their time goes."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from lamella.errors import UsageError
from lamella.serve import reader_pool
from lamella.serve.answering import AskOptions
from lamella.serve.calls import Call
from lamella.serve.reader_pool import LoadedReader
from lamella.serve.refusals import RefusedError, UnknownModelError
from lamella.serve.schemas import Ask
from lamella.serve.service import Service
from lamella.serve.settings import Settings
from tiny_reader import save_tiny_bert, save_tiny_reader

ASK = Ask(question="Who found Titan?", context="Titan was found by Christiaan Huygens in 1655.", model=["a", "b"])


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    encoder = save_tiny_bert(tmp_path / "encoder")
    for seed, name in enumerate(("a", "b")):
        save_tiny_reader(tmp_path / "models" / name, encoder, seed=seed)
    models = str(tmp_path / "models" / "a")
    service = Service(Settings(models=(shutil.copytree(models, tmp_path / "first"),), folder=tmp_path / "models"))
    service.start()
    yield service
    service.close()


def test_if_a_reader_cannot_be_loaded_the_others_do_not_compute(service: Service, tmp_path: Path) -> None:
    (tmp_path / "models/b/model.safetensors").write_bytes(b"damaged")
    with pytest.raises(RefusedError, match="'b': cannot be loaded"):
        asyncio.run(service.ask(ASK, service.new_call()))
    assert service.metrics.tokens._value.get() == 0


def test_files_that_the_server_may_not_read_are_reported_in_one_line(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read(*_: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", "/models/b/model.safetensors")

    monkeypatch.setattr(reader_pool, "load_shared", read)
    for attempt in (service.ask(ASK, service.new_call()), service.load_model("b")):
        with pytest.raises(RefusedError, match="cannot be loaded") as refused:
            asyncio.run(attempt)
        assert (refused.value.status, refused.value.kind) == (503, "model_unavailable")
        assert "/models" not in str(refused.value)
    assert caplog.messages[-1] == "model b cannot be loaded: /models/b/model.safetensors: Permission denied."


def test_a_question_is_counted_until_its_last_reader_has_stopped(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, failed, call = threading.Event(), threading.Event(), service.new_call()
    stopped: list[str] = []

    def answer(options: AskOptions, loaded: LoadedReader, *_: Any) -> Any:
        if loaded.listed.name == "a":
            assert begun.wait(10)
            failed.set()
            raise UsageError("wrong")
        begun.set()
        assert failed.wait(10)
        while not call.abandoned:
            threading.Event().wait(0.005)
        threading.Event().wait(0.1)
        assert service.accepted == 1
        stopped.append(loaded.listed.name)
        call.check()

    monkeypatch.setattr(AskOptions, "answer", answer)
    with pytest.raises(UsageError, match="wrong"):
        asyncio.run(service.ask(ASK, call))
    assert stopped == ["b"]
    assert service.accepted == 0


def test_a_removed_reader_returns_only_if_it_can_be_loaded(service: Service, tmp_path: Path) -> None:
    service.remove_model("b")
    whole = (tmp_path / "models/b/model.safetensors").read_bytes()
    (tmp_path / "models/b/model.safetensors").write_bytes(b"damaged")
    with pytest.raises(RefusedError, match="cannot be loaded"):
        asyncio.run(service.load_model("b"))
    with pytest.raises(UnknownModelError):
        service.catalogue.get("b")
    (tmp_path / "models/b/model.safetensors").write_bytes(whole)
    assert asyncio.run(service.load_model("b"))["loaded"]
    assert service.catalogue.get("b").name == "b"


def test_a_reader_that_is_removed_while_a_question_waits_does_not_stay_in_memory(service: Service) -> None:
    listed = service.catalogue.get("b")
    service.remove_model("b")
    assert service._load(listed).reader, "the question is answered"
    assert service.pool.loaded("b") is None


def test_a_reader_that_is_removed_while_readers_are_listed_is_left_out(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = service.catalogue.names()
    monkeypatch.setattr(service.catalogue, "names", lambda: names)  # as they were before
    service.remove_model("b")
    assert [facts["name"] for facts in service.describe_models()] == ["first", "a"]


def test_times_of_readers_that_answer_together_are_not_added_up() -> None:
    call = Call(100.0, 100.0, waits=[(0, 1), (0.5, 2), (5, 6)], runs=[(1, 4), (2, 3)])
    assert (call.queued, call.computing) == (3, 3)
    assert Call(1.0, 1.0).queued == 0
