"""Streams to clients that leave or do not read: what they asked is given up, and the server goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI

from lamella.serve.service import Service
from lamella.serve.settings import Settings
from lamella.serve.web_app import create_app

QUESTIONS = 60
ASK = {"question": "When did it land?", "context": "Huygens landed on Titan on 14 January 2005. " * 20}


@pytest.fixture(scope="module")
def app() -> Iterator[FastAPI]:
    app = create_app(Settings(write_timeout=0.2, workers=8))
    app.state.service.start()
    yield app
    app.state.service.close()


class Client:
    """An ASGI client that can refuse to read, or leave."""

    def __init__(self, path: str, body: Any) -> None:
        self.scope: dict[str, Any] = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "asgi": {"spec_version": "2.4"},
        }  # fmt: skip
        self.body = json.dumps(body).encode()
        self.received: list[dict[str, Any]] = []
        self.left = asyncio.Event()
        self.sent = False

    async def receive(self) -> dict[str, Any]:
        if not self.sent:
            self.sent = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.received.append(message)

    @property
    def lines(self) -> int:
        return sum(message.get("body", b"").count(b"\n") for message in self.received)


async def settled(service: Service) -> float:
    """Wait until no question is being answered; return how many windows were computed."""
    for _ in range(500):
        await asyncio.sleep(0.02)
        if not service.accepted and not service._threads._work_queue.qsize():
            break
    before = -1.0
    while before != (before := service.metrics.tokens._value.get()):
        await asyncio.sleep(0.1)
    return before


def test_a_client_that_does_not_read_is_given_up(app: FastAPI) -> None:
    async def run() -> None:
        client = Client("/v1/batch", {"requests": [ASK] * QUESTIONS})

        async def send(message: Any) -> None:
            await client.send(message)
            if client.lines >= 2:
                await asyncio.Event().wait()  # for ever

        await asyncio.wait_for(app(client.scope, client.receive, send), 20)  # type: ignore[arg-type]
        await settled(app.state.service)
        assert client.lines == 2
        assert app.state.service.accepted == 0

    asyncio.run(run())


def test_a_client_that_reads_slowly_is_given_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(Settings(write_timeout=20.0, stream_timeout=0.5))  # no line takes longer than it may
    service: Service = app.state.service

    async def answer(*_: Any) -> dict[str, Any]:
        return {"question": ASK["question"]}

    async def run() -> None:
        client = Client("/v1/batch", {"requests": [ASK] * QUESTIONS})

        async def send(message: Any) -> None:
            await client.send(message)
            await asyncio.sleep(0.1)

        await asyncio.wait_for(app(client.scope, client.receive, send), 20)  # type: ignore[arg-type]
        assert 1 <= client.lines <= 6
        assert service.accepted == 0

    monkeypatch.setattr(service, "_ask", answer)
    asyncio.run(run())
    service.close()


def test_a_batch_stops_when_its_client_leaves(app: FastAPI) -> None:
    async def run() -> None:
        service: Service = app.state.service
        tokens = service.metrics.tokens._value.get()
        client = Client("/v1/batch", {"requests": [ASK] * QUESTIONS})

        async def send(message: Any) -> None:
            await client.send(message)
            if client.lines >= 2:
                raise OSError("the connection is closed")

        await asyncio.wait_for(app(client.scope, client.receive, send), 20)  # type: ignore[arg-type]
        used = await settled(service) - tokens
        alone = Client("/v1/ask", ASK)
        before = service.metrics.tokens._value.get()
        await app(alone.scope, alone.receive, alone.send)  # type: ignore[arg-type]
        per_question = service.metrics.tokens._value.get() - before
        assert used < per_question * QUESTIONS / 3
        assert service.accepted == 0

    asyncio.run(run())


def test_a_question_stops_when_its_client_leaves(app: FastAPI) -> None:
    async def run() -> None:
        service: Service = app.state.service
        client = Client("/v1/ask", {**ASK, "context": "Saturn has rings and many moons. " * 5000})
        answering = asyncio.create_task(app(client.scope, client.receive, client.send))  # type: ignore[arg-type]
        while not service.accepted:
            await asyncio.sleep(0.01)
        client.left.set()
        await asyncio.wait_for(answering, 5)
        assert service.accepted == 0
        assert client.received[0]["status"] == 499

    asyncio.run(run())
