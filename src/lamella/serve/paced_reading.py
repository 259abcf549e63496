"""Share the time of the event loop among connections: what each has received is parsed in small parts, in turns."""

from __future__ import annotations

import asyncio
from collections import deque
from time import perf_counter
from typing import Any

TURN_SECONDS = 0.002  # that waiting data may keep the event loop from everything else


class Turns:
    """Lets connections parse what waits, one part each, round and round. It belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[Any] = deque()
        self._begun = False

    def ask_for(self, connection: Any) -> None:
        """Call `connection.take_turn()` soon; a connection that needs another turn asks again."""
        self._waiting.append(connection)
        if not self._begun:
            self._begun = True
            connection.loop.call_soon(self._give, connection.loop)

    def _give(self, loop: asyncio.AbstractEventLoop) -> None:
        until = perf_counter() + TURN_SECONDS
        try:
            while self._waiting:
                self._waiting.popleft().take_turn()
                if perf_counter() > until:
                    break
        finally:
            self._begun = bool(self._waiting)
            if self._begun:
                loop.call_soon(self._give, loop)


class PacedTransport:
    """A transport as uvicorn sees it: when to read from the system, and how to close, is up to the connection."""

    def __init__(self, transport: asyncio.Transport, connection: Any) -> None:
        self._transport, self._connection = transport, connection
        self._unsent = b""  # waits for what follows in the same step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def pause_reading(self) -> None:
        """Parse nothing until `resume_reading`."""
        self._connection.hold(True)

    def resume_reading(self) -> None:
        """Parse what comes, and what has come."""
        self._connection.hold(False)

    def write(self, data: bytes) -> None:
        """Send data, unless the connection has sent its last; the head of a response waits for its body.

        Sending takes a tenth of the time that the event loop works, and uvicorn writes head and body apart.
        """
        if self._connection.lingers:
            return
        if self._unsent:
            self._send(data)
        else:
            self._unsent = data
            self._connection.loop.call_soon(self._send)

    def _send(self, data: bytes = b"") -> None:
        unsent, self._unsent = self._unsent, b""
        if unsent and not self._transport.is_closing():
            self._transport.writelines([unsent, data] if data else [unsent])

    def close(self) -> None:
        """Send what is written, then close."""
        self._send()
        self._connection.close()

    def is_closing(self) -> bool:
        """Return whether the connection is closed, or has sent its last."""
        return self._connection.lingers or self._transport.is_closing()
