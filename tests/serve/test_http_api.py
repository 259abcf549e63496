"""The HTTP API in this process: answers equal the Reader's, and whatever is wrong gets one clear line."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter, Depends, Request, Response
from starlette.testclient import TestClient

from lamella.encoder.sources import READERS
from lamella.inference.reader import Reader
from lamella.serve.answering import AskOptions
from lamella.serve.json_body import JsonRoute, json_response
from lamella.serve.refusals import RefusedError
from lamella.serve.schemas import Ask, ServerInfo, ServerStatus
from lamella.serve.service import Service
from lamella.serve.settings import Settings
from lamella.serve.web_app import create_app
from samples import needs_torch

TITAN = "Huygens landed on Titan on 14 January 2005. It had been carried there by Cassini."
WHEN = {"question": "When did Huygens land on Titan?", "context": TITAN}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models, and something that is none."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("first", "second"):
        shutil.copytree(READERS / "default", folder / name)
    config = json.loads((folder / "second/config.json").read_text())
    config["decoding"]["null_score_diff_threshold"] = -30.0
    (folder / "second/config.json").write_text(json.dumps(config))
    (folder / "notes").mkdir()
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    with TestClient(create_app(Settings(folder=folder)), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader.load()


def test_routes_with_nothing_but_a_body_do_not_pass_the_layers_of_the_framework(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[str] = []
    whole = APIRouter.__call__

    async def note(self: APIRouter, scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])
        await whole(self, scope, receive, send)

    monkeypatch.setattr(APIRouter, "__call__", note)
    assert client.post("/v1/ask", json={"question": "Who?", "context": "Anna came."}).status_code == 200
    assert client.get("/v1/models").status_code == 200
    assert passed == ["/v1/models"]


def service_of(client: TestClient) -> Service:
    service: Service = client.app.state.service  # type: ignore[attr-defined]
    return service


def serve(**settings: Any) -> TestClient:
    """Return a client of a server of its own."""
    return TestClient(create_app(Settings(**settings)), raise_server_exceptions=False)


def assert_same(found: Any, expected: Any) -> None:
    """Compare answers. The tensors of a reader on a shared encoder are not merged, which changes the last digits."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-4)
    else:
        assert found == expected


def error_of(response: Any, status: int) -> str:
    """Return the message of an error, which must be one line."""
    assert response.status_code == status, response.text
    message: str = response.json()["error"]["message"]
    assert message
    assert "\n" not in message
    return message


# Answers


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 4},
        {"threshold": -100.0},
        {"threshold": 1e300},
        {"answerable": 0.05},
        {"max_answer_length": 1, "top_k": 2},
        {"context": ["Saturn has rings.", "", TITAN], "top_k": 3},
        {"context": [TITAN]},
        {"context": "Saturn has many moons. " * 90 + TITAN},
        {"question": "Who wrote Faust?"},
        {"context": "Ü𝕏 «\u202e" + TITAN + "\x00"},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_answers_equal_the_reader_s(client: TestClient, reader: Reader, options: dict[str, Any]) -> None:
    asked = {**WHEN, **options}
    response = client.post("/v1/ask", json=asked)
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["question"] == asked["question"]
    (result,) = body["results"]
    expected = reader.ask(asked.pop("question"), asked.pop("context"), **asked).to_json()
    assert_same({key: result[key] for key in expected}, json.loads(json.dumps(expected)))
    assert result["model"] == "default"
    assert float(response.headers["X-Inference-Time"]) > 0
    assert float(response.headers["X-Queue-Time"]) >= 0


def test_several_readers_answer_side_by_side(client: TestClient) -> None:
    body = client.post("/v1/ask", json={**WHEN, "model": ["first", "second", "first"]}).json()
    first, second = body["results"]
    assert (first["model"], second["model"]) == ("first", "second")
    assert first["answers"][0]["answer"] == "14 January 2005"
    assert (first["no_answer"], second["no_answer"]) == (False, True)
    assert second["best_guess"] == first["answers"][0]
    assert second["threshold"] == -30.0


