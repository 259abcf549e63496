"""The process that listens: binds the port, answers until it is asked to stop, and then finishes what it accepted."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.server import HANDLED_SIGNALS

from lamella.errors import RunError, UsageError, warn
from lamella.garbage import spare_existing_objects
from lamella.serve.connections import limit_connections
from lamella.serve.request_size import MOST_FRAMING
from lamella.serve.service import Service, seconds_to_stop
from lamella.serve.settings import Settings
from lamella.serve.web_app import create_app

BACKLOG = 2048  # connections that wait to be accepted
MOST_CONNECTIONS = 2000  # clients that are slow hold a connection, but no place in the queue
KEEP_ALIVE = 30  # seconds
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def serve(settings: Settings, host: str, port: int, announce: Callable[[str, Service], None]) -> None:
    """Serve until SIGTERM or SIGINT, then answer the requests that were accepted.

    The port is bound first: if it is in use, nothing is loaded. `announce` gets the address when requests are answered.
    """
    listening = bind(host, port)
    try:
        address = listening.getsockname()[0]
        if not settings.keys and not ipaddress.ip_address(address).is_loopback:
            warn(f"--host {host}: without keys, everyone who reaches this machine may use the server; see --keys.")
        settings = replace(settings, hosts=names_of(settings, host, address))
        app = create_app(settings)
        service: Service = app.state.service
        service.start()
        spare_existing_objects()
        _log_to_stderr()
        _allow_connections()
        server = Server(app, service, on_start=lambda: announce(_address(listening), service))
        server.run(sockets=[listening])
    finally:
        listening.close()


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; port 0 takes any free port."""
    where = f"serve --host {host} --port {port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        raise UsageError(f"{where}: expected a host name or an IP address of this machine.") from None
    # With its protocol: asyncio turns off the delay of small packets only for sockets that name TCP.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":  # a port of a server that has just ended is free
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        wrong = "--host" if error.errno == errno.EADDRNOTAVAIL else "--port"
        raise RunError(f"{where}: cannot listen there ({error.strerror}); choose another {wrong}.") from None
    return listening


def names_of(settings: Settings, host: str, address: str) -> tuple[str, ...] | None:
    """Return the names by which clients may call a server that listens at a host, which has this address; None: any.

    Without keys, a server that only this machine reaches trusts everyone. A page of another web site could reach it by
    a name that it lets point to this machine (DNS rebinding), so such a server answers to its own names only.
    """
    loopback = ipaddress.ip_address(address).is_loopback
    if settings.hosts is None and (settings.keys or not loopback):
        return None
    names = (*LOOPBACK, address, host, *(settings.hosts or ()))
    return tuple(dict.fromkeys(name.lower() for name in names))


class Server(uvicorn.Server):
    """A server that reports itself as not ready when it is asked to stop, and ends with exit code 0."""

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        protocol: type[asyncio.Protocol] = AutoHTTPProtocol,
        most_connections: int = MOST_CONNECTIONS,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        settings = service.settings
        config = uvicorn.Config(
            app,
            http=limit_connections(protocol, most_connections, settings, service.metrics),
            h11_max_incomplete_event_size=2 * MOST_FRAMING,  # h11's own limit never comes before ours
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=seconds_to_stop(settings),
            ws="none",
        )
        super().__init__(config)
        self._service = service
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.draining = True
        super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let `handle_exit` take the signals that ask it to stop; ignore further ones while the process ends.

        uvicorn's own method raises them again at the end, and the process would end by the signal.
        """
        if threading.current_thread() is not threading.main_thread():  # no other thread may set a handler
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in HANDLED_SIGNALS}
        try:
            yield
        finally:
            ending = self._captured_signals and not self.force_exit  # forced, nothing is worth waiting for
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if ending else handler)


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _allow_connections() -> None:
    """Raise the limit of open files where it is below the limit of connections; files and processes need some, too."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 2 * MOST_CONNECTIONS
        if soft != resource.RLIM_INFINITY and soft < wanted:
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _log_to_stderr() -> None:
    """Write one line per request, with its time, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("lamella.serve")
    logger.setLevel(logging.INFO)
    logger.handlers, logger.propagate = [handler], False
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
