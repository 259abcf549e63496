"""The server as a process: clients of all kinds, and how it starts and stops."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from forks import ForkServer
from lamella.inference.reader import Reader
from running_server import RunningServer, running_server

TITAN = "Huygens landed on Titan on 14 January 2005. It had been carried there by Cassini."
WHEN = "When did Huygens land on Titan?"
LONG = "Saturn has rings and many moons, of which Titan is the largest. " * 20 + TITAN


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server"), "--body-timeout", 1) as server:
        yield server


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader.load()


def post(address: str, value: Any) -> Any:
    body = json.dumps(value).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = response.read().splitlines()
    return [json.loads(line) for line in lines] if address.endswith("/batch") else json.loads(lines[0])


def connect(server: RunningServer) -> socket.socket:
    place = urlsplit(server.address)
    assert place.hostname
    assert place.port
    return socket.create_connection((place.hostname, place.port), timeout=30)


def test_clients_at_the_same_time_get_what_the_reader_answers(server: RunningServer, reader: Reader) -> None:
    questions = [WHEN, "What carried the probe?", "Who wrote Faust?", "What is the largest moon of Saturn?"]
    contexts = [TITAN, LONG[:1500], f"Titan is a moon. {TITAN}", "Johann Wolfgang von Goethe wrote Faust."]
    asks = [{"question": question, "context": context} for question in questions for context in contexts]
    with ThreadPoolExecutor(16) as pool:
        answered = list(pool.map(lambda ask: post(f"{server.address}/v1/ask", ask)["results"][0], asks))
    for ask, result in zip(asks, answered, strict=True):
        expected = reader.ask(ask["question"], ask["context"]).to_json()
        assert {key: result[key] for key in expected} == expected


def test_the_client_of_hugging_face_works_unchanged(
    server: RunningServer, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # it would refuse to ask this machine, too
    client = hub.InferenceClient(server.address)
    answer = client.question_answering(question=WHEN, context=TITAN)
    assert dict(answer) == reader(question=WHEN, context=TITAN)
    assert answer.answer == TITAN[answer.start : answer.end] == "14 January 2005"
    options: dict[str, Any] = {
        "top_k": 3, "doc_stride": 10, "max_answer_len": 5, "max_question_len": 20, "max_seq_len": 40,
        "handle_impossible_answer": True, "align_to_words": False,
    }  # fmt: skip
    answers = client.question_answering(question=WHEN, context=LONG[:400], **options)
    assert [dict(each) for each in answers] == reader(question=WHEN, context=LONG[:400], **options)
    named = hub.InferenceClient(base_url=f"{server.address}/models/default")
    assert named.question_answering(question=WHEN, context=TITAN) == answer
    unknown = hub.InferenceClient(f"{server.address}/models/nobody")
    with pytest.raises(hub.errors.HfHubHTTPError, match="404") as raised:
        unknown.question_answering(question=WHEN, context=TITAN)
    assert "this server has default" in raised.value.response.json()["error"]


def test_slow_clients_stall_nobody(server: RunningServer) -> None:
    head = b"POST /v1/ask HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    with_body = [connect(server) for _ in range(150)]  # more than the queue is long
    without_head = [connect(server) for _ in range(20)]
    try:
        for client in with_body:
            client.sendall(head + b"{")
        for client in without_head:
            client.sendall(b"POST /v1/ask HT")
        begin = time.monotonic()
        assert post(f"{server.address}/v1/ask", {"question": WHEN, "context": TITAN})["results"]
        assert time.monotonic() - begin < 1  # before any of them has timed out
        for client in with_body:
            reply = client.makefile("rb").read()  # until the server closes the connection
            assert reply.startswith(b"HTTP/1.1 408 ")
            assert b"1 second" in reply
        for client in without_head:
            assert client.makefile("rb").read() == b""
    finally:
        for client in with_body + without_head:
            client.close()


def test_sigterm_under_load_loses_no_accepted_request(tmp_path: Path, reader: Reader) -> None:
    with running_server(tmp_path, "--timeout", 100) as server, ThreadPoolExecutor(9) as pool:
        ask = {"question": WHEN, "context": LONG}
        asked = [pool.submit(post, f"{server.address}/v1/ask", ask) for _ in range(8)]
        streamed = pool.submit(post, f"{server.address}/v1/batch", {"requests": [ask] * 40})
        wait_until_accepted(server, 9)
        with connect(server) as late:  # a file that is still being sent
            head = b"POST /v1/text?name=a.txt HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8\r\n"
            late.sendall(head + b"Expect: 100-continue\r\n\r\n")
            assert late.recv(100).startswith(b"HTTP/1.1 100 ")  # the server has begun to read it
            late.sendall(b"half")
            server.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(ConnectionError):  # until it listens no longer
                while True:
                    connect(server).close()
            with contextlib.suppress(ConnectionError):  # the server may have refused it and closed the connection
                late.sendall(b"half")
            refused = b""
            with contextlib.suppress(ConnectionError):  # head and body may come one after the other
                while more := late.recv(10_000):
                    refused += more
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"shutting_down" in refused
        assert server.stop() == 0
        expected = reader.ask(WHEN, LONG).to_json()["answers"]
        assert [future.result()["results"][0]["answers"] for future in asked] == [expected] * 8
        lines = sorted(streamed.result(), key=lambda line: line["index"])
        assert [line["index"] for line in lines] == list(range(40))
        assert all(line["results"][0]["answers"] == expected for line in lines[:8])  # were begun
        assert {line["error"]["type"] for line in lines[30:]} == {"shutting_down"}
    log = server.log.read_text()
    assert log.count("POST /v1/ask 200") == 8
    assert "Traceback" not in log


def wait_until_accepted(server: RunningServer, requests: int) -> None:
    """Wait until this many questions and batches are being answered, or have been."""
    pattern = re.compile(r'^lamella_(?:accepted_requests|requests_total{route="/v1/\w+",status="200"}) ([\d.]+)$', re.M)
    for _ in range(600):
        with urllib.request.urlopen(f"{server.address}/metrics") as response:
            numbers = pattern.findall(response.read().decode())
        if sum(map(float, numbers)) >= requests:
            return
        time.sleep(0.02)
    pytest.fail(f"accepted: {numbers}")


def test_ctrl_c_ends_it_too(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        threading.Timer(0.2, server.process.send_signal, [2]).start()
        assert server.process.wait(20) == 0
    assert server.log.read_text() == ""


def test_further_signals_do_not_change_how_it_ends(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        while server.process.poll() is None:  # while it drains, closes its readers and leaves the interpreter
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.001)
        assert server.process.returncode == 0
    assert server.log.read_text() == ""


def test_a_port_in_use_is_one_line(forks: ForkServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, out, err = forks.run("serve", "--port", port)
    assert (code, out) == (1, "")
    assert err.startswith(
        f"lamella: serve --host 127.0.0.1 --port {port}: cannot listen there (Address already in use)"
    )
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-folder"], "no-such-folder"),
        (["default", "default"], "'default' twice"),
        (["--models", "no-such-folder"], "--models no-such-folder: cannot be read"),
        (["--host", "not a host"], "--host not a host"),
        (["--host", "192.0.2.1"], "choose another --host"),  # an address that no machine has
        (["--keys", "no-such-file"], "--keys no-such-file: cannot be read"),
        (["--keys", "/dev/null"], "expected at least one key"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_keeps_it_from_starting_is_one_line(forks: ForkServer, arguments: list[str], words: str) -> None:
    code, out, err = forks.run("serve", *arguments, "--port", 0)
    assert code in (1, 2)
    assert words in err
    assert (out, err.count("\n")) == ("", 1)


def test_a_server_that_others_can_reach_warns_unless_it_has_keys(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    warning = "warning: --host 0.0.0.0: without keys, everyone who reaches this machine may use the server; see --keys."
    with running_server(tmp_path_factory.mktemp("open"), "--host", "0.0.0.0") as server:
        assert warning in server.log.read_text()
    monkeypatch.setenv("LAMELLA_API_KEYS", "secret")
    with running_server(tmp_path_factory.mktemp("closed"), "--host", "0.0.0.0") as server:
        assert "warning" not in server.log.read_text()
