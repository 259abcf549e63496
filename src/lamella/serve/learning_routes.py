"""The routes behind the page: the text of opened files, corrections, and adaptations to them."""

from __future__ import annotations

import asyncio
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from lamella.errors import MissingLibraryError, shorten
from lamella.registry import STRICT
from lamella.serve.adaptation import LEAST, Adaptations
from lamella.serve.catalogue import Catalogue
from lamella.serve.corrections import Corrections
from lamella.serve.json_body import JsonRoute, json_response, read_limited
from lamella.serve.refusals import BusyError
from lamella.serve.routes import ERRORS, service_of
from lamella.serve.schemas import ErrorResponse, ModelInfo, Place
from lamella.serve.texts import MOST_BYTES, UnknownTextError, text_of_file

FILES_AT_ONCE = 2  # a PDF takes a process, and up to a gigabyte
FILE_SECONDS = 60.0  # in which a file must have been sent

texts = APIRouter()
learning = APIRouter(route_class=JsonRoute)  # only if the server has a folder to write to

UNKNOWN: dict[str, Any] = {"model": ErrorResponse, "description": "Nothing here has this id."}
CONFLICT: dict[str, Any] = {"model": ErrorResponse, "description": "Another adaptation is here, or it is not finished."}


class CorrectionIn(BaseModel):
    """The right answer to a question about a text: its characters, or `no_answer`."""

    model_config = ConfigDict(**STRICT)

    question: str = Field(min_length=1, max_length=5_000, examples=["Who discovered Titan?"])
    context: str = Field(min_length=1, examples=["Christiaan Huygens discovered Titan in 1655."])
    start: Place | None = Field(None, description="first character of the answer", examples=[0])
    end: Place | None = Field(None, description="character after its last one", examples=[18])
    no_answer: bool = Field(False, description="the text does not answer the question")
    near: Place | None = Field(None, description="where a reader wrongly saw an answer, if the text is long")

    @model_validator(mode="after")
    def _check_place(self) -> CorrectionIn:
        marked = self.start is not None and self.end is not None
        if marked == self.no_answer or (self.start is None) != (self.end is None):
            raise ValueError("start and end of the answer, or no_answer = true")
        return self


class TextResponse(BaseModel):
    """The text of a file."""

    text: str
    kind: str = Field(description="txt, md, html, pdf or docx.")


class Correction(BaseModel):
    """The right answer to a question about a text."""

    id: str
    question: str
    answer: str | None = Field(description="Null if the text does not answer the question.")
    no_answer: bool
    context_start: str = Field(description="The first words of the text.")


class Adaptation(BaseModel):
    """A reader that is adapted to corrections."""

    model_config = ConfigDict(extra="allow")

    id: str
    model: str = Field(description="The reader that it started from.")
    trained_on: int = Field(description="Corrections that it is trained on.")
    left_out: int = Field(description="Corrections that it is scored on.")
    split: Literal["context", "question"] = Field(description="What training and scoring do not share.")
    progress: float = Field(description="Share of the training that is done.")
    state: Literal["training", "scoring", "finished", "failed"]
    message: str | None = Field(default=None, description="Why it failed.")
    verdict: dict[str, Any] | None = Field(
        default=None, description="How both readers answer the corrections left out, and what that shows."
    )


class CorrectionList(BaseModel):
    """All corrections, the newest first."""

    corrections: list[Correction]
    least: int = Field(description="How many an adaptation needs.")
    adaptation: Adaptation | None = Field(description="The one that runs, or waits for a decision.")
    can_adapt: bool
    why_not: str | None


class RemovedCorrection(BaseModel):
    """The id of a correction that was removed."""

    removed: str


class DiscardedAdaptation(BaseModel):
    """The id of an adaptation that was discarded."""

    discarded: str


class AdaptationIn(BaseModel):
    """The reader to adapt; null is the default reader."""

    model_config = ConfigDict(**STRICT)

    model: str | None = Field(None, examples=["default"])


class KeepIn(BaseModel):
    """The name under which to keep an adapted reader."""

    model_config = ConfigDict(**STRICT)

    name: str = Field(min_length=1, max_length=100, examples=["mine"])


@dataclass(frozen=True)
class Learning:
    """What a server has learnt from people: their corrections, and the adaptations to them."""

    corrections: Corrections
    adaptations: Adaptations

    @classmethod
    def of(cls, folder: Path, catalogue: Catalogue) -> Learning:
        """Open what a folder holds."""
        corrections = Corrections(folder)
        return cls(corrections, Adaptations(folder, corrections, catalogue))


def learning_of(request: Request) -> Learning:
    """Return the corrections and adaptations of the app that a request was sent to."""
    learnt: Learning = request.app.state.learning
    return learnt


