"""The server's log: no key, no question and no text, whatever a client sends and whatever becomes of it."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from lamella.serve.keys import KEYS
from running_server import RunningServer, running_server
from tiny_reader import save_tiny_bert, save_tiny_reader

RIGHT, WRONG = "right-key-5f1c", "wrong-key-77ab"
QUESTION, TEXT, ANSWER = "Who hid the zyzzogeton?", "Quagmire hid the zyzzogeton in Vlaardingen.", "Vlaardingen"
ASK = {"question": QUESTION, "context": TEXT}
PRIVATE = (RIGHT, WRONG, "zyzzogeton", "Quagmire", ANSWER)
BEARER = {"right": f"Bearer {RIGHT}", "wrong": f"Bearer {WRONG}", "none": None, "another scheme": f"Basic {RIGHT}"}


@pytest.fixture(scope="module", params=["a file", "the environment"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "models").mkdir()
    save_tiny_reader(folder / "tiny", save_tiny_bert(folder / "encoder"))
    (folder / "keys.txt").write_text(f"{RIGHT}\nanother\n")
    given = ["--keys", folder / "keys.txt"] if request.param == "a file" else []
    environment = {} if given else {KEYS: RIGHT}
    with running_server(
        folder, folder / "tiny", "--models", folder / "models", "--max-characters", 9000, *given, **environment
    ) as server:
        yield server


def send(server: RunningServer, path: str, value: Any, authorization: str | None, **headers: str) -> tuple[int, str]:
    """Send a request; bytes are sent as they are, None as a GET. Return the status and the response."""
    body = value if isinstance(value, bytes | None) else json.dumps(value).encode()
    given = {"Content-Type": "application/json", **({"Authorization": authorization} if authorization else {})}
    request = urllib.request.Request(server.address + path, body, {**given, **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def requests(key: str) -> Iterator[tuple[str, Any]]:
    """Yield paths and bodies, sound and broken ones; each has the question, a text or a key somewhere."""
    end = len(TEXT) - 1
    yield "/v1/ask", ASK
    yield f"/v1/ask?key={key}&question={quote(QUESTION)}", ASK
    yield "/v1/batch", {"requests": [ASK, {**ASK, "top_k": QUESTION}]}
    yield "/models/tiny", {"inputs": ASK}
    yield "/models/tiny", {"inputs": QUESTION}
    yield "/v1/corrections", {**ASK, "start": end - len(ANSWER), "end": end}
    yield "/v1/corrections", {**ASK, "start": 5, "end": 10_000}
    yield f"/v1/text?name=a.txt&key={key}", TEXT.encode()
    yield f"/v1/text?name={quote(QUESTION)}.pdf", TEXT.encode()
    yield "/v1/ask", {**ASK, "model": QUESTION}
    yield "/v1/ask", {**ASK, "top_k": TEXT}
    yield "/v1/ask", {QUESTION: TEXT, "key": key}
    yield "/v1/ask", json.dumps(ASK).encode()[:-1]
    yield "/v1/ask", {"question": QUESTION * 500, "context": TEXT}
    yield "/v1/ask", {"question": QUESTION, "context": TEXT * 300}
    yield f"/info?key={key}", None
    yield f"/metrics?key={key}", None
    yield "/v1/corrections", None


@pytest.mark.parametrize("given", BEARER)
def test_keys_questions_and_texts_are_not_logged(server: RunningServer, given: str) -> None:
    statuses: list[int] = []
    before = len(server.log.read_text().splitlines())
    key = RIGHT if given == "none" else WRONG
    for path, value in requests(key):
        status, text = send(server, path, value, BEARER[given], Cookie=f"key={key}", Referer=f"http://a/?key={key}")
        statuses.append(status)
        assert key not in text
        if path.startswith("/metrics"):
            assert not [word for word in PRIVATE if word in text]
    assert set(statuses) == ({200, 201, 400, 404, 413, 422} if given == "right" else {401})
    for _ in range(100):  # a line is written after the response was sent
        lines = server.log.read_text().splitlines()[before:]
        if len(lines) >= len(statuses):
            break
        time.sleep(0.05)
    assert not [line for line in lines for word in PRIVATE if word.lower() in line.lower()]
    assert sorted(int(line.split()[6]) for line in lines) == sorted(statuses)


def test_requests_that_are_no_http_are_not_logged_either(server: RunningServer) -> None:
    place = urlsplit(server.address)
    heads = f"{QUESTION} {TEXT}\r\n\r\n", f"GET /?key={RIGHT} HTTP/9.9\r\n\r\n", f"GET / HTTP/1.1\r\n{RIGHT}\r\n\r\n"
    for head in heads:
        with socket.create_connection((str(place.hostname), int(place.port or 0)), timeout=30) as client:
            client.sendall(head.encode())
            client.recv(10_000)
    log = server.log.read_text()
    assert not [word for word in PRIVATE if word.lower() in log.lower()]
