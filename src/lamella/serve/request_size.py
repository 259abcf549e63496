"""Count what the bytes of a connection carry: a request without end, or with hardly any content, is refused early."""

from __future__ import annotations

from collections.abc import Iterable

from lamella.serve.refusals import TooLargeError

MOST_FRAMING = 64 * 1024  # bytes of headers, of trailers, and of what surrounds the parts of a body

HEAD_SLICE = 4 * 1024  # bytes that a parser gets at once: a few milliseconds of work in the worst case
CHUNKS_SLICE = 2 * 1024
BODY_SLICE = 64 * 1024  # of a body whose length is known, which costs nothing to parse


class RequestSize:
    """Counts the bytes of the request that a connection sends now."""

    def __init__(self) -> None:
        self.in_body = False  # its headers have come, its body has not ended
        self._left: int | None = None  # bytes of its body that are missing; None: it comes in chunks
        self._carried = 0  # bytes of its body that have come
        self._framing = 0  # other bytes that have come since its headers ended
        self._idle = 0  # bytes since its last progress: the end of its headers, or a part of its body

    @property
    def slice(self) -> int:
        """How many bytes the parser may get at once."""
        if not self.in_body:
            return HEAD_SLICE
        return CHUNKS_SLICE if self._left is None else max(CHUNKS_SLICE, min(BODY_SLICE, self._left))

    def add(self, count: int) -> None:
        """Count bytes that the parser gets now."""
        self._idle += count
        if self.in_body:
            self._framing += count

    def headers_ended(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Note that a request has begun; its parser has checked the headers."""
        given = dict(headers)
        self._left = None if b"transfer-encoding" in given else int(given.get(b"content-length", b"0"))
        self.in_body, self._carried, self._framing, self._idle = True, 0, 0, 0

    def body_came(self, count: int) -> None:
        """Note that a part of the body has come."""
        self._carried += count
        self._framing -= count
        self._idle = 0
        if self._left is not None:
            self._left -= count

    def request_ended(self) -> None:
        """Note that the request is complete."""
        self.in_body, self._idle = False, 0

    def check(self) -> None:
        """Raise an error if the headers or the trailers do not end, or if the body is mostly framing."""
        excess = self.in_body and self._framing > MOST_FRAMING + self._carried
        if self._idle > MOST_FRAMING or (excess and self._idle > MOST_FRAMING // 2):
            raise TooLargeError(
                f"headers: expected at most {MOST_FRAMING:,} bytes of address, headers or trailers per request, got "
                "more.",
                status=431,
            )
        if excess:
            raise TooLargeError(
                f"body: expected chunks of more than a few bytes, got {self._framing + self._carried:,} bytes that "
                f"carry {self._carried:,}; send larger chunks, or the body with its Content-Length."
            )
