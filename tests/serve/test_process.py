"""The server as a process: it answers, it stops, and it reports what keeps it from starting."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from lamella.inference.reader import Reader
from running_server import running_server

TITAN = "Huygens landed on Titan on 14 January 2005. It had been carried there by Cassini."


def post(address: str, value: Any) -> Any:
    body = json.dumps(value).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def test_a_server_answers_as_the_reader_does_and_stops_when_asked(tmp_path: Path) -> None:
    question = "When did Huygens land on Titan?"
    expected = Reader.load().ask(question, TITAN, top_k=3).to_json()
    with running_server(tmp_path) as server:
        answered = post(f"{server.address}/v1/ask", {"question": question, "context": TITAN, "top_k": 3})
        assert server.stop() == 0
    (result,) = answered["results"]
    assert {key: result[key] for key in expected} == expected
    assert "POST /v1/ask 200" in server.log.read_text()
