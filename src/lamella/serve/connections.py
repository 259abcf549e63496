"""Connections of the server: those whose request does not come are closed, and those beyond the limit are refused."""

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

    uvicorn waits for the headers of a request for ever, and refuses connections beyond its limit with plain text.
    """
    base: Any = protocol
    crowded: ASGIApp = Gate(_refuse, settings=settings, metrics=metrics)

    class LimitedProtocol(base):  # type: ignore[misc]
        """A connection that must send the headers of each request within the time for its body."""

        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                self.app = crowded
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._unwatch()

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