def test_a_text_in_an_unreadable_script_gets_a_warning(client: TestClient) -> None:
    context = "태양계에서 가장 큰 위성은 가니메데이며 목성의 둘레를 돈다."
    (result,) = client.post("/v1/ask", json={"question": "가장 큰 위성은?", "context": context}).json()["results"]
    assert "script" in result["warnings"][0]


def test_a_context_is_tokenised_once_for_readers_with_equal_tokenizers(client: TestClient) -> None:
    cache = service_of(client).pool.tokenizers.cache
    context = f"{TITAN} Nobody has asked about this text yet."
    before = cache.misses, cache.hits
    answers = [
        client.post("/v1/ask", json={"question": question, "context": context, "model": model}).json()["results"][0]
        for question, model in (("What landed?", "first"), ("What landed?", "second"), ("What carried it?", "first"))
    ]
    assert (cache.misses, cache.hits) == (before[0] + 1, before[1] + 2)
    assert answers[2]["answers"][0]["answer"] == "Cassini"


@needs_torch
def test_layers_show_what_each_token_was_read_from(client: TestClient) -> None:
    (result,) = client.post("/v1/ask", json={**WHEN, "layers": True}).json()["results"]
    layers = result["answers"][0]["layers"]
    assert layers["layers"] == [6]  # its head reads the last layer alone
    assert [token["token"] for token in layers["tokens"]] == ["14", "January", "2005"]


