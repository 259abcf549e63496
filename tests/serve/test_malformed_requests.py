"""Requests at random: what schemathesis makes of the OpenAPI, and 2,000 malformed bodies, get only 4xx."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from starlette.testclient import TestClient

from lamella.serve.schemas import AskResponse
from lamella.serve.settings import Settings
from lamella.serve.web_app import create_app

ASK = {"question": "Who?", "context": ["Ann.", "Bob."], "model": None, "top_k": 2, "threshold": 0.5, "layers": False}
BATCH = {"requests": [ASK, {"question": "When?", "context": "In 2005."}]}
HUGGING_FACE = {"inputs": {"question": "Who?", "context": "Ann."}, "parameters": {"top_k": 1, "align_to_words": True}}
WRONG: list[Any] = [
    -1, 0, 10**30, 1.5, 1e308, "", " ", "\x00", "x" * 200, "../..", None, True, [], [[]], {}, {"a": {}}, [None], ["", 1]
]  # fmt: skip
WRONG_TEXT = ["NaN", "-Infinity", "1e999", '"\\ud83d"', "01", "'x'", "{", "]", "", "\x00", "\u2028", "9" * 5000]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("models")
    with TestClient(create_app(Settings(folder=folder)), raise_server_exceptions=False) as client:
        yield client


def malformed(seed: int) -> tuple[str, bytes]:
    """Return a route and a body that is wrong in one place."""
    choose = random.Random(seed)
    route, valid = choose.choice([("/v1/ask", ASK), ("/v1/batch", BATCH), ("/", HUGGING_FACE)])
    body: Any = json.loads(json.dumps(valid))
    kind = choose.randrange(4)
    if kind == 0:  # cut short, before the last brace
        data = json.dumps(body).encode()
        return route, data[: choose.randrange(len(data))]
    if kind == 1:  # bytes that are no UTF-8
        data = json.dumps(body).encode()
        at = choose.randrange(1, len(data))
        return route, data[:at] + bytes([choose.choice([0x80, 0xC0, 0xF8, 0xFF])]) + data[at:]
    place = body["requests"][0] if route == "/v1/batch" else body["inputs"] if route == "/" else body
    key = choose.choice(["question", "context"])
    if kind == 2:  # a value that JSON does not have
        place[key] = "@"
        return route, json.dumps(body).replace('"@"', choose.choice(WRONG_TEXT), 1).encode("utf-8", "surrogatepass")
    wrong = choose.choice([value for value in WRONG if not (isinstance(value, str) and value)])
    place[key] = wrong  # a value of another type, or an empty text
    return route, json.dumps(body).encode()


def test_malformed_bodies_get_only_4xx(client: TestClient) -> None:
    statuses: dict[int, int] = {}
    for seed in range(2000):
        route, body = malformed(seed)
        response = client.post(route, content=body, headers={"Content-Type": "application/json"})
        if route == "/v1/batch" and response.status_code == 200:  # an empty text is an error of one question
            assert any("error" in json.loads(line) for line in response.text.splitlines()), body
            continue
        assert 400 <= response.status_code < 500, (seed, body, response.text)
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert message
        assert "\n" not in message
        assert len(message) < 500
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
    assert statuses.keys() == {400, 422}
    assert client.get("/ready").status_code == 200


def test_a_misspelt_name_is_reported_rather_than_what_it_leaves_out(client: TestClient) -> None:
    error = client.post("/v1/ask", json={"question": "Who?", "contxt": "Ann."}).json()["error"]
    assert error["message"] == "contxt: no such option. Did you mean 'context'?"
    error = client.get("/v1/asks").json()["error"]
    assert error["message"] == "GET /v1/asks: not found; GET /docs lists the routes."


CORRECTION = {"question": "a", "context": "b"}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/ask", [], "body: expected a JSON object, got []."),
        ("/v1/ask", {**ASK, "context": []}, "context: expected a text, or a list of texts, got an empty list."),
        (
            "/v1/batch",
            {"requests": [{"questin": "a"}]},
            "requests[0].questin: no such option. Did you mean 'question'?",
        ),
        ("/v1/batch", {"requests": ["a"]}, "requests[0]: expected a JSON object, got 'a'."),
        ("/", {"inputs": "a"}, "inputs: expected a JSON object, got 'a'."),
        (
            "/",
            {**HUGGING_FACE, "parameters": {"max_seq_len": 4}},
            "parameters.max_seq_len: expected 16 to 384 tokens, ",
        ),
        (
            "/",
            {**HUGGING_FACE, "parameters": {"max_seq_len": 999}},
            "parameters.max_seq_len: expected 16 to 384 tokens, ",
        ),
        (
            "/",
            {**HUGGING_FACE, "parameters": {"doc_stride": 40, "max_seq_len": 40}},
            "parameters.doc_stride: expected less than the 40 tokens of a window (max_seq_len), got 40.",
        ),
        (
            "/",
            {**HUGGING_FACE, "parameters": {"doc_stride": 400}},
            "parameters.doc_stride: expected less than the 384 tokens of a window (max_seq_len), got 400.",
        ),
        ("/", {**HUGGING_FACE, "options": True}, "options: expected a "),
        ("/", {**HUGGING_FACE, "parameters": {"topk": 1}}, "parameters.topk: no such option. Did you mean 'top_k'?"),
        ("/v1/corrections", CORRECTION, "body: expected start and end of the answer, or no_answer = true, got "),
        (
            "/v1/corrections",
            {**CORRECTION, "start": 0, "end": 2},
            "correction: expected an answer within the 1 character ",
        ),
    ],
)
def test_a_message_names_the_field_and_what_was_found(client: TestClient, path: str, body: Any, message: str) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 422
    error = response.json()["error"]
    assert (error if isinstance(error, str) else error["message"]).startswith(message)


def test_options_of_the_hub_are_accepted_and_ignored(client: TestClient) -> None:
    plain = client.post("/", json=HUGGING_FACE)
    assert plain.status_code == 200
    options = {"use_cache": False, "wait_for_model": True}
    assert client.post("/", json={**HUGGING_FACE, "options": options}).json() == plain.json()
    assert client.post("/", json={**HUGGING_FACE, "options": None}).json() == plain.json()


def test_what_clients_send_in_another_form_is_refused(client: TestClient) -> None:
    packed = client.post("/v1/ask", content=gzip.compress(json.dumps(ASK).encode()),
                         headers={"Content-Type": "application/json", "Content-Encoding": "gzip"})  # fmt: skip
    assert packed.status_code == 415
    assert packed.json()["error"]["message"].startswith("Content-Encoding: expected none, got 'gzip'")
    form = client.post("/v1/text?name=a.txt", files={"file": ("a.txt", b"text")})
    assert form.status_code == 415
    assert form.json()["error"]["message"].endswith(
        "got a form; with curl, use --data-binary @FILE and end the address with ?name=FILE."
    )
    unnamed = client.post("/v1/text", content=b"text", headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert unnamed.status_code == 415
    assert unnamed.json()["error"]["message"].endswith("Or end the address with the name of the file: ?name=notes.md.")
    # A redirection would lead to http, also behind a proxy with TLS.
    assert client.post("/v1/ask/", json=ASK, follow_redirects=False).status_code == 404


def test_the_description_has_short_names_keys_and_one_form_of_errors(tmp_path: Path) -> None:
    described = create_app(Settings(folder=tmp_path, keys=("secret",))).openapi()
    routes = [(path, route) for path, methods in described["paths"].items() for route in methods.values()]
    names = [route["operationId"] for _, route in routes]
    assert {"ask", "batch", "load_model"} <= set(names)
    assert len(set(names)) == len(names)
    assert "ValidationError" not in json.dumps(described)
    unlocked = {path for path, route in routes if "security" not in route}
    assert unlocked == {"/health", "/ready"}
    assert described["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert "securitySchemes" not in create_app(Settings()).openapi()["components"]


def test_the_description_has_words_of_json_schema_only(client: TestClient) -> None:
    described = client.get("/openapi.json").json()
    text = json.dumps(described)
    assert not [word for word in ("ge", "le", "gt", "lt") if f'"{word}":' in text]
    fields = described["components"]["schemas"]
    for schema, name, least, most in (("Ask", "max_answer_length", 1, 1_000_000), ("Ask", "top_k", 1, 100),
                                      ("HuggingFaceParameters", "max_seq_len", 1, 1_000_000),
                                      ("HuggingFaceParameters", "doc_stride", 0, 1_000_000)):  # fmt: skip
        field = fields[schema]["properties"][name]
        number = next(part for part in field.get("anyOf", [field]) if part["type"] == "integer")
        assert (number["minimum"], number["maximum"]) == (least, most)
    (example,) = fields["AskResponse"]["examples"]
    assert AskResponse.model_validate(example).model_dump(exclude_defaults=True).keys() == example.keys()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/corrections", {"question": "a", "context": "b", "start": False, "end": True}),
        ("/v1/corrections", {"question": "a", "context": "b", "start": "0", "end": "1"}),
        ("/v1/corrections", {"question": "a", "context": "b", "no_answer": "yes"}),
        ("/v1/corrections", {"question": "a", "context": "b", "no_answer": 1}),
        ("/v1/corrections", {"question": "a", "context": "b", "no_answer": True, "near": True}),
        ("/v1/corrections", {"question": "a", "context": "b", "start": 0.5, "end": 1}),
        ("/v1/adaptations", {"model": 1}),
        ("/v1/adaptations/a/keep", {"name": 1}),
    ],
)
def test_values_of_another_type_are_not_converted(client: TestClient, path: str, body: Any) -> None:
    response = client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["type"]) == (422, "invalid_request"), response.text
    assert client.get("/v1/corrections").json()["corrections"] == []


def test_a_whole_number_may_have_a_point(client: TestClient) -> None:
    added = client.post("/v1/corrections", json={"question": "a", "context": "b", "start": 0.0, "end": 1.0})
    assert added.json()["answer"] == "b"
    client.delete(f"/v1/corrections/{added.json()['id']}")


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_schemathesis_finds_no_500_and_no_undocumented_status(client: TestClient, mode: str) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    async def started(scope: Any, receive: Any, send: Any) -> None:
        """The application, which the fixture starts and stops."""
        if scope["type"] == "http":
            await client.app(scope, receive, send)

    schema = schemathesis.openapi.from_asgi("/openapi.json", started)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {"/v1/ask", "/v1/batch", "/v1/models/{name}", "/", "/models/{name}"} <= {each.path for each in operations}
    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    for operation in operations:
        generation = schemathesis.GenerationMode(mode)
        if mode == "negative" and not operation.body:
            continue

        @settings(
            max_examples=8 if operation.body else 2, derandomize=True, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck), deadline=None,
        )  # fmt: skip
        @given(case=operation.as_strategy(generation_mode=generation))
        def check(case: Any) -> None:
            case.call_and_validate(checks=checks, timeout=60)  # the first that shows layers imports torch

        check()
