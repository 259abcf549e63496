"""The routes that Hugging Face's inference clients use: `InferenceClient(address).question_answering(…)`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from lamella.serve.json_body import JsonRoute, json_response
from lamella.serve.routes import ERRORS, finish, service_of, while_connected
from lamella.serve.schemas import HuggingFaceAnswer, HuggingFaceAsk, HuggingFaceError

router = APIRouter(route_class=JsonRoute)

OF_CLIENT: dict[int | str, dict[str, Any]] = {
    status: {**response, "model": HuggingFaceError} for status, response in ERRORS.items()
}


@router.post("/", response_model=HuggingFaceAnswer | list[HuggingFaceAnswer], responses=OF_CLIENT)
async def answer(body: HuggingFaceAsk, request: Request) -> Response:
    """Answer with the default reader, as the question answering pipeline of transformers 4 did."""
    return await _answer(None, body, request)


@router.post("/models/{name}", response_model=HuggingFaceAnswer | list[HuggingFaceAnswer], responses=OF_CLIENT)
async def answer_with(name: str, body: HuggingFaceAsk, request: Request) -> Response:
    """Answer with a reader, as the question answering pipeline of transformers 4 did."""
    return await _answer(name, body, request)


async def _answer(name: str | None, body: HuggingFaceAsk, request: Request) -> Response:
    service = service_of(request)
    call = service.new_call()
    answered = await while_connected(request, service.ask_as_pipeline(name, body, call), call)
    return json_response(answered, headers=finish(request, call))