def test_a_batch_streams_answers_and_errors(client: TestClient) -> None:
    asks = [WHEN, {**WHEN, "model": "nobody"}, {**WHEN, "context": " "}, {**WHEN, "question": "What carried it?"}]
    with client.stream("POST", "/v1/batch", json={"requests": asks}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/x-ndjson"
        lines = {line["index"]: line for line in map(json.loads, response.iter_lines())}
    assert sorted(lines) == [0, 1, 2, 3]
    assert lines[0]["results"] == client.post("/v1/ask", json=WHEN).json()["results"]
    assert lines[1]["error"]["type"] == "unknown_model"
    assert "context" in lines[2]["error"]["message"]
    assert lines[3]["results"][0]["answers"][0]["answer"] == "Cassini"


def test_the_examples_of_the_documentation_work(client: TestClient) -> None:
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    users = {"Ask": ["/v1/ask"], "Batch": ["/v1/batch"], "HuggingFaceAsk": ["/", "/models/first"]}
    for schema, routes in users.items():
        for example in schemas[schema]["examples"]:
            for route in routes:
                response = client.post(route, json=example)
                assert response.status_code == 200, response.text
                assert "Cassini" in response.text or "2005" in response.text


def test_every_json_response_is_described(tmp_path: Path) -> None:
    described = create_app(Settings(folder=tmp_path, manages=True)).openapi()
    files = {"/v1/corrections/squad.json", "/openapi.json"}
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            for status, response in operation["responses"].items():
                content = response.get("content", {}).get("application/json")
                if status.startswith("2") and content is not None and path not in files:
                    assert content["schema"], f"{method} {path}"


def test_the_server_describes_itself_as_documented(client: TestClient) -> None:
    info = client.get("/info").json()
    assert ServerInfo.model_validate(info).model_dump() == info
    assert ServerStatus.model_validate(client.get("/health").json()).status == "alive"


# What is wrong gets one clear line


def test_a_wrong_method_gets_all_methods_of_the_path(client: TestClient) -> None:
    for path, methods in (
        ("/", "GET, HEAD, POST"),
        ("/v1/corrections", "GET, POST"),
        ("/v1/corrections/squad.json", "GET"),
        ("/v1/corrections/c1", "DELETE"),
        ("/openapi.json", "GET, HEAD"),
    ):
        response = client.put(path)
        assert (response.status_code, response.headers["Allow"]) == (405, methods)


@pytest.mark.parametrize(
    ("method", "path"), [("DELETE", "/v1/models/x"), ("POST", "/v1/models/x"), ("POST", "/v1/adaptations")]
)
def test_routes_that_need_a_folder_of_readers_name_the_option(method: str, path: str) -> None:
    with TestClient(create_app(Settings())) as client:
        response = client.request(method, path)
        assert response.status_code in (404, 405)
        assert response.json()["error"]["message"].endswith("start the server with --models DIR to have it.")
        assert client.get("/v1/nothing").json()["error"]["message"].endswith("GET /docs lists the routes.")


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 422, "body: expected a JSON object"),
        (b"null", 422, "body: expected a JSON object, got null."),
        (b"[]", 422, "body: expected a JSON object"),
        (
            b'\xef\xbb\xbf{"question": "a", "context": "b"}',
            400,
            "found a byte order mark before it; send UTF-8 without",
        ),
        (b'{"question": "a", "context": "b", "": 1}', 422, "'': no such option."),
        (b"{", 400, "expected JSON"),
        (b"\xff\xfe", 400, "UTF-8"),
        (b'{"question": "a", "question": "b", "context": "c"}', 400, "'question' twice"),
        (b'{"question": "\\ud800", "context": "c"}', 400, "surrogate"),
        (b'{"question": "a", "context": "c", "threshold": NaN}', 400, "NaN"),
        (b'{"question": "a", "context": "c", "threshold": 1e999}', 422, "threshold: expected a finite number"),
        (b'{"question": "a", "context": "c", "top_k": ' + b"9" * 5000 + b"}", 400, "at most 4,300 digits"),
        (b'{"question": "a", "context": "c", "top_k": 99999999999999999999}', 422, "top_k: expected at most 100"),
        (b'{"question": "a", "context": "c", "top_k": true}', 422, "top_k: expected a whole number"),
        (b'{"question": "a", "context": "c", "topk": 1}', 422, "top_k"),
        (b'{"question": "a", "context": "c", "threshold": 1, "answerable": 0.5}', 422, "threshold or answerable"),
        (b'{"question": "a", "context": "c", "answerable": 1}', 422, "answerable: expected less than 1"),
        (b'{"question": "", "context": "c"}', 422, "question: expected a text of at least 1"),
        (b'{"question": " ", "context": "c"}', 422, "question: expected a text, got an empty one"),
        (b'{"question": "a", "context": []}', 422, "context"),
        (b'{"question": "a", "context": ["", " "]}', 422, "context: expected a text, got an empty one"),
        (
            b'{"question": "a", "context": "\\u0000"}',
            422,
            "context: expected a text, got nothing but white space and invisible",
        ),
        (
            b'{"question": "a", "context": ["\\u200b", "\\ufeff \\n"]}',
            422,
            "context: expected a text, got nothing but white space and invisible",
        ),
        (b'{"question": "a", "context": {"b": 1}}', 422, "context: expected"),
        (b'{"question": "a", "context": "c", "model": []}', 422, "model: expected the name of a reader"),
        (b"[" * 100_000, 400, "nested too deeply"),
    ],
)
def test_a_wrong_body_is_explained(client: TestClient, body: bytes, status: int, words: str) -> None:
    response = client.post("/v1/ask", content=body, headers={"Content-Type": "application/json"})
    assert words in error_of(response, status)


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "é"])
def test_another_content_type_is_refused(client: TestClient, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind.encode("latin-1")}
    message = error_of(client.post("/v1/ask", content=json.dumps(WHEN), headers=headers), 415)
    assert "application/json" in message


NASTY_NAMES = [
    "..",
    "../default",
    "a/b",
    "/etc/passwd",
    "C:\\x",
    "default\x00",
    "default\n",
    " default",
    "x" * 101,
    "Ω",
    "",
]


