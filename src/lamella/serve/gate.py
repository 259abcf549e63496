"""The gate before all routes: who may ask, request ids, one log line per request, figures, errors as JSON."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import logging
import re
import secrets
from collections.abc import Mapping
from time import perf_counter
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, urlsplit

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lamella.errors import LamellaError, shorten, truncate
from lamella.serve.json_body import to_json
from lamella.serve.refusals import REQUEST_ID, InternalError, RefusedError, as_refusal
from lamella.serve.server_metrics import Metrics
from lamella.serve.settings import Settings

logger = logging.getLogger("lamella.serve")

REQUEST_IDS = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
OPEN = ("/", "/health", "/ready", "/docs", "/openapi.json", "/favicon.ico")  # GET without a key
OPEN_FOLDER = "/page/"
LONGEST_PATH = 200  # characters in the log
PORTS = {"http": 80, "https": 443}  # of addresses that name none


class Gate:
    """An ASGI middleware: everything that is the same for all routes."""

    def __init__(self, app: ASGIApp, *, settings: Settings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics
        self._keys = [_digest(key.encode()) for key in settings.keys]
        # Random bytes from the system for each id take half a millisecond beside busy threads. Ids need not be secret,
        # but those of all processes that write to one log must differ.
        self._process, self._numbers = secrets.token_hex(8), itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and write its line to the log."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin = perf_counter()
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if REQUEST_IDS.fullmatch(given) else f"{self._process}-{next(self._numbers)}"
        REQUEST_ID.set(request_id)
        notes: dict[str, Any] = scope.setdefault("state", {}).setdefault("notes", {})
        status, patience = 0, self.settings.stream_timeout

        async def send_on(message: Message) -> None:
            nonlocal status, patience
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            if message.get("more_body"):  # a stream holds a place in the queue while its client reads
                waiting = perf_counter()
                async with asyncio.timeout(min(self.settings.write_timeout, patience)):
                    await send(message)
                patience -= perf_counter() - waiting
            else:
                await send(message)

        try:
            try:
                self._check_host(headers)
                self._check_origin(headers)
                self._check_key(scope, headers)
                await self.app(scope, receive, send_on)
            except LamellaError as error:
                if status:  # a stream has begun
                    raise
                await send_refusal(as_refusal(error), scope, send_on)
        except TimeoutError:
            notes["client"] = "does-not-read"
        except ClientDisconnect:
            notes["client"] = "left"
        except Exception:
            logger.exception("id=%s: an error of the server", request_id)
            if not status:
                await send_refusal(InternalError(), scope, send_on)
        finally:
            seconds = perf_counter() - begin
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.observe_request(route, status, seconds)
            path = truncate(quote(scope["path"], safe="/%:@+"), LONGEST_PATH)
            more = "".join(f" {name}={value}" for name, value in notes.items())
            logger.info("id=%s %s %s %d %.1fms%s", request_id, scope["method"], path, status, seconds * 1000, more)

    def _check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse a name that is not this server's: another web site may let a name of its own point to this machine."""
        given = headers.get(b"host", b"").decode("latin-1")
        if not given or self.settings.hosts is None:  # every browser sends one
            return
        name, _ = _place(f"//{given}")
        if name not in self.settings.hosts:
            raise RefusedError(
                f"Host: expected {' or '.join(self.settings.hosts)}, got {shorten(given)}; to allow it, start the "
                "server with --allow-host NAME, or with keys.",
                status=403,
                kind="forbidden_host",
            )

    def _check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse pages of other web sites; a browser lets them send requests, and only hides the answers from them."""
        if b"origin" not in headers:  # no page sent it, or it is a GET of the page itself
            return
        origin = headers[b"origin"].decode("latin-1")
        if origin in self.settings.cors or "*" in self.settings.cors:
            return
        scheme = origin.partition(":")[0]
        host = headers.get(b"host", b"").decode("latin-1")
        name, port = _place(origin, scheme)
        if name is None or (name, port) != _place(f"//{host}", scheme):
            raise RefusedError(
                f"Origin: expected a page of this server ({shorten(host)}), got {shorten(origin)}; to allow others, "
                "start the server with --cors ORIGIN.",
                status=403,
                kind="forbidden_origin",
            )

    def _check_key(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        if not self._keys or is_open(scope["method"], scope["path"]):
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        digest = _digest(key.strip())
        # Every key is compared, in constant time, so that the time does not depend on the keys.
        matches = [hmac.compare_digest(digest, known) for known in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise RefusedError(
                "Authorization: expected a key of this server (Authorization: Bearer KEY), got "
                f"{'none' if not scheme else 'another'}.",
                status=401,
                kind="unauthorised",
            )


def is_open(method: str, path: str) -> bool:
    """Return whether a request needs no key."""
    return method in ("GET", "HEAD") and (path in OPEN or path.startswith(OPEN_FOLDER))


async def send_refusal(
    refusal: RefusedError, scope: Scope, send: Send, more_headers: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Send an error as JSON; on Hugging Face's routes in Hugging Face's form."""
    path = scope["path"]
    huggingface = path == "/" or path.startswith("/models/")
    message = " ".join(str(refusal).split())
    body = to_json({"error": message if huggingface else {"type": refusal.kind, "message": message}})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in more_headers.items()]
    if refusal.retry_after is not None:
        headers.append((b"retry-after", str(refusal.retry_after).encode()))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refusal.status in (408, 413):  # the rest of the body will not be read
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _place(address: str, scheme: str = "http") -> tuple[str | None, int | None]:
    """Return the host and the port of an address; a proxy may answer https where the server answers http."""
    try:
        parts = urlsplit(address)
        return parts.hostname, parts.port or PORTS.get(scheme)
    except ValueError:
        return None, None


def _digest(key: bytes) -> bytes:
    """Return a hash of a key, so that keys of any length take the same time to compare."""
    return hashlib.sha256(key).digest()
