"""The command that serves readers over HTTP."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lamella.cli.app import Precision, app
from lamella.errors import UsageError, printable
from lamella.serve.keys import KEYS, read_keys

if TYPE_CHECKING:
    from lamella.serve.service import Service

NAMES_SHOWN = 10


@app.command()
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Readers to serve, as for ask --model; the first answers requests that name none. Default: `default`.",
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--models",
            metavar="DIR",
            help="Also serve each model in this folder, by the name of its own folder; clients may then load and "
            "remove readers.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen at; 0.0.0.0: reachable from other machines.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, help="Port to listen at; 0: any free port.")
    ] = 8000,
    keys: Annotated[
        Path | None,
        typer.Option(
            "--keys",
            metavar="FILE",
            help=f"File with one key per line; clients must send one of them. Default: the keys in {KEYS}, if set.",
        ),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            "--cors", metavar="ORIGIN", help="Web site whose pages may ask, such as https://example.org. Repeatable."
        ),
    ] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="Name by which clients call this server, such as qa.example.org behind a proxy. Repeatable. Default: "
            "any name; only those of this machine, if the server listens there and has no keys.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", help="Where readers run: cpu, cuda, cuda:1, mps. Default: the GPU of this machine, or its CPU."
        ),
    ] = None,
    precision: Precision = "auto",
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Cores to use on a CPU; default: all of them.")
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(
            "--memory",
            min=1,
            help="MiB for the tensors of readers that share an encoder; the least recently used are read again when "
            "they are asked. Default: 48 on a CPU, 1,024 on a GPU.",
        ),
    ] = None,
    loaded: Annotated[
        int, typer.Option("--loaded", min=1, help="Encoders kept in memory, whether shared by readers or used by one.")
    ] = 8,
    queue: Annotated[
        int, typer.Option("--queue", min=1, help="Requests accepted at the same time; others get 429.")
    ] = 128,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Maximum seconds per question.")] = 30.0,
    body_timeout: Annotated[
        float, typer.Option("--body-timeout", min=0.1, help="Maximum seconds in which a client must send its request.")
    ] = 10.0,
    max_body: Annotated[int, typer.Option("--max-body", min=1, help="Maximum size of a request in MiB.")] = 4,
    max_characters: Annotated[
        int, typer.Option("--max-characters", min=1, help="Maximum characters of all contexts of a question.")
    ] = 2_000_000,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Maximum tokens of what is read of the contexts of a question.")
    ] = 100_000,
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Maximum questions per batch.")] = 256,
) -> None:
    """Answer questions over HTTP, and in the browser."""
    from lamella.serve.http_server import serve as serve_http
    from lamella.serve.settings import MEBIBYTE, Settings

    settings = Settings(
        models=tuple(models or ()),
        folder=folder,
        keys=read_keys(keys),
        cors=tuple(map(_origin, cors or ())),
        hosts=tuple(hosts) if hosts else None,
        device=device,
        precision=precision,
        threads=threads,
        memory=None if memory is None else memory * MEBIBYTE,
        most_loaded=loaded,
        queue=queue,
        timeout=timeout,
        body_timeout=body_timeout,
        max_body=max_body * MEBIBYTE,
        max_characters=max_characters,
        max_tokens=max_tokens,
        max_batch=max_batch,
    )
    serve_http(settings, host, port, _announce)


def _origin(value: str) -> str:
    """Return an origin as browsers send it: in small letters, and without the port that its scheme has anyway."""
    origin = value.rstrip("/").lower()
    if origin not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
        raise UsageError(
            f"serve --cors {printable(value)}: expected the scheme, the host and perhaps the port of a web site, such "
            "as https://example.org, or * for all."
        )
    return re.sub(r"^(http://.*):80$|^(https://.*):443$", r"\1\2", origin)


def _announce(address: str, service: Service) -> None:
    names = service.catalogue.names()
    shown = ", ".join(names[:NAMES_SHOWN])
    more = f" and {len(names) - NAMES_SHOWN:,} more" if len(names) > NAMES_SHOWN else ""
    typer.echo(f"Serving {shown}{more} at {address}")
    typer.echo(f"Open it in a browser to ask; {address}/docs describes the API. Stop with Ctrl-C.")
