"""Connections of the server: what a client may send, how fast, and how long the server listens to it.

A client must send its request, and read the response, in time. Requests without end are refused before they fill the
memory, and what one client sends is parsed in turns with that of others.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from lamella.errors import LamellaError
from lamella.serve.gate import Gate, send_refusal
from lamella.serve.http_parsers import with_reports
from lamella.serve.json_body import to_json
from lamella.serve.paced_reading import PacedTransport, Turns
from lamella.serve.refusals import BusyError, RefusedError, as_refusal
from lamella.serve.server_metrics import Metrics
from lamella.serve.settings import Settings

LINGER_SECONDS = 30.0  # that a client may take to send the rest of a request that was refused early
LINGER_IDLE_SECONDS = 2.0  # in which it must send some of it
LINGER_BYTES = 64 << 20

logger = logging.getLogger("lamella.serve")


def limit_connections(protocol: type[asyncio.Protocol], most: int, settings: Settings, metrics: Metrics) -> Any:
    """Return an HTTP protocol of uvicorn with limits that uvicorn does not have.

    uvicorn waits for ever for the headers of a request, and for a client to read its response. With httptools, headers
    may have any length. It parses all that it has received at once, and it closes connections with data unread, which
    makes the system discard the response. It refuses connections beyond its limit, and what is not HTTP, with plain
    text.
    """
    base: Any = with_reports(protocol)
    crowded: ASGIApp = Gate(_refuse, settings=settings, metrics=metrics)
    turns = Turns()

    class LimitedProtocol(base):  # type: ignore[misc]
        """A connection that must send the headers of each request, and read what it is sent, in time."""

        _deadline: asyncio.TimerHandle | None = None
        _reading: asyncio.TimerHandle | None = None  # while bytes wait that the system does not take

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._system: Any = None  # the transport below the one that uvicorn sees
            self._waiting = b""  # received, and not parsed yet
            self._held = False  # uvicorn wants no more for now
            self._asked = False  # for a turn
            self._refusal: RefusedError | None = None  # nothing is parsed any more
            self._may_linger = True
            self.lingers = False  # all is sent, and what the client still sends is discarded
            self._discarded, self._linger_until = 0, 0.0
            self._linger: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            self._system = transport
            super().connection_made(PacedTransport(transport, self))
            transport.set_write_buffer_limits(high=0)  # `pause_writing` is called as soon as a byte has to wait
            if len(self.connections) > most:
                self.app = crowded
                self._may_linger = False
            self._watch()

        def data_received(self, data: bytes) -> None:
            if self.lingers:
                self._discard(len(data))
                return
            self._waiting += data
            if not self._asked:  # most requests are small, and parsed before data that waits for its turn
                self._parse_some()
            self._steer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._waiting = b""
            super().connection_lost(exc)
            self._unwatch()
            self._end_reading()
            if self._linger is not None:
                self._linger.cancel()

        def shutdown(self) -> None:
            if self.lingers:
                self._system.close()
                return
            self._may_linger &= self.cycle is not None and not self.cycle.response_complete
            super().shutdown()

        # Parse in turns

        def hold(self, held: bool) -> None:
            """Parse nothing, or go on."""
            self._held = held
            self._steer()

        def take_turn(self) -> None:
            """Parse a part of what waits."""
            self._asked = False
            try:
                self._parse_some()
                self._steer()
            except Exception:  # as asyncio does with errors of `data_received`
                logger.exception("id=none: an error of the server while it read a request")
                self._system.abort()

        def on_response_complete(self) -> None:
            """Begin the next request that came early, or refuse the one after all those that are answered."""
            last = not self._queued()
            super().on_response_complete()
            if self._refusal is not None and last:
                self._send(self._refusal)
            else:
                self._steer()

        def _queued(self) -> Any:
            """Return the requests that wait until the one before is answered; only httptools reads ahead."""
            return getattr(self, "pipeline", ())

        def _may_parse(self) -> bool:
            return not (
                self._held or self._queued() or self._refusal is not None or self.lingers or self._system.is_closing()
            )

        def _parse_some(self) -> None:
            if not (self._waiting and self._may_parse()):
                return
            size = self.size.slice
            data, self._waiting = self._waiting[:size], self._waiting[size:]
            self.size.add(len(data))
            self.parse(data)
            try:
                self.size.check()
            except LamellaError as error:
                self.refuse(as_refusal(error))
            self._watch()

        def _steer(self) -> None:
            """Ask for a turn if data waits; read from the system only if none does."""
            if self.lingers or self._system.is_closing():
                return
            parses = self._may_parse()
            if parses and self._waiting and not self._asked:
                self._asked = True
                turns.ask_for(self)
            if parses and not self._waiting:
                self._system.resume_reading()
            else:
                self._system.pause_reading()

        # Refuse what is not a request

        def refuse(self, refusal: RefusedError) -> None:
            """Refuse the request that is being read, after those before it are answered; then close the connection."""
            if self._refusal is not None or self.lingers:
                return
            self._refusal, self._waiting = refusal, b""
            if self.size.in_body:
                if self._queued():
                    self._queued().popleft()  # the last one to come: it will not be complete
                    return
                if self.cycle.response_started:  # it was refused before, or is answered without its body
                    self.transport.close()
                    return
                self.cycle.disconnected = True  # nobody needs the answer to half a request
                self.cycle.message_event.set()
            elif self.cycle is not None and not self.cycle.response_complete:
                return  # one before it is being answered
            self._send(refusal)

        def _send(self, refusal: RefusedError) -> None:
            """Send a refusal past the parser, which may not know that there is a request."""
            if self.transport.is_closing():
                return
            body = to_json({"error": {"type": refusal.kind, "message": str(refusal)}})
            head = (
                f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}",
                "Content-Type: application/json",
                f"Content-Length: {len(body)}",
                "Connection: close",
            )
            self.transport.write("\r\n".join([*head, "\r\n"]).encode() + body)
            self._unset_keepalive_if_required()
            metrics.requests.labels("other", refusal.status).inc()
            logger.info("id=none - - %d 0.0ms client=%s", refusal.status, refusal.kind)
            self.transport.close()

        # Close

        def close(self) -> None:
            """Close the connection; if the client is still sending, only after it has had the chance to read the end.

            A system that receives data for a closed connection discards what it has sent: the client would see a
            broken connection instead of the reason why its request was refused.
            """
            if self.lingers or self._system.is_closing():
                return
            unfinished = self.size.in_body or self._waiting or self._refusal is not None
            if not (unfinished and self._may_linger and self._system.can_write_eof()):
                self._system.close()
                return
            self.lingers, self._waiting = True, b""
            self._linger_until = self.loop.time() + LINGER_SECONDS
            self._unwatch()
            self._system.write_eof()
            self._system.resume_reading()
            self._discard(0)

        def _discard(self, count: int) -> None:
            """Wait for more of what nobody reads, up to a limit of time and size."""
            self._discarded += count
            if self._linger is not None:
                self._linger.cancel()
            if self._discarded > LINGER_BYTES:
                self._system.close()
                return
            left = self._linger_until - self.loop.time()
            self._linger = self.loop.call_later(max(0.0, min(LINGER_IDLE_SECONDS, left)), self._system.close)

        # Time limits

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
            if self.lingers:
                return
            if self.cycle is not None and not self.cycle.response_complete:
                self._unwatch()
            elif self._deadline is None:
                self._deadline = self.loop.call_later(settings.body_timeout, self._end_waiting)

        def _end_waiting(self) -> None:
            """Do what uvicorn does with a connection that it has kept alive for long enough: close it."""
            self._may_linger &= self.size.in_body
            self.timeout_keep_alive_handler()

        def _unwatch(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return LimitedProtocol


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    refusal = BusyError("the server has as many connections as it can have; try again later.", retry_after=1)
    await send_refusal(refusal, scope, send, {"Connection": "close"})
