"""Connections that send no request, or half of one, and more connections than the server can have."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

from lamella.serve import http_server
from lamella.serve.http_server import bind
from lamella.serve.paced_reading import PacedTransport
from server_on_socket import Connect, read_response, with_server

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
DESCRIPTION = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"  # tens of kilobytes
ASK = b"POST /v1/ask HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"


@pytest.mark.parametrize("protocol", ["h11", "httptools"])
def test_a_connection_without_a_whole_request_is_closed(protocol: str) -> None:
    async def test(connect: Connect) -> None:
        silent, _silent = await connect()
        half, writer = await connect()
        writer.write(HEALTH[:20])
        later, later_writer = await connect()  # after a request, it is a connection like any other
        later_writer.write(HEALTH + HEALTH[:5])
        assert (await read_response(later))[0] == 200
        later_writer.write(HEALTH[5:10])

        async def drip() -> None:
            reader, writer = await connect()
            writer.write(b"GET /health HTTP/1.1\r\nX: ")
            closing = asyncio.ensure_future(reader.read())
            while not closing.done():
                writer.write(b"x")
                await asyncio.wait([closing], timeout=0.05)
            with contextlib.suppress(ConnectionError):  # the last byte may have come too late
                closing.result()

        dripping = asyncio.create_task(drip())
        for reader in (silent, half, later):
            assert await reader.read() == b""
        await dripping

    with_server(protocol, test)


@pytest.mark.parametrize("protocol", ["h11", "httptools"])
def test_a_connection_whose_headers_came_is_not_closed(protocol: str) -> None:
    async def test(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(ASK)
        status, body = await read_response(reader)  # its body is late, which is answered
        assert (status, body["error"]["type"]) == (408, "slow_request")
        reader, writer = await connect()
        for _ in range(4):  # kept alive for longer than headers may take
            writer.write(HEALTH[:9])
            await asyncio.sleep(0.01)
            writer.write(HEALTH[9:])
            assert (await read_response(reader))[0] == 200
            await asyncio.sleep(0.1)

    with_server(protocol, test)


@pytest.mark.parametrize("protocol", ["h11", "httptools"])
def test_too_many_connections_are_refused_as_json(protocol: str) -> None:
    async def test(connect: Connect) -> None:
        first, _ = await connect()
        await connect()
        reader, writer = await connect()
        writer.write(HEALTH)
        status, body = await read_response(reader)
        assert (status, body["error"]["type"]) == (429, "busy")
        assert await reader.read() == b""  # it is closed
        assert await first.read() == b""
        reader, writer = await connect()
        writer.write(HEALTH)
        assert (await read_response(reader))[0] == 200

    with_server(protocol, test, most=2, seconds=1.5)


@pytest.mark.parametrize("protocol", ["h11", "httptools"])
@pytest.mark.parametrize("requests", [1, 50])  # all of the response is written, or most of it waits to be
def test_a_connection_that_does_not_read_is_closed(
    protocol: str, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE", 0.3)

    async def refused(connect: Connect) -> bool:
        reader, writer = await connect()
        writer.write(HEALTH)
        status, _ = await read_response(reader)
        writer.close()
        return status == 429

    async def test(connect: Connect) -> None:
        for _ in range(2):
            reader, writer = await connect()
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(requests * DESCRIPTION)
        assert await refused(connect)
        while await refused(connect):
            await asyncio.sleep(0.1)

    with_server(protocol, test, most=2, small_buffers=True)


@pytest.mark.parametrize("protocol", ["h11", "httptools"])
def test_a_connection_that_reads_slowly_is_not_closed(protocol: str) -> None:
    async def test(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(DESCRIPTION)
        head = await reader.readuntil(b"\r\n\r\n")
        left = int(head.lower().partition(b"content-length: ")[2].split()[0])
        begin = asyncio.get_running_loop().time()
        while left:
            left -= len(await reader.readexactly(min(left, 4096)))
            await asyncio.sleep(0.1)
        assert asyncio.get_running_loop().time() - begin > 2 * 0.3

    with_server(protocol, test, small_buffers=True)


def test_small_packets_are_sent_at_once() -> None:
    # asyncio sets TCP_NODELAY only on sockets that name TCP; without it, an answer may wait 40 ms for the client.
    with bind("127.0.0.1", 0) as listening:
        assert listening.proto == socket.IPPROTO_TCP


def test_a_response_is_sent_at_once() -> None:
    sent: list[list[bytes]] = []
    transport: Any = SimpleNamespace(is_closing=lambda: False, writelines=sent.append)

    async def write(*data: bytes, close: bool = False) -> list[list[bytes]]:
        sent.clear()
        connection = SimpleNamespace(lingers=False, loop=asyncio.get_running_loop(), close=lambda: sent.append([]))
        paced = PacedTransport(transport, connection)
        for each in data:
            paced.write(each)
        if close:
            paced.close()
        await asyncio.sleep(0)
        return sent

    assert asyncio.run(write(b"head", b"body")) == [[b"head", b"body"]]
    assert asyncio.run(write(b"head")) == [[b"head"]]  # of a response without a body
    assert asyncio.run(write(b"head", close=True)) == [[b"head"], []]
    assert asyncio.run(write(b"head", b"line", b"line")) == [[b"head", b"line"], [b"line"]]
