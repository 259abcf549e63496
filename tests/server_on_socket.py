"""A server in the process of a test, on a socket; it has not loaded its reader."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from lamella.serve.http_server import Server, bind
from lamella.serve.service import Service
from lamella.serve.settings import Settings
from lamella.serve.web_app import create_app

GENEROUS = 20  # seconds; a connection that is never closed fails the test

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


def protocol_of(name: str) -> Any:
    if name == "h11":
        return H11Protocol
    pytest.importorskip("httptools")
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    return HttpToolsProtocol


def with_server(
    protocol: str,
    test: Callable[[Connect], Awaitable[None]],
    most: int = 100,
    seconds: float = 0.3,
    small_buffers: bool = False,
) -> None:
    """Run a test against a server in this process, which has not loaded its reader.

    With small buffers, the system keeps few kilobytes of what a client has not read.
    """

    http = protocol_of(protocol)

    async def run(listening: socket.socket) -> None:
        place = listening.getsockname()[:2]
        app = create_app(Settings(body_timeout=seconds, timeout=1, write_timeout=seconds))
        service: Service = app.state.service
        server = Server(app, service, http, most)
        server.config.lifespan = "off"
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        writers: list[asyncio.StreamWriter] = []

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            connection = socket.socket()
            connection.setblocking(False)
            if small_buffers:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await asyncio.get_running_loop().sock_connect(connection, place)
            reader, writer = await asyncio.open_connection(sock=connection, limit=4096 if small_buffers else 2**16)
            writers.append(writer)
            return reader, writer

        try:
            await asyncio.wait_for(test(connect), GENEROUS)
        finally:
            for writer in writers:
                writer.close()
            server.should_exit = True
            await serving
            service.close()

    with bind("127.0.0.1", 0) as listening:
        if small_buffers:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        asyncio.run(run(listening))


async def read_response(reader: asyncio.StreamReader) -> tuple[int, Any]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length: ")[2].split()[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(length))