@texts.post(
    "/v1/text",
    response_model=TextResponse,
    responses={
        **{number: ERRORS[number] for number in (401, 408, 413, 429)},
        415: {"model": ErrorResponse, "description": "The file is of another kind."},
        422: {"model": ErrorResponse, "description": "No text can be read from the file."},
    },
    openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": {}}}},
)
async def read_text(request: Request, name: str = "") -> Response:
    """Return the text of a file: txt, md, html, pdf or docx.

    Send the file as the body, and its name as `?name=report.pdf`, or its kind as the Content-Type.
    """
    kind = request.headers.get("Content-Type", "")
    if kind.lower().startswith("multipart/"):
        raise UnknownTextError(
            "Content-Type: expected the file itself as the body, got a form; with curl, use --data-binary @FILE and "
            "end the address with ?name=FILE."
        )
    with service_of(request).bodies.body() as body:
        what = shorten(name) if name else "file"
        data = await read_limited(
            request, body, MOST_BYTES, FILE_SECONDS, what=what, remedy="open a part of it, or paste its text"
        )
    free = _free_readers(request)
    if free.locked():
        raise BusyError(f"the server reads {FILES_AT_ONCE} files already; try again in a moment.", retry_after=2)
    async with free:
        try:
            text, kind = await asyncio.to_thread(text_of_file, data, name, kind)
        except UnknownTextError as error:
            if name:
                raise
            raise UnknownTextError(f"{error} Or end the address with the name of the file: ?name=notes.md.") from None
    return json_response({"text": text, "kind": kind})


def _free_readers(request: Request) -> asyncio.Semaphore:
    state = request.app.state
    if not hasattr(state, "free_file_readers"):
        state.free_file_readers = asyncio.Semaphore(FILES_AT_ONCE)
    semaphore: asyncio.Semaphore = state.free_file_readers
    return semaphore


@learning.get("/v1/corrections", response_model=CorrectionList, responses={n: ERRORS[n] for n in (401, 503)})
async def list_corrections(request: Request) -> Response:
    """List the corrections, the newest first, with the adaptation that runs or waits for a decision."""
    learnt = learning_of(request)
    can_adapt = importlib.util.find_spec("torch") is not None
    reason = None if can_adapt else str(MissingLibraryError("Adapting a reader", ["torch"]))

    def listed() -> dict[str, Any]:
        current = learnt.adaptations.current()
        return {"corrections": learnt.corrections.listed(), "least": LEAST, "adaptation": current}

    return json_response({**await asyncio.to_thread(listed), "can_adapt": can_adapt, "why_not": reason})


@learning.post(
    "/v1/corrections",
    status_code=201,
    response_model=Correction,
    responses={n: ERRORS[n] for n in (400, 401, 408, 413, 415, 422, 429, 503)},
)
async def add_correction(body: CorrectionIn, request: Request) -> Response:
    """Keep the right answer to a question; a second correction of the same question replaces the first."""
    place = None if body.start is None or body.end is None else (body.start, body.end)
    corrections = learning_of(request).corrections
    added = await asyncio.to_thread(corrections.add, body.question, body.context, place, near=body.near)
    return json_response(added, 201)


@learning.get("/v1/corrections/squad.json", responses={n: ERRORS[n] for n in (401, 503)})
async def download_corrections(request: Request) -> Response:
    """Return the corrections as a SQuAD 2.0 file."""
    headers = {"Content-Disposition": 'attachment; filename="corrections.json"'}
    content = await asyncio.to_thread(learning_of(request).corrections.file)
    return Response(content, media_type="application/json", headers=headers)


@learning.delete(
    "/v1/corrections/{correction_id}", response_model=RemovedCorrection, responses={401: ERRORS[401], 404: UNKNOWN}
)
async def remove_correction(correction_id: str, request: Request) -> Response:
    """Remove a correction."""
    await asyncio.to_thread(learning_of(request).corrections.remove, correction_id)
    return json_response({"removed": correction_id})


@learning.post(
    "/v1/adaptations",
    status_code=202,
    response_model=Adaptation,
    responses={
        **{n: ERRORS[n] for n in (400, 401, 404, 408, 413, 415, 422, 429, 503)},
        409: CONFLICT,
        501: {"model": ErrorResponse, "description": "The server has no torch, which adapting needs."},
    },
)
async def start_adaptation(body: AdaptationIn, request: Request) -> Response:
    """Adapt a reader to the corrections, in a process of its own; it goes on without the client."""
    return json_response(await asyncio.to_thread(learning_of(request).adaptations.start, body.model), 202)


@learning.get("/v1/adaptations/{adaptation_id}", response_model=Adaptation, responses={401: ERRORS[401], 404: UNKNOWN})
async def adaptation_status(adaptation_id: str, request: Request) -> Response:
    """Return the progress of an adaptation, and its verdict."""
    return json_response(await asyncio.to_thread(learning_of(request).adaptations.status, adaptation_id))


@learning.post(
    "/v1/adaptations/{adaptation_id}/keep",
    response_model=ModelInfo,
    responses={**{n: ERRORS[n] for n in (400, 401, 408, 413, 415, 422, 429, 503)}, 404: UNKNOWN, 409: CONFLICT},
)
async def keep_adaptation(adaptation_id: str, body: KeepIn, request: Request) -> Response:
    """Keep the adapted reader under a name, and load it."""
    name = await asyncio.to_thread(learning_of(request).adaptations.keep, adaptation_id, body.name)
    return json_response(await service_of(request).load_model(name))


@learning.post(
    "/v1/adaptations/{adaptation_id}/discard",
    response_model=DiscardedAdaptation,
    responses={401: ERRORS[401], 404: UNKNOWN},
)
async def discard_adaptation(adaptation_id: str, request: Request) -> Response:
    """Cancel an adaptation, or remove its reader."""
    await asyncio.to_thread(learning_of(request).adaptations.discard, adaptation_id)
    return json_response({"discarded": adaptation_id})
