"""The HTTP protocols of uvicorn, made to report what their parsers find.

Both call `headers_ended`, `body_came` and `request_ended` of `self.size`, and `refuse` for bytes that are not HTTP.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from lamella.serve.refusals import RefusedError
from lamella.serve.request_size import RequestSize


def with_reports(protocol: type[asyncio.Protocol]) -> Any:
    """Return an HTTP protocol of uvicorn that reports what its parser finds; `parse` takes the bytes."""
    return _report_h11(protocol) if issubclass(protocol, H11Protocol) else _report_httptools(protocol)


def _report_h11(protocol: Any) -> Any:
    class ReportingH11(protocol):  # type: ignore[misc]
        """A connection whose requests are parsed by h11."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.size = RequestSize()
            next_event = self.conn.next_event

            def report_event() -> Any:
                event = next_event()
                if isinstance(event, h11.Request):
                    self.size.headers_ended(event.headers)
                elif isinstance(event, h11.Data):
                    self.size.body_came(len(event.data))
                elif isinstance(event, h11.EndOfMessage):
                    self.size.request_ended()
                return event

            self.conn.next_event = report_event

        def parse(self, data: bytes) -> None:
            super().data_received(data)

        def send_400_response(self, msg: str) -> None:
            self.refuse(_not_http())

    return ReportingH11


def _report_httptools(protocol: Any) -> Any:
    import httptools

    class ReportingHttpTools(protocol):  # type: ignore[misc]
        """A connection whose requests are parsed by httptools."""

        parser: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.size = RequestSize()
            self._offers_upgrade = False

        def parse(self, data: bytes) -> None:
            self._unset_keepalive_if_required()
            try:
                while data:
                    try:
                        self.parser.feed_data(data)
                        return
                    except httptools.HttpParserUpgrade as upgrade:
                        if not self._offers_upgrade:
                            raise httptools.HttpParserError("a tunnel") from None
                        data = data[upgrade.args[0] :]
                        self._decline_upgrade()
            except httptools.HttpParserError:
                self.refuse(_not_http())

        def _decline_upgrade(self) -> None:
            """Read the request again without its offer to speak another protocol, which the parser takes as accepted.

            uvicorn would drop the body: Java's client offers HTTP/2 with each request, and would never get an answer.
            """
            self._offers_upgrade = False
            start = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
            lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
            self.parser.feed_data(b"".join([start, *lines, b"\r\n"]))

        def on_headers_complete(self) -> None:
            self._offers_upgrade = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
            if not self._offers_upgrade:
                super().on_headers_complete()
                self.size.headers_ended(self.headers)

        def on_header(self, name: bytes, value: bytes) -> None:
            if not self.size.in_body:  # uvicorn would take trailers as headers
                super().on_header(name, value)

        def on_body(self, body: bytes) -> None:
            self.size.body_came(len(body))
            super().on_body(body)

        def on_message_complete(self) -> None:
            if not self._offers_upgrade:
                super().on_message_complete()
                self.size.request_ended()

        def send_400_response(self, msg: str) -> None:
            self.refuse(_not_http())

    return ReportingHttpTools


def _not_http() -> RefusedError:
    return RefusedError(
        "request: expected HTTP/1.1, got something else; use http:// and an HTTP client.",
        status=400,
        kind="malformed_http",
    )
