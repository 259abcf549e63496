"""Connections of the server: idle clients are cut off, and connections beyond the limit are refused.

A client must send its request, and read the response, in time.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from lamella.serve.gate import Gate, send_refusal
from lamella.serve.refusals import BusyError
from lamella.serve.server_metrics import Metrics
from lamella.serve.settings import Settings


def limit_connections(protocol: type[asyncio.Protocol], most: int, settings: Settings, metrics: Metrics) -> Any:
    """Return an HTTP protocol of uvicorn with limits that uvicorn does not have.

    uvicorn waits for ever for the headers of a request, and for a client to read its response. It refuses connections
    beyond its limit with plain text.
    """
    base: Any = protocol
    crowded: ASGIApp = Gate(_refuse, settings=settings, metrics=metrics)

    class LimitedProtocol(base):  # type: ignore[misc]
        """A connection that must send the headers of each request, and read what it is sent, in time."""

        _deadline: asyncio.TimerHandle | None = None
        _reading: asyncio.TimerHandle | None = None  # while bytes wait that the system does not take

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=0)  # `pause_writing` is called as soon as a byte has to wait
            if len(self.connections) > most:
                self.app = crowded
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._unwatch()
            self._end_reading()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._expect_reading()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._end_reading()

        def _expect_reading(self) -> None:
            """Cut the client off unless it reads something in time; a slow client may take as long as it needs."""
            waiting = self.transport.get_write_buffer_size()

            def look() -> None:
                if self.transport.get_write_buffer_size() < waiting:
                    self._expect_reading()
                else:
                    self.transport.abort()  # closing would wait until all is read

            self._end_reading()
            self._reading = self.loop.call_later(settings.write_timeout, look)

        def _end_reading(self) -> None:
            if self._reading is not None:
                self._reading.cancel()
                self._reading = None

        def _watch(self) -> None:
            """Set the time limit while headers are missing; a client that sends them byte by byte gets no more time."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._unwatch()
            elif self._deadline is None:
                # What uvicorn does with a connection that it has kept alive for long enough: it closes it.
                self._deadline = self.loop.call_later(settings.body_timeout, self.timeout_keep_alive_handler)

        def _unwatch(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return LimitedProtocol


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    refusal = BusyError("the server has as many connections as it can have; try again later.", retry_after=1)
    await send_refusal(refusal, scope, send, {"Connection": "close"})
