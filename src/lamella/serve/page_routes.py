"""The page at `/` and the description of the API at `/docs`; under their policy they reach nothing but this server."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from pathlib import PurePath

from fastapi import APIRouter, Request, Response

from lamella.serve.refusals import RefusedError

TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
POLICY = "; ".join(
    [
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        *(f"{rule} 'none'" for rule in ("base-uri", "form-action", "frame-ancestors")),
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # ask again each time; the ETag makes that cheap
}


router = APIRouter(include_in_schema=False)


@router.head("/")
@router.get("/")
async def page(request: Request) -> Response:
    """Return the page."""
    return _answer(request, "index.html")


@router.head("/docs")
@router.get("/docs")
async def docs(request: Request) -> Response:
    """Return the description of the API."""
    return _answer(request, "docs.html")


@router.head("/page/{name}")
@router.get("/page/{name}")
async def file(request: Request, name: str) -> Response:
    """Return a file of the page; its name is looked up in a table, never joined to a path."""
    return _answer(request, name)


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    """Return the files of the page by name, each with its ETag."""
    folder = resources.files("lamella.serve") / "page"
    files = {file.name: file.read_bytes() for file in folder.iterdir() if PurePath(file.name).suffix in TYPES}
    return {name: (data, f'"{hashlib.sha256(data).hexdigest()[:20]}"') for name, data in files.items()}


def _answer(request: Request, name: str) -> Response:
    if name not in _files():
        raise RefusedError("page: expected a file of the page; open / instead.", status=404, kind="unknown_route")
    data, tag = _files()[name]
    headers = {**HEADERS, "ETag": tag}
    if request.headers.get("If-None-Match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=f"{TYPES[PurePath(name).suffix]}; charset=utf-8", headers=headers)
