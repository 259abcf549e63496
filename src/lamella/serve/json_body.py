"""Read the JSON of requests, and write that of responses.

A body is refused before it is parsed if it is too long, comes too slowly or is no JSON; and after, if it holds what
JSON parsers disagree about: NaN, duplicate keys, lone surrogates. Whatever a body holds, it must not keep the event
loop busy: large bodies are parsed in a thread, and values are checked up to the first fault only.
"""

from __future__ import annotations

import asyncio
import codecs
import inspect
import json
import math
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError

from lamella.errors import counted, one_line, shorten
from lamella.option_errors import explain_faults
from lamella.serve.body_budget import Body
from lamella.serve.refusals import RefusedError, TooLargeError

PARSED_AT_ONCE = 1 << 16  # bytes; larger bodies are parsed in a thread
MOST_KEYS = 100  # per object; no request has as many
MOST_FAULTS = 20  # that are looked at to explain one


class JsonRequest(Request):
    """A request whose body is read within the limits of the server."""

    async def body(self) -> bytes:
        """Return the body; raise an error if it is too long, comes too slowly or is no JSON."""
        if not hasattr(self, "_body"):
            # Large bodies wait for a thread that parses them, so they are counted until then.
            with self.app.state.service.bodies.body() as counted_body:
                body = await self._read(counted_body)
                large = len(body) > PARSED_AT_ONCE
                if body:
                    self._value = await asyncio.to_thread(parse_json, body) if large else parse_json(body)
            self._body = body
        return self._body

    async def json(self) -> Any:
        """Return the value of the body, which must not be empty."""
        await self.body()
        return self._value

    async def _read(self, body: Body) -> bytes:
        settings = self.app.state.service.settings
        if (encoding := self.headers.get("content-encoding", "identity").lower()) != "identity":
            raise RefusedError(
                f"Content-Encoding: expected none, got {shorten(encoding)}; send the body without compression.",
                status=415,
                kind="unsupported_media_type",
            )
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            found = shorten(kind) if kind else "none"
            raise RefusedError(
                f"Content-Type: expected application/json, got {found}; with curl, add -H 'Content-Type: "
                "application/json'.",
                status=415,
                kind="unsupported_media_type",
            )
        return await read_limited(self, body, settings.max_body, settings.body_timeout)


async def read_limited(
    request: Request,
    body: Body,
    most: int,
    seconds: float,
    *,
    what: str = "body",
    remedy: str = "send less text per request",
) -> bytes:
    """Return the body of a request; raise an error if it has more than `most` bytes or is not sent in `seconds`.

    The errors call the body `what`.
    With its last byte, a request is accepted: it is answered even if the server is asked to stop then.
    """

    def too_long(found: str) -> TooLargeError:
        return TooLargeError(f"{what}: expected at most {counted(most, 'byte')}, got {found}; {remedy}.")

    length = request.headers.get("content-length", "")
    if length.isdecimal() and len(length) < 20 and int(length) > most:
        raise too_long(f"{int(length):,}")
    chunks: list[bytes] = []
    service = request.app.state.service
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():  # the last chunk is empty
                service.check_not_stopping()
                body.add(len(chunk))
                if body.read > most:
                    raise too_long("more")
                chunks.append(chunk)
    except TimeoutError:
        raise RefusedError(
            f"{what}: expected all of it within {seconds:g} seconds, got {counted(body.read, 'byte')}; send it faster.",
            status=408,
            kind="slow_request",
        ) from None
    return b"".join(chunks)


def parse_json(body: bytes) -> Any:
    """Parse JSON strictly."""
    if body.startswith(codecs.BOM_UTF8):
        raise _malformed("body: expected JSON, found a byte order mark before it; send UTF-8 without one.")
    try:
        value = _DECODER.decode(body.decode("utf-8"))
        if b"\\u" in body:  # only an escape can write half of a surrogate pair
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise _malformed("body: expected Unicode text, found half of a surrogate pair (\\ud800 to \\udfff).") from None
    except UnicodeDecodeError as error:
        raise _malformed(f"body: expected UTF-8, found another byte at position {error.start}.") from None
    except RecursionError:
        raise _malformed("body: expected JSON, found values nested too deeply.") from None
    except ValueError as error:
        if "set_int_max_str_digits" in str(error):
            most = f"{sys.get_int_max_str_digits():,}"
            raise _malformed(f"body: expected whole numbers of at most {most} digits, found a longer one.") from None
        raise _malformed(f"body: expected JSON, found an error: {one_line(error)}.") from None
    return value


