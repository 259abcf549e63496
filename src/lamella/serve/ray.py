"""The server as a deployment of Ray Serve: several replicas on one or more machines, as many as the load needs.

    serve run lamella.serve.ray:app [models=NAME] [folder=DIR] [max_replicas=8] …

A request whose header `serve_multiplexed_model_id` names a reader goes to a replica that has it in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import ray
from fastapi import FastAPI
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from ray import serve
from ray.serve import Application
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from lamella.errors import LamellaError, UsageError
from lamella.models.loading import Precision
from lamella.option_errors import explain_faults
from lamella.serve.keys import read_keys
from lamella.serve.service import Service, seconds_to_stop
from lamella.serve.settings import MEBIBYTE, Settings
from lamella.serve.web_app import create_app

NAME = "lamella"
WATCH_SECONDS = 0.2  # between two looks at whether the replica was asked to stop
READERS_KNOWN = 1000  # per replica, to Ray; the replica itself limits what is in memory


def _as_list(value: Any) -> Any:
    return value.replace(",", " ").split() if isinstance(value, str) else value


class RayOptions(BaseModel):
    """What `serve run lamella.serve.ray:app` and the `args` of a Serve config file can set."""

    model_config = ConfigDict(extra="forbid")

    models: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = ()  # as for `lamella serve`; commas separate names
    folder: Path | None = None  # at the same path on every machine
    keys: Path | None = None  # file with keys; default: LAMELLA_API_KEYS of the process that deploys
    precision: Precision = "auto"
    memory: Annotated[int | None, Field(ge=1)] = None  # MiB per replica, as for `lamella serve`
    queue: Annotated[int, Field(ge=1)] = 128  # requests that a replica accepts at the same time
    timeout: Annotated[float, Field(gt=0)] = 30.0  # seconds per question

    min_replicas: Annotated[int, Field(ge=1)] = 1
    max_replicas: Annotated[int, Field(ge=1)] = 4
    busy: Annotated[float, Field(gt=0)] = 8.0  # requests per replica at the same time that Ray adds replicas beyond
    cpus: Annotated[float, Field(gt=0)] = 1.0  # per replica
    gpus: Annotated[float, Field(ge=0)] = 0.0

    def settings(self) -> Settings:
        """Return the settings of a replica."""
        return Settings(
            models=self.models,
            folder=self.folder,
            manages=False,  # what one replica loaded, removed or was taught, the others would not know
            keys=read_keys(self.keys),
            precision=self.precision,
            device="cuda" if self.gpus else None,
            threads=max(1, int(self.cpus)),
            memory=None if self.memory is None else self.memory * MEBIBYTE,
            queue=self.queue,
            timeout=self.timeout,
        )


def app(arguments: Mapping[str, Any]) -> Application:
    """Return the deployment; the arguments are those of `RayOptions`.

    `serve run` calls this. In Python, `serve.run(app({"models": ["my-reader"]}))` does the same.
    """
    options = _check(arguments)
    settings = options.settings()

    def build() -> FastAPI:
        application = create_app(settings)
        service: Service = application.state.service
        # Innermost: whoever has no key loads nothing.
        application.user_middleware.append(Middleware(RegisterReader, service=service))
        announce_stop(application, service)
        return application

    deploy = serve.deployment(
        name=NAME,
        max_ongoing_requests=options.queue,
        autoscaling_config={
            "min_replicas": options.min_replicas,
            "max_replicas": max(options.min_replicas, options.max_replicas),
            "target_ongoing_requests": options.busy,
        },
        graceful_shutdown_timeout_s=seconds_to_stop(settings),
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
    )
    return deploy(serve.ingress(build)()).bind()


def announce_stop(application: FastAPI, service: Service) -> None:
    """Let a replica know that Ray has asked it to stop: /ready reports it, and batches begin no further question.

    Ray sends it no new requests and waits for those that it has, but only up to a limit that a batch may exceed.
    Requests that were on their way are answered: nobody would send them again.
    """
    run = application.router.lifespan_context

    async def watch() -> None:
        while not asked_to_stop():
            await asyncio.sleep(WATCH_SECONDS)
        service.leaving = True

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with run(app) as state:
            watching = asyncio.create_task(watch())
            yield state
            watching.cancel()

    application.router.lifespan_context = lifespan


def asked_to_stop() -> bool:
    """Return whether Ray has asked this replica to stop.

    Ray informs a deployment when its last request is answered, which is too late, so this looks at Ray's own object.
    Where a version of Ray has it elsewhere, the answer is False: replicas stop as they did, without announcing it.
    """
    actors = getattr(ray._private.worker.global_worker, "actors", {})
    replicas = [getattr(actor, "_replica_impl", None) for actor in actors.values()]
    return any(getattr(replica, "_shutting_down", False) for replica in replicas)


class RegisterReader:
    """An ASGI middleware that lets Ray know which readers this replica has."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app

        async def load(name: str) -> str:
            await asyncio.to_thread(lambda: service.pool.get(service.catalogue.get(name)))
            return name

        self._load: Callable[[str], Awaitable[str]] = serve.multiplexed(load, max_num_models_per_replica=READERS_KNOWN)
        self._find = service.catalogue.get

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Load the reader that a request was sent here for, then answer it."""
        if scope["type"] == "http" and (name := serve.get_multiplexed_model_id()):
            with contextlib.suppress(LamellaError):  # the route that needs the reader reports it
                self._find(name)
                await self._load(name)
        await self.app(scope, receive, send)


def _check(arguments: Mapping[str, Any]) -> RayOptions:
    try:
        return RayOptions.model_validate(arguments)
    except ValidationError as error:
        faults = [dict(fault) for fault in error.errors()]
        raise UsageError(explain_faults(faults, arguments, RayOptions, "lamella.serve.ray:app")[0]) from None
