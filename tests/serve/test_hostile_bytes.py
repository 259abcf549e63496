"""Bytes of hostile and of unusual clients: requests without end, bodies that nobody reads, other protocols."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

from lamella.serve import connections
from lamella.serve.paced_reading import Turns
from lamella.serve.request_size import BODY_SLICE, HEAD_SLICE, MOST_FRAMING, RequestSize
from server_on_socket import Connect, read_response, with_server

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/ask HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
INCOMPLETE = json.dumps({"question": "Who?"}).encode()  # reaches the check of values: the reader is not loaded

both = pytest.mark.parametrize("protocol", ["h11", "httptools"])


async def send(writer: asyncio.StreamWriter, start: bytes, part: bytes, most: int = 8 << 20) -> int:
    """Send parts until the server accepts no more; return how many bytes it took."""
    count = 0
    try:
        writer.write(start)
        while count < most and not writer.is_closing():
            writer.write(part)
            count += len(part)
            await writer.drain()
    except ConnectionError:
        pass
    return count


@both
@pytest.mark.parametrize(
    ("start", "part", "status"),
    [
        (b"GET /", b"a" * 4096, 431),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ", b"a" * 4096, 431),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"X-T: aaaa\r\n" * 400, 431),
        (CHUNKED + b"1\r\na\r\n0\r\n", b"X-T: aaaa\r\n" * 400, 431),
        (CHUNKED + b"1;", b"a" * 4096, 431),
        (CHUNKED, b"1\r\na\r\n" * 700, 413),
        (CHUNKED, b"1;" + b"x" * 200 + b"\r\na\r\n", 413),
    ],
    ids=["address", "header", "headers", "trailers", "extension", "tiny chunks", "extensions"],
)
@pytest.mark.parametrize("before", [b"", HEALTH], ids=["first", "kept alive"])
def test_a_request_without_end_is_refused(protocol: str, start: bytes, part: bytes, status: int, before: bytes) -> None:
    async def test(connect: Connect) -> None:
        reader, writer = await connect()
        sending = asyncio.create_task(send(writer, before + start, part, most=connections.LINGER_BYTES // 8))
        if before:
            assert (await read_response(reader))[0] == 200
        found, body = await read_response(reader)
        assert (found, body["error"]["type"]) == (status, "too_large")
        assert await reader.read() == b""  # nothing more is answered
        writer.close()
        await sending
        reader, writer = await connect()
        writer.write(HEALTH)
        assert (await read_response(reader))[0] == 200

    with_server(protocol, test, seconds=5)


@both
def test_long_headers_and_small_chunks_are_taken(protocol: str) -> None:
    long = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * (MOST_FRAMING - 2 * HEAD_SLICE) + b"\r\n\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % character for character in INCOMPLETE) + b"0\r\nX-T: a\r\n\r\n"

    async def test(connect: Connect) -> None:
        reader, writer = await connect()
        for _ in range(3):
            writer.write(long)
            assert (await read_response(reader))[0] == 200
            writer.write(CHUNKED + chunks)
            status, body = await read_response(reader)
            assert (status, body["error"]["message"]) == (422, "context: is required and was not given.")

    with_server(protocol, test, seconds=5)


@both
def test_many_requests_at_once_are_answered_in_their_order(protocol: str) -> None:
    wrong = POST + b"Content-Length: %d\r\n\r\n%b" % (len(INCOMPLETE), INCOMPLETE)

    async def test(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write((HEALTH + wrong) * 300 + b"nonsense\r\n\r\n" + HEALTH)  # many slices
        for _ in range(300):
            assert [(await read_response(reader))[0] for _ in range(2)] == [200, 422]
        status, body = await read_response(reader)
        assert (status, body["error"]["type"]) == (400, "malformed_http")
        assert await reader.read() == b""

    with_server(protocol, test, seconds=5)


@both
@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500,
        POST + b"Content-Length: x\r\n\r\n",
        CHUNKED + b"x\r\n",
        b"GET http://[ HTTP/1.1\r\n\r\n\r\n",
        b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
    ids=["nonsense", "TLS", "length", "chunk", "address", "tunnel"],
)
def test_what_is_not_http_is_refused_as_json(protocol: str, data: bytes) -> None:
    async def test(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(data)
        status, body = await read_response(reader)
        assert 400 <= status < 500
        assert body["error"]["type"] in ("malformed_http", "unknown_route", "wrong_method")

    with_server(protocol, test, seconds=5)


@both
@pytest.mark.parametrize(
    ("path", "kind", "origin", "status"),
    [
        ("/v1/ask", "application/json", "", 413),
        ("/v1/ask", "application/json", "http://evil.example", 403),
        ("/v1/ask", "text/plain", "", 415),
        ("/nothing", "application/json", "", 404),
        ("/v1/text?name=a.txt", "text/plain", "", 413),
    ],
)
def test_an_early_refusal_reaches_a_client_that_first_sends_all(
    protocol: str, path: str, kind: str, origin: str, status: int
) -> None:
    def refused(address: tuple[str, int]) -> tuple[int, Any]:
        headers = {"Content-Type": kind, **({"Origin": origin} if origin else {})}
        url = f"http://{address[0]}:{address[1]}{path}"
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, b"a" * 25_000_000, headers), timeout=15
            ) as response:
                return int(response.status), None
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    async def test(connect: Connect) -> None:
        _, writer = await connect()
        address = writer.get_extra_info("peername")
        for _ in range(2):
            found, body = await asyncio.to_thread(refused, address)
            assert found == status
            assert body["error"]["message"]

    with_server(protocol, test, seconds=10)


@both
def test_a_client_that_sends_on_after_a_refusal_is_cut_off(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_IDLE_SECONDS", 0.3)
    monkeypatch.setattr(connections, "LINGER_BYTES", 20 << 20)
    start = POST + b"Content-Length: 100000000000\r\n\r\n"

    async def test(connect: Connect) -> None:
        reader, writer = await connect()
        sending = asyncio.create_task(send(writer, start, b"a" * 65536, most=1 << 30))
        assert (await read_response(reader))[0] == 413
        assert 20 << 20 <= await sending < 60 << 20  # buffers of the system included
        reader, writer = await connect()
        writer.write(start)
        assert (await read_response(reader))[0] == 413
        assert await reader.read() == b""
        await asyncio.sleep(1)
        assert await send(writer, b"", b"a" * 1000, most=10_000) < 10_000  # the server has closed it, also for reading

    with_server(protocol, test, seconds=5)


@both
@pytest.mark.parametrize(
    "offer",
    [
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n",
        b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
        b"Upgrade: foo\r\n",
    ],
    ids=["h2c", "websocket", "no connection"],
)
def test_an_offer_of_another_protocol_is_ignored(protocol: str, offer: bytes) -> None:
    async def test(connect: Connect) -> None:
        reader, writer = await connect()
        whole = b"Content-Length: %d\r\n\r\n%b" % (len(INCOMPLETE), INCOMPLETE)
        chunk = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(INCOMPLETE), INCOMPLETE)
        for body in (whole, chunk):
            for parts in (1, 7):
                request = POST + offer + body
                size = len(request) // parts + 1
                for begin in range(0, len(request), size):
                    writer.write(request[begin : begin + size])
                    await asyncio.sleep(0.01)
                status, answer = await read_response(reader)
                assert (status, answer["error"]["message"]) == (422, "context: is required and was not given.")
        writer.write(HEALTH.replace(b"\r\n\r\n", b"\r\n" + offer + b"\r\n") + HEALTH)
        assert [(await read_response(reader))[0] for _ in range(2)] == [200, 200]

    with_server(protocol, test, seconds=5)


# The parts


def test_connections_take_turns_and_leave_the_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamella.serve.paced_reading.TURN_SECONDS", 1e-9)  # no time for a second one
    order: list[str] = []
    turns = Turns()

    class Connection:
        def __init__(self, name: str, left: int) -> None:
            self.name, self.left, self.loop = name, left, asyncio.get_running_loop()

        def take_turn(self) -> None:
            order.append(self.name)
            self.left -= 1
            if self.left:
                turns.ask_for(self)

    async def run() -> None:
        turns.ask_for(Connection("a", 3))
        turns.ask_for(Connection("b", 2))
        while order.count("a") + order.count("b") < 5:
            order.append("other")
            await asyncio.sleep(0)

    asyncio.run(run())
    assert [name for name in order if name != "other"] == ["a", "b", "a", "b", "a"]
    assert order.count("other") >= 5


def test_the_parser_gets_little_at_once_unless_it_is_cheap() -> None:
    size = RequestSize()
    assert size.slice == HEAD_SLICE
    size.headers_ended([(b"content-length", b"100000")])
    assert size.slice == BODY_SLICE
    size.add(99_990)
    size.body_came(99_990)
    assert size.slice < HEAD_SLICE  # what follows may be anything
    size.body_came(10)
    size.request_ended()
    size.headers_ended([(b"transfer-encoding", b"chunked")])
    assert size.slice < HEAD_SLICE
    size.check()