@pytest.mark.parametrize("name", NASTY_NAMES, ids=repr)
def test_a_path_is_no_name(client: TestClient, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamella.serve.reader_pool.load_model", lambda *_, **__: pytest.fail("it was loaded"))
    message = error_of(client.post("/v1/ask", json={**WHEN, "model": name}), 404)
    assert "this server has default, first, second." in message


@pytest.mark.parametrize("path", ["..%2fdefault", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "a%00", "%ff", "x" * 3000])
def test_a_path_in_an_address_gets_nowhere(client: TestClient, path: str) -> None:
    for method, route in (("POST", "/models/"), ("POST", "/v1/models/"), ("DELETE", "/v1/models/")):
        response = client.request(method, route + path, json={"inputs": {"question": "a", "context": "b"}})
        assert response.status_code in (404, 405), response.text
        assert response.json()["error"]


def test_an_unknown_model_lists_the_nearest_first(folder: Path) -> None:
    from lamella.serve.refusals import UnknownModelError

    names = [f"reader-{number}" for number in range(1000)]
    message = str(UnknownModelError("reader-77x", names))
    listed = message.partition("this server has ")[2].split(", ")
    assert listed[0] == "reader-77"
    assert len(listed) == 13
    assert "988 more" in listed[-1]


def test_limits_are_named() -> None:
    settings = {"max_body": 2000, "max_contexts": 2, "max_characters": 500, "max_question": 50, "max_batch": 2}
    with serve(**settings) as client:
        for value, words in (
            ({**WHEN, "context": "x" * 3000}, "2,000 bytes"),
            ({**WHEN, "context": ["a", "b", "c"]}, "at most 2 texts"),
            ({**WHEN, "context": "x" * 501}, "500 characters"),
            ({**WHEN, "question": "x" * 51}, "50 characters"),
            ({**WHEN, "model": [str(number) for number in range(9)]}, "8 readers"),
        ):
            assert words in error_of(client.post("/v1/ask", json=value), 413)
        assert "2 questions" in error_of(client.post("/v1/batch", json={"requests": [WHEN] * 3}), 413)

        def chunks() -> Iterator[bytes]:  # without a Content-Length
            yield from [b" " * 500] * 10

        response = client.post("/v1/ask", content=chunks(), headers={"Content-Type": "application/json"})
        assert "2,000 bytes" in error_of(response, 413)


def test_tokens_are_counted_before_anything_is_computed() -> None:
    with serve(max_tokens=50) as client:
        too_many = ["a " * 30, "b " * 21]
        words = "at most 50 tokens to read, got 51"
        assert words in error_of(client.post("/v1/ask", json={**WHEN, "context": too_many}), 413)
        inputs = {"question": WHEN["question"], "context": " ".join(too_many)}
        response = client.post("/", json={"inputs": inputs})
        assert response.status_code == 413
        assert words in response.json()["error"]
        assert "lamella_batch_windows_count 0.0" in client.get("/metrics").text
        assert client.post("/v1/ask", json={**WHEN, "context": ["a " * 30, "b " * 20]}).status_code == 200
        assert client.get("/info").json()["limits"]["max_tokens"] == 50


def test_bodies_that_are_being_sent_share_a_budget(client: TestClient) -> None:
    service = service_of(client)
    with service.bodies.body() as unfinished:
        unfinished.add(service.settings.body_memory)
        response = client.post("/v1/text?name=a.txt", content=b"a" * 200_000)
        assert "64 MiB" in error_of(response, 429)
        assert int(response.headers["Retry-After"]) > 0
        assert client.post("/v1/ask", json=WHEN).status_code == 200, "questions are small"
    assert service.bodies.used == 0
    assert client.post("/v1/text?name=a.txt", content=b"a" * 200_000).status_code == 200


def test_a_full_queue_asks_to_come_back(client: TestClient) -> None:
    service = service_of(client)
    service.accepted += service.settings.queue
    try:
        for path, body in (("/v1/ask", WHEN), ("/v1/batch", {"requests": [WHEN]})):
            response = client.post(path, json=body)
            assert "limit" in error_of(response, 429)
            assert 1 <= int(response.headers["Retry-After"]) <= 60
        assert client.get("/health").status_code == 200
    finally:
        service.accepted -= service.settings.queue


def test_a_question_that_takes_too_long_is_given_up() -> None:
    with serve(timeout=0.05) as client:
        response = client.post("/v1/ask", json={**WHEN, "context": "Saturn has rings and moons. " * 3000})
        assert "0.05 seconds" in error_of(response, 503)
        assert response.headers["Retry-After"] == "1"


def test_a_number_that_json_cannot_hold_is_null(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = service_of(client).pool.get(service_of(client).catalogue.get("first")).reader.model
    never = replace_threshold(model.decoding, math.inf)
    monkeypatch.setattr(model, "decoding", never)
    response = client.post("/v1/ask", json={**WHEN, "model": "first"})
    assert response.json()["results"][0]["threshold"] is None


def replace_threshold(decoding: Any, threshold: float) -> Any:
    return decoding.model_copy(update={"null_score_diff_threshold": threshold})


# Readers


def test_models_are_listed_loaded_and_removed(client: TestClient, folder: Path) -> None:
    listed = {model["name"]: model for model in client.get("/v1/models").json()["models"]}
    assert list(listed) == ["default", "first", "second"]
    assert listed["default"]["default"]
    assert listed["default"]["loaded"]
    assert listed["default"]["base"] == "all-MiniLM-L6-v2"
    assert listed["first"]["bytes"] > 2_000_000

    shutil.copytree(folder / "first", folder / "new")
    assert client.post("/v1/ask", json={**WHEN, "model": "new"}).status_code == 404
    assert client.post("/v1/models/new").json()["loaded"]
    assert client.post("/v1/ask", json={**WHEN, "model": "new"}).status_code == 200
    config = json.loads((folder / "new/config.json").read_text())
    config["decoding"]["null_score_diff_threshold"] = -30.0
    (folder / "new/config.json").write_text(json.dumps(config))
    client.post("/v1/models/new")
    assert client.post("/v1/ask", json={**WHEN, "model": "new"}).json()["results"][0]["no_answer"]
    assert client.delete("/v1/models/new").status_code == 204
    assert client.post("/v1/ask", json={**WHEN, "model": "new"}).status_code == 404
    assert client.delete("/v1/models/new").status_code == 404
    assert (folder / "new").is_dir()
    assert "default" in error_of(client.delete("/v1/models/default"), 409)

    (folder / "new/model.safetensors").write_bytes(b"damaged")
    message = error_of(client.post("/v1/models/new"), 503)
    assert str(folder) not in message
    client.delete("/v1/models/new")
    shutil.rmtree(folder / "new")
    assert client.post("/v1/models/new").status_code == 404


def test_without_a_folder_nobody_manages_models() -> None:
    with serve() as client:
        assert client.post("/v1/models/default").status_code in (404, 405)
        assert client.delete("/v1/models/default").status_code in (404, 405)
        assert not client.get("/info").json()["manages_models"]


def test_readers_leave_memory_at_the_limit_and_come_back(folder: Path) -> None:
    with serve(folder=folder, memory=1) as client:
        for name in ("first", "second", "first"):
            assert client.post("/v1/ask", json={**WHEN, "model": name}).status_code == 200
            models = client.get("/v1/models").json()["models"]
            assert [model["name"] for model in models if model["loaded"]] == ["default", name]
            assert "lamella_loaded_models 2.0" in client.get("/metrics").text


# The state of the server, keys, other origins


def test_health_readiness_and_figures(client: TestClient) -> None:
    assert client.get("/health").json() == {"status": "alive"}
    assert client.head("/health").status_code == client.head("/ready").status_code == 200
    assert client.get("/ready").json() == {"status": "ready"}
    service_of(client).draining = True
    assert client.get("/ready").status_code == 503
    service_of(client).draining = False
    client.post("/v1/ask", json=WHEN)
    text = client.get("/metrics").text
    assert 'lamella_requests_total{route="/v1/ask",status="200"}' in text
    assert 'lamella_answers_total{found="yes",model="default"}' in text
    assert "lamella_batch_windows_bucket" in text


@pytest.mark.parametrize("path", ["/", "/docs", "/info", "/v1/models", "/metrics", "/page/app.js", "/health", "/ready"])
def test_head_is_get_without_a_body(client: TestClient, path: str) -> None:
    got, head = client.get(path), client.head(path)
    assert (head.status_code, got.status_code) == (200, 200)
    assert head.headers["Content-Type"] == got.headers["Content-Type"]
    assert "ETag" not in got.headers or head.headers["ETag"] == got.headers["ETag"]


def test_keys_are_required_where_they_are_set() -> None:
    with serve(keys=("first-key", "second-key")) as client:
        for key in ("first-key", "second-key"):
            assert client.post("/v1/ask", json=WHEN, headers={"Authorization": f"Bearer {key}"}).status_code == 200
        for header in ("Bearer wrong", "Bearer ", "first-key", "Basic first-key", "Bearer first-key-and-more", "é"):
            response = client.post("/v1/ask", json=WHEN, headers={"Authorization": header.encode("latin-1")})
            assert "Authorization" in error_of(response, 401)
            assert response.headers["WWW-Authenticate"] == "Bearer"
        for path in ("/v1/models", "/info", "/metrics"):
            assert client.get(path).status_code == client.head(path).status_code == 401
        assert client.post("/", json={}).status_code == 401
        assert client.get("/health").status_code == client.get("/ready").status_code == 200


def test_a_route_with_a_dependency_is_called_after_it() -> None:
    def refuse() -> None:
        raise RefusedError("refused by a dependency.")

    async def answer(body: Ask, request: Request) -> Response:
        return json_response({})

    app = create_app(Settings())
    app.router.add_api_route(
        "/guarded", answer, methods=["POST"], dependencies=[Depends(refuse)], route_class_override=JsonRoute
    )
    with TestClient(app) as client:
        assert "refused by a dependency" in error_of(client.post("/guarded", json=WHEN), 422)


def test_request_ids_are_taken_over_or_made(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "lamella.serve"):
        assert client.get("/health", headers={"X-Request-Id": "abc-1.2_3"}).headers["X-Request-Id"] == "abc-1.2_3"
        made = client.get("/health", headers={"X-Request-Id": "a b;<script>"}).headers["X-Request-Id"]
        client.post("/v1/ask", json={**WHEN, "model": "x\nINFO forged"})
        next_one = client.get("/health").headers["X-Request-Id"]
    with serve() as other:  # another process, or the same after a restart
        elsewhere = other.get("/health").headers["X-Request-Id"]
    processes, numbers = zip(*(each.split("-") for each in (made, next_one, elsewhere)), strict=True)
    assert processes[0] == processes[1] != processes[2]
    assert len(processes[0]) == 16  # 64 random bits
    assert int(numbers[1]) > int(numbers[0])
    lines = [record.getMessage() for record in caplog.records if record.name == "lamella.serve"]
    assert lines[0].startswith("id=abc-1.2_3 GET /health 200 ")
    assert len(lines) == 4
    assert not any("\n" in line for line in lines)


def test_other_origins_are_allowed_only_if_set(client: TestClient) -> None:
    asking = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    assert "Access-Control-Allow-Origin" not in client.options("/v1/ask", headers=asking).headers
    with serve(cors=("https://example.org",), keys=("key",)) as other:
        allowed = other.options("/v1/ask", headers=asking)
        assert allowed.headers["Access-Control-Allow-Origin"] == "https://example.org"
        refused = other.options("/v1/ask", headers={**asking, "Origin": "https://example.com"})
        assert "Access-Control-Allow-Origin" not in refused.headers
        assert "got another: origin; to allow" in error_of(refused, 403)
        unknown = other.options("/v1/ask", headers={**asking, "Access-Control-Request-Headers": "X-A"})
        assert "got another: headers" in error_of(unknown, 403)


def test_an_error_of_the_server_is_reported_without_details(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("a secret of the server")

    monkeypatch.setattr(AskOptions, "answer", fail)
    response = client.post("/v1/ask", json=WHEN)
    assert "secret" not in error_of(response, 500)
    assert "a secret of the server" in caplog.text
