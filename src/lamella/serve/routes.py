"""The routes of the HTTP API: questions, batches, readers, and the state of the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from lamella.serve.calls import Call
from lamella.serve.json_body import JsonRoute, json_response, to_json
from lamella.serve.refusals import AbandonedError
from lamella.serve.schemas import Ask, AskResponse, Batch, ErrorResponse, ModelInfo, ModelList, ServerInfo, ServerStatus
from lamella.serve.service import Service
from lamella.version import __version__

T = TypeVar("T")

NDJSON = "application/x-ndjson"
LINES = {
    "schema": {"type": "string"},
    "example": '{"index": 1, "question": "Who?", "results": [{"model": "default", "answers": [], "no_answer": true}]}\n'
    '{"index": 0, "error": {"type": "timeout", "message": "expected an answer within 30 seconds"}}\n',
}
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "The body is not JSON."},
    401: {"model": ErrorResponse, "description": "The server has keys, and the request has none of them."},
    403: {"model": ErrorResponse, "description": "A page of another web site sent it, or to another name."},
    404: {"model": ErrorResponse, "description": "No reader has this name; the message lists those there are."},
    408: {"model": ErrorResponse, "description": "The body came too slowly."},
    413: {"model": ErrorResponse, "description": "Longer than a limit of the server; the message names it."},
    415: {"model": ErrorResponse, "description": "The Content-Type is not application/json."},
    422: {"model": ErrorResponse, "description": "A value is missing or wrong; the message names it."},
    429: {"model": ErrorResponse, "description": "The queue is full; Retry-After has the seconds to wait."},
    503: {"model": ErrorResponse, "description": "It took too long, or the server shuts down."},
}

router = APIRouter(route_class=JsonRoute)
management = APIRouter(route_class=JsonRoute)


def service_of(request: Request) -> Service:
    """Return the service of the app that a request was sent to."""
    service: Service = request.app.state.service
    return service


@router.post("/v1/ask", response_model=AskResponse, responses=ERRORS, summary="Ask a question about one or more texts")
async def ask(body: Ask, request: Request) -> Response:
    """Return the best answers of one or several readers, with their characters in the text and their probability.

    The headers `X-Queue-Time` and `X-Inference-Time` have the milliseconds that the question waited, and that the
    encoder ran.
    """
    service = service_of(request)
    call = service.new_call()
    # A name that no reader has is not logged: a client may put anything there, also its question.
    named = (name if service.catalogue.serves(name) else "unknown" for name in filter(None, body.model_names))
    request.state.notes["model"] = quote(",".join(named)[:100], safe=",@+") or "default"
    answered = await while_connected(request, service.ask(body, call), call)
    return json_response(answered, headers=finish(request, call))


@router.post(
    "/v1/batch",
    response_class=StreamingResponse,
    responses={**ERRORS, 200: {"content": {NDJSON: LINES}, "description": "One JSON object per line."}},
    summary="Ask many questions, and get each answer as soon as it is finished",
)
async def batch(body: Batch, request: Request) -> Response:
    """Return a stream of lines, in the order in which the answers are finished.

    Each line is a JSON object: the `index` of the question in `requests`, and the response of /v1/ask or an `error`.
    """
    service = service_of(request)
    calls = [service.new_call() for _ in body.requests]
    answers = service.batch(body.requests, calls)
    first = await anext(answers)  # a batch that is refused gets its status

    async def lines() -> AsyncGenerator[bytes, None]:
        async with aclosing(answers):
            yield to_json(first) + b"\n"
            async for answer in answers:
                yield to_json(answer) + b"\n"

    request.state.notes["questions"] = len(body.requests)
    return _LinesResponse(lines())


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models", response_model=ModelList, responses={401: ERRORS[401]})
async def models(request: Request) -> Response:
    """List the readers of this server, the default first."""
    described = await asyncio.to_thread(service_of(request).describe_models)
    return json_response({"models": described})


@router.head("/info", include_in_schema=False)
@router.get("/info", response_model=ServerInfo, responses={401: ERRORS[401]})
async def info(request: Request) -> Response:
    """Return the version, the default reader and the limits of this server."""
    service = service_of(request)
    settings = service.settings
    sizes = ("body", "batch", "characters", "contexts", "models", "question", "tokens")
    limits = (*(f"max_{size}" for size in sizes), "queue")
    return json_response(
        {
            "name": "lamella",
            "version": __version__,
            "default_model": service.catalogue.default,
            "models": len(service.catalogue.names()),
            "loaded": len(service.pool),
            "manages_models": settings.folder is not None and settings.manages,
            "limits": {**{name: getattr(settings, name) for name in limits}, "timeout_seconds": settings.timeout},
        }
    )


@router.head("/health", include_in_schema=False)
@router.get("/health", response_model=ServerStatus)
async def health() -> Response:
    """Return 200 while the server runs."""
    return json_response({"status": "alive"})


@router.head("/ready", include_in_schema=False)
@router.get(
    "/ready",
    response_model=ServerStatus,
    responses={
        503: {"model": ServerStatus, "description": "The default reader is being loaded, or the server shuts down."}
    },
)
async def ready(request: Request) -> Response:
    """Return 200 if the default reader is loaded and the server is not shutting down."""
    service = service_of(request)
    if service.ready:
        return json_response({"status": "ready"})
    return json_response({"status": "shutting down" if service.stopping else "loading"}, 503)


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", responses={401: ERRORS[401]}, response_class=Response)
async def metrics(request: Request) -> Response:
    """Return figures for Prometheus."""
    return Response(service_of(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@management.post("/v1/models/{name}", response_model=ModelInfo, responses={n: ERRORS[n] for n in (401, 404, 503)})
async def load_model(name: str, request: Request) -> Response:
    """Load a reader from the folder of this server, or load it again after its files have changed.

    Other readers go on answering, and so does the old version of this one until the new one is loaded.
    """
    return json_response(await service_of(request).load_model(name))


@management.delete(
    "/v1/models/{name}",
    status_code=204,
    responses={
        **{number: ERRORS[number] for number in (401, 404)},
        409: {"model": ErrorResponse, "description": "The default reader cannot be removed."},
    },
)
async def remove_model(name: str, request: Request) -> Response:
    """Serve a reader no longer, and free its memory; its files stay."""
    service_of(request).remove_model(name)
    return Response(status_code=204)


class _LinesResponse(StreamingResponse):
    """A stream of JSON lines that ends its generator at once if the client leaves."""

    def __init__(self, lines: AsyncGenerator[bytes, None]) -> None:
        super().__init__(lines, media_type=NDJSON)
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._lines):
            await super().__call__(scope, receive, send)


async def while_connected(request: Request, answering: Awaitable[T], call: Call) -> T:
    """Return a result, or give it up if the client leaves before."""
    task = asyncio.current_task()
    assert task is not None
    leaving = asyncio.ensure_future(_disconnected(request))
    answered = False

    def give_up(leaving: asyncio.Future[None]) -> None:
        if not (answered or leaving.cancelled()):
            call.abandoned = True
            task.cancel()

    leaving.add_done_callback(give_up)
    try:
        return await answering
    except asyncio.CancelledError:
        if not leaving.done():
            raise
        task.uncancel()
        raise AbandonedError from None
    finally:
        answered = True
        leaving.cancel()


def finish(request: Request, call: Call) -> dict[str, str]:
    """Return the headers with the times of a question, and note them for the log."""
    queued, computing = f"{call.queued * 1000:.1f}", f"{call.computing * 1000:.1f}"
    request.state.notes |= {"queue": f"{queued}ms", "inference": f"{computing}ms"}
    return {"X-Queue-Time": queued, "X-Inference-Time": computing}


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
