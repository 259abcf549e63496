"""Requests that are cheap to send and were dear to refuse; and batches that go on whatever happens to a question."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from pydantic import ValidationError
from starlette.testclient import TestClient

from lamella.serve import json_body, learning_routes
from lamella.serve.body_budget import FREE
from lamella.serve.json_body import parse_json
from lamella.serve.refusals import TooLargeError, UnknownModelError
from lamella.serve.schemas import Ask, Batch
from lamella.serve.service import Service
from lamella.serve.settings import Settings
from lamella.serve.web_app import create_app

FAR_TOO_LONG = 20.0  # CPU seconds; what is tested here takes less than one, and took minutes


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """A client of a server that has not loaded its reader: what is tested here comes before."""
    app = create_app(Settings())
    yield TestClient(app, raise_server_exceptions=False)
    app.state.service.close()


def error_of(response: Any, status: int) -> str:
    assert response.status_code == status, response.text
    message: str = response.json()["error"]["message"]
    assert "\n" not in message
    return message


def post(client: TestClient, path: str, body: str) -> Any:
    return client.post(path, content=body, headers={"Content-Type": "application/json"})


def test_an_object_of_many_keys_is_refused_at_once() -> None:
    keys = ",".join(f'"{number}":0' for number in range(60_000))
    begin = time.process_time()
    with pytest.raises(TooLargeError, match="at most 100 keys per object, got 60,002"):
        parse_json(f'{{{keys},"z":0,"z":0}}'.encode())
    assert time.process_time() - begin < FAR_TOO_LONG


def test_a_large_body_is_parsed_in_a_thread(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def parse(body: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return parse_json(body)

    monkeypatch.setattr(json_body, "parse_json", parse)
    post(client, "/v1/ask", "[0]")
    post(client, "/v1/ask", f"[{'0,' * 100_000}0]")
    small, large = threads
    assert small != large
    assert large.startswith("asyncio_")


@pytest.mark.parametrize("body", [f"[{'0,' * 100_000}0]", "0 " * 100_000], ids=["JSON", "no JSON"])
def test_a_body_is_counted_until_it_is_parsed(client: TestClient, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    bodies = client.app.state.service.bodies  # type: ignore[attr-defined]
    counts: list[int] = []

    def parse(content: bytes) -> Any:
        counts.append(bodies.used)
        return parse_json(content)

    monkeypatch.setattr(json_body, "parse_json", parse)
    post(client, "/v1/ask", body)
    assert counts == [len(body) - FREE]
    assert bodies.used == 0


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (Batch, {"requests": [{}] * 100_000}),
        (Batch, {"requests": [{"question": "a", "context": [1] * 100_000}] * 256}),
        (Ask, {"question": "a", "context": [1] * 100_000}),
        (Ask, {"question": "a", "context": "b", "model": [1] * 100_000}),
    ],
    ids=["questions", "contexts of a batch", "contexts", "models"],
)
def test_a_list_is_checked_up_to_its_first_fault(schema: Any, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(value)
    assert caught.value.error_count() < 10


def test_a_long_batch_is_refused_before_its_questions_are_checked(client: TestClient) -> None:
    message = error_of(post(client, "/v1/batch", f'{{"requests":[{"{}," * 256}{{}}]}}'), 413)
    assert message == "requests: expected at most 256 questions per batch, got 257."
    assert "requests[0].question" in error_of(post(client, "/v1/batch", f'{{"requests":[{"{}," * 255}{{}}]}}'), 422)


def test_an_unknown_name_is_compared_with_many_in_no_time() -> None:
    stem = "customer-reader-for-departmental-use-of-the-company-with-a-name"
    names = [f"{stem}-{number}" for number in range(1000)]
    begin = time.process_time()
    for _ in range(60):
        message = str(UnknownModelError(stem * 3, names))
    assert time.process_time() - begin < FAR_TOO_LONG
    assert len(message) < 1500


# Batches


def run_batch(service: Service, asks: list[Ask]) -> list[dict[str, Any]]:
    async def run() -> list[dict[str, Any]]:
        return [line async for line in service.batch(asks, [service.new_call() for _ in asks])]

    try:
        return asyncio.run(run())
    finally:
        service.close()


def test_an_error_of_the_server_costs_one_question_of_a_batch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(Settings())

    async def answer(ask: Ask, *_: Any) -> dict[str, Any]:
        if ask.question == "1":
            raise MemoryError("a window that is too large")
        return {"question": ask.question}

    monkeypatch.setattr(service, "_ask", answer)
    lines = run_batch(service, [Ask(question=str(number), context="b") for number in range(20)])
    assert sorted(line["index"] for line in lines) == list(range(20))
    (failed,) = [line for line in lines if "error" in line]
    assert failed["index"] == 1
    assert failed["error"]["type"] == "internal_error"
    assert "window" not in json.dumps(failed)
    assert "a window that is too large" in caplog.text


def test_a_server_that_stops_finishes_what_it_began_and_refuses_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(Settings(workers=8))  # two questions of a batch at a time

    async def answer(ask: Ask, *_: Any) -> dict[str, Any]:
        if ask.question == "2":
            service.draining = True  # as SIGTERM does
        await asyncio.sleep(0.01 * int(ask.question))
        return {"question": ask.question}

    monkeypatch.setattr(service, "_ask", answer)
    lines = run_batch(service, [Ask(question=str(number), context="b") for number in range(30)])
    assert sorted(line["index"] for line in lines) == list(range(30))
    refused = [line["index"] for line in lines if "error" in line]
    assert refused == list(range(3, 30))
    assert {line["error"]["type"] for line in lines if "error" in line} == {"shutting_down"}


@pytest.fixture
def stopping(client: TestClient) -> Iterator[TestClient]:
    service: Service = client.app.state.service  # type: ignore[attr-defined]
    service.draining = True
    yield client
    service.draining = False


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/ask", '{"question":"a","context":"b"}'),
        ("/v1/batch", '{"requests":[{"question":"a","context":"b"}]}'),
        ("/v1/text?name=a.txt", "text"),
        ("/", '{"inputs":{"question":"a","context":"b"}}'),
        ("/models/default", '{"inputs":{"question":"a","context":"b"}}'),
    ],
)
def test_what_comes_while_the_server_stops_is_refused(stopping: TestClient, path: str, body: str) -> None:
    response = post(stopping, path, body)
    assert response.status_code == 503
    assert response.headers["Retry-After"] == "1"
    error = response.json()["error"]
    if path.startswith("/v1"):
        assert error["type"] == "shutting_down"
        error = error["message"]
    assert error == "the server shuts down, and did not begin this request; send it again later."


def test_a_file_that_was_accepted_is_read_while_the_server_stops(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    service: Service = client.app.state.service  # type: ignore[attr-defined]

    def read(*_: Any) -> tuple[str, str]:
        service.draining = True  # as SIGTERM does
        return "the text", "txt"

    monkeypatch.setattr(learning_routes, "text_of_file", read)
    response = post(client, "/v1/text?name=a.txt", "text")
    service.draining = False
    assert response.json() == {"text": "the text", "kind": "txt"}