class JsonRoute(APIRoute):
    """A route whose body is a `JsonRequest`; what is wrong with its values is explained in one line."""

    direct: Callable[[JsonRequest], Coroutine[Any, Any, Response]] | None  # of a function with nothing but a body

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        schema: Any = None if self.body_field is None else self.body_field.field_info.annotation
        # The framework takes a quarter of the time of a request to call a function with nothing but a body.
        parameters = list(inspect.signature(self.endpoint).parameters)
        plain = parameters == ["body", "request"] and not self.dependant.dependencies

        async def handle_json(request: Request) -> Response:
            if not isinstance(request, JsonRequest):
                request = JsonRequest(request.scope, request.receive)
            value = await request.json() if schema is not None and await request.body() else None
            if value is None and schema is not None:
                found = "null" if await request.body() else "nothing"
                raise RefusedError(f"body: expected a JSON object, got {found}.")
            if hasattr(schema, "check_length"):
                schema.check_length(value, request.app.state.service.settings)
            if plain:
                response: Response = await self.endpoint(_read_fields(value, schema), request)
                return response
            try:
                return await handle(request)
            except RequestValidationError as error:
                raise RefusedError(_explain(error, schema)) from None

        self.direct = handle_json if plain else None
        return handle_json


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a JSON value."""
    return Response(to_json(value), status, headers, "application/json")


def to_json(value: Any) -> bytes:
    """Return a value as JSON, on one line; a number that JSON cannot hold becomes null."""
    try:
        text = _ENCODER.encode(value)
    except ValueError:
        text = _ENCODER.encode(_finite(value))
    return text.encode("utf-8", "replace")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MOST_KEYS:
        raise TooLargeError(f"body: expected at most {MOST_KEYS} keys per object, got {len(pairs):,}.")
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {shorten(key)} twice")
        values[key] = value
    return values


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name}, which is no JSON number")


# Kept: to make the decoder takes longer than to use it.
_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _malformed(message: str) -> RefusedError:
    return RefusedError(message, status=400, kind="malformed_json")


def _read_fields(value: Any, schema: Any) -> Any:
    """Return the fields of a body, as its schema has them."""
    if not isinstance(value, dict):
        raise RefusedError(f"body: expected a JSON object, got {shorten(value)}.")
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise RefusedError(_explain_body(error.errors()[:MOST_FAULTS], value, schema)) from None


def _explain(error: RequestValidationError, schema: Any) -> str:
    """Return what is wrong with a request, the first fault only."""
    faults = [{**fault, "loc": tuple(fault["loc"])} for fault in error.errors()[:MOST_FAULTS]]
    in_body = [{**fault, "loc": fault["loc"][1:]} for fault in faults if fault["loc"][0] == "body"]
    if in_body:
        if not isinstance(error.body, dict):
            return f"body: expected a JSON object, got {shorten(error.body)}."
        return _explain_body(in_body, error.body, schema)
    first = faults[0]
    return f"{first['loc'][-1]}: {first['msg'].lower()}, got {shorten(first.get('input'))}."


def _explain_body(faults: Sequence[Any], body: Mapping[str, Any], schema: Any) -> str:
    """Return what is wrong with the values of a body; a misspelt name explains a missing field."""
    words = [{**fault, "type": "object", "msg": "a JSON object"} if fault["type"] == "model_type" else fault
             for fault in sorted(faults, key=lambda fault: fault["type"] != "extra_forbidden")]  # fmt: skip
    line = explain_faults(words, body, schema)[0]
    return f"body{line}" if line.startswith(":") else line  # a fault of no single field
