"""The web application: the service with its routes, behind the gate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from lamella.errors import LamellaError, truncate
from lamella.serve import hugging_face, learning_routes, page_routes, routes
from lamella.serve.direct_routes import DirectRoutes
from lamella.serve.gate import Gate, is_open, send_refusal
from lamella.serve.json_body import json_response
from lamella.serve.learning_routes import Learning
from lamella.serve.refusals import RefusedError, as_refusal
from lamella.serve.service import Service
from lamella.serve.settings import Settings
from lamella.version import __version__

DESCRIPTION = """Extractive question answering: find the answer to a question in a text, or report that there is none.

Errors have one form: `{"error": {"type": …, "message": …}}`."""


def create_app(settings: Settings | None = None) -> FastAPI:
    """Return the application; it loads the default reader when it starts."""
    service = Service(settings or Settings())
    folder = service.settings.folder if service.settings.manages else None
    learning = None if folder is None else Learning.of(folder, service.catalogue)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(service.start)
        yield
        service.draining = True
        if learning is not None:
            await asyncio.to_thread(learning.adaptations.close)
        service.close()

    app = FastAPI(
        title="Lamella",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        generate_unique_id_function=lambda route: route.name,  # generated clients name their functions after it
        redirect_slashes=False,  # to an address with http, also behind a proxy with TLS
        docs_url=None,  # FastAPI's viewer is loaded from another host; page_routes has one of its own
        redoc_url=None,
        exception_handlers={HTTPException: _http_error, LamellaError: _error},
    )
    app.state.service = service
    app.state.routers = [routes.router, learning_routes.texts, hugging_face.router, page_routes.router]
    if learning is not None:
        app.state.learning = learning
        app.state.routers += [routes.management, learning_routes.learning]
    for router in app.state.routers:
        app.include_router(router)
    app.openapi = partial(_describe, app, app.openapi)  # type: ignore[method-assign]
    app.add_middleware(DirectRoutes, routes=[route for router in app.state.routers for route in router.routes])
    app.add_middleware(Gate, settings=service.settings, metrics=service.metrics)
    if service.settings.cors:  # outermost: a browser asks first, without a key
        app.add_middleware(
            OtherOrigins,
            allow_origins=list(service.settings.cors),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id", "X-Queue-Time", "X-Inference-Time", "Retry-After"],
        )
    return app


def _describe(app: FastAPI, describe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the description of the API for programs: without the framework's own errors, and with the use of keys."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    description = describe()
    schemas, keys = description["components"]["schemas"], app.state.service.settings.keys
    for name in ("HTTPValidationError", "ValidationError"):  # the form of errors that this server never sends
        schemas.pop(name, None)
    for path, methods in description["paths"].items():
        for method, route in methods.items():
            if "HTTPValidationError" in str(route["responses"].get("422")):
                del route["responses"]["422"]
            if keys and not is_open(method.upper(), path):
                route["security"] = [{"key": []}]
    if keys:
        scheme = {"type": "http", "scheme": "bearer", "description": "A key of this server."}
        description["components"]["securitySchemes"] = {"key": scheme}
    return description


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, LamellaError)
    return _RefusedResponse(as_refusal(error))


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer an error of the framework: an unknown route or method."""
    assert isinstance(error, HTTPException)
    kind = {404: "unknown_route", 405: "wrong_method"}.get(error.status_code, "invalid_request")
    route = f"{request.method} {truncate(request.url.path)}"
    advice = "start the server with --models DIR to have it" if _needs_folder(request) else "GET /docs lists the routes"
    message = f"{route}: {error.detail.lower() if error.detail else 'refused'}; {advice}."
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(sorted({*headers.get("Allow", "").split(", "), *_methods_of(request)} - {""}))
    return _RefusedResponse(RefusedError(message, status=error.status_code, kind=kind), headers)


def _needs_folder(request: Request) -> bool:
    """Whether only a server with a folder of readers has this route."""
    settings = routes.service_of(request).settings
    if settings.folder is not None or not settings.manages:  # on Ray, no option brings these routes
        return False
    routed = [route for router in (routes.management, learning_routes.learning) for route in router.routes]
    return any(route.matches(request.scope)[0] == Match.FULL for route in routed)


def _methods_of(request: Request) -> Iterator[str]:
    """Yield the methods of a path; the framework names only those of the first route that has it."""
    routes = [route for router in request.app.state.routers for route in router.routes]
    matching = [route for route in routes if route.matches(request.scope)[0] != Match.NONE]
    own = [route for route in matching if route.path == request.url.path]
    for route in own or matching:  # an id could be "squad.json", but none is
        yield from route.methods


class OtherOrigins(CORSMiddleware):
    """Answers browsers that ask whether a page of another web site may send a request; a refusal is JSON."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return what pages of an origin may send, or an error."""
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        refused = bytes(response.body).decode().removeprefix("Disallowed CORS ")
        message = (
            f"preflight: expected an origin, a method and headers that this server allows, got another: {refused}; to "
            "allow an origin, start the server with --cors ORIGIN."
        )
        headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        return json_response({"error": {"type": "forbidden_origin", "message": message}}, 403, headers)


class _RefusedResponse(Response):
    """The response to a request that cannot be answered."""

    def __init__(self, refusal: RefusedError, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status_code=refusal.status)
        self._refusal, self._more = refusal, headers or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_refusal(self._refusal, scope, send, self._more)
