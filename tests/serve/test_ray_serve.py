"""The server on a real local Ray: two replicas answer as the Reader does, also while one of them is killed."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lamella import Reader
from lamella.errors import UsageError
from tiny_reader import save_tiny_bert, save_tiny_reader

ray = pytest.importorskip("ray")
pytest.importorskip("fastapi")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray: files that it does not close, options that it deprecates

TEXT = "The harbour was built in 1871. The tower was designed by Ada Park and stands on a rock."
PATIENCE = 300  # seconds for a replica to start or to end, also beside other work
QUESTIONS = ["Who designed the tower?", "When was the harbour built?", "On what does it stand?"]


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray-readers")
    encoder = save_tiny_bert(folder / "encoder")
    for seed, name in enumerate(("main", "more/first", "more/second")):
        save_tiny_reader(folder / name, encoder, seed=seed)
    return folder


@pytest.fixture(scope="module")
def address(readers: Path) -> Iterator[str]:
    """Start a cluster with two replicas."""
    from ray import serve

    from lamella.serve.ray import app
    from lamella.sweep.ray_cluster import cluster

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with cluster(num_cpus=2, object_store_memory=80 * 2**20):
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        sizes = {
            "min_replicas": 2,
            "max_replicas": 2,
            "cpus": 0.5,
            "precision": "fp32",
        }  # as the Reader of this process
        serve.run(app({"models": [str(readers / "main")], "folder": str(readers / "more"), **sizes}))
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()


def send(address: str, path: str, body: Any = None, reader: str | None = None) -> Any:
    headers = {"Content-Type": "application/json"} | ({"serve_multiplexed_model_id": reader} if reader else {})
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(address + path, data, headers), timeout=60) as response:
        return json.load(response)


def ask(address: str, question: str, reader: str) -> dict[str, Any]:
    answered = send(address, "/v1/ask", {"question": question, "context": TEXT, "model": reader}, reader)
    (result,) = answered["results"]
    return dict(result)


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "took too long"
        time.sleep(0.2)


def replicas() -> set[str]:
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {actor["name"] for actor in actors if "lamella" in actor["name"]}


@pytest.mark.slow
def test_readers_stay_on_the_replica_that_has_them(address: str, readers: Path) -> None:
    assert {send(address, "/info")["loaded"] for _ in range(20)} == {1}
    expected = Reader.load(readers / "more" / "first").ask(QUESTIONS[0], TEXT).to_json()
    assert ask(address, QUESTIONS[0], "first").items() >= expected.items()
    time.sleep(2)  # Ray announces which replica has it
    for _ in range(30):
        ask(address, QUESTIONS[0], "first")
    assert {send(address, "/info")["loaded"] for _ in range(50)} == {1, 2}


@pytest.mark.slow
def test_an_unknown_reader_is_refused_and_nothing_is_managed(address: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(address, QUESTIONS[0], "../first")
    assert refused.value.code == 404
    assert "first, main, second" in json.load(refused.value)["error"]["message"]
    assert send(address, "/info")["manages_models"] is False
    with pytest.raises(urllib.error.HTTPError) as refused:
        send(address, "/v1/models/first", {})
    assert refused.value.code in (404, 405)


@pytest.mark.slow
def test_no_request_is_lost_when_a_replica_is_killed(address: str, readers: Path) -> None:
    names = ("main", "first", "second")
    folders = {"main": readers / "main", "first": readers / "more" / "first", "second": readers / "more" / "second"}
    expected = {
        (name, question): Reader.load(folders[name]).ask(question, TEXT).to_json()
        for name in names
        for question in QUESTIONS
    }
    before, ended = replicas(), threading.Event()
    answered: list[tuple[str, str, dict[str, Any]]] = []
    retried: list[str] = []
    lost: list[str] = []

    def client(number: int) -> None:
        turn = number
        while not ended.is_set():
            name, question = names[turn % 3], QUESTIONS[turn // 3 % 3]
            turn += 1
            for attempt in range(2):
                try:
                    answered.append((name, question, ask(address, question, name)))
                    break
                except OSError as error:  # also a status that is no success
                    (lost if attempt else retried).append(repr(error))

    clients = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in clients:
        thread.start()
    try:
        wait_for(lambda: len(answered) > 30)
        killed = sorted(before)[0]
        ray.kill(ray.get_actor(killed, namespace="serve"))
        at_the_kill = len(answered)
        wait_for(lambda: len(replicas() - {killed}) == 2)
        wait_for(lambda: len(answered) > at_the_kill + 60)
    finally:
        ended.set()
        for thread in clients:
            thread.join()
    assert lost == []
    assert len(retried) <= len(clients)  # what the killed replica was working on
    for name, question, result in answered:
        assert result.items() >= expected[name, question].items()


@pytest.mark.slow
def test_a_batch_ends_when_its_replica_is_asked_to_stop(address: str) -> None:
    """The last test with the two replicas: it deletes the deployment."""
    from ray import serve

    text, lines = TEXT * 200, []
    body = {"requests": [{"question": f"{QUESTIONS[0]} {number}", "context": text} for number in range(200)]}
    request = urllib.request.Request(
        f"{address}/v1/batch", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        lines.append(json.loads(response.readline()))
        stopping = threading.Thread(target=serve.delete, args=("default",))
        stopping.start()
        lines += map(json.loads, response)
    stopping.join()
    assert sorted(line["index"] for line in lines) == list(range(200))
    kinds = {line["error"]["type"] for line in lines if "error" in line}
    assert kinds == {"shutting_down"}
    assert "results" in lines[0]


@pytest.mark.slow
def test_replicas_are_added_under_load_and_removed_after_it(address: str, readers: Path) -> None:
    """Deploy anew on the cluster, with the limits of the options, but without the minutes that Ray waits."""
    from ray import serve

    from lamella.serve.ray import app

    sizes = {"min_replicas": 1, "max_replicas": 2, "cpus": 0.5, "precision": "fp32"}
    deployment = app({"models": [str(readers / "main")], "busy": 1, **sizes})._bound_deployment
    scaling = dict(deployment._deployment_config.autoscaling_config)
    assert (scaling["min_replicas"], scaling["max_replicas"], scaling["target_ongoing_requests"]) == (1, 2, 1.0)
    fast = {"upscale_delay_s": 1, "downscale_delay_s": 2, "metrics_interval_s": 0.5, "look_back_period_s": 1}
    serve.run(deployment.options(autoscaling_config=scaling | fast).bind())
    expected = Reader.load(readers / "main").ask(QUESTIONS[0], TEXT).to_json()
    body = json.dumps({"question": QUESTIONS[0], "context": TEXT}).encode()
    request = urllib.request.Request(f"{address}/v1/ask", body, {"Content-Type": "application/json"})
    ended = threading.Event()
    answered: list[None] = []
    lost: list[str] = []

    def running() -> int:
        deployments = serve.status().applications["default"].deployments
        return int(deployments["lamella"].replica_states.get("RUNNING", 0))

    def client() -> None:
        while not ended.is_set():
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    (result,) = json.load(response)["results"]
                    assert result.items() >= expected.items()
                    answered.append(None)
            except (OSError, AssertionError) as error:  # also a status that is no success
                lost.append(repr(error))

    wait_for(lambda: running() == 1 == len(replicas()), PATIENCE)
    clients = [threading.Thread(target=client) for _ in range(6)]
    for thread in clients:
        thread.start()
    try:
        wait_for(lambda: running() == 2, PATIENCE)
        before = len(answered)
        wait_for(lambda: len(answered) > before + 100, PATIENCE)
        assert running() == 2
    finally:
        ended.set()
        for thread in clients:
            thread.join()
    wait_for(lambda: running() == 1 == len(replicas()), PATIENCE)
    assert ask(address, QUESTIONS[0], "main").items() >= expected.items()
    assert lost == []


def test_a_replica_that_is_asked_to_stop_reports_it_and_answers_what_still_comes(
    readers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from starlette.testclient import TestClient

    from lamella.serve import ray as ray_app
    from lamella.serve.web_app import create_app

    stop = threading.Event()
    monkeypatch.setattr(ray_app, "asked_to_stop", stop.is_set)
    replica = create_app(ray_app.RayOptions(models=str(readers / "main")).settings())
    ray_app.announce_stop(replica, replica.state.service)
    ask = {"question": QUESTIONS[0], "context": TEXT}
    with TestClient(replica) as client:
        assert client.get("/ready").status_code == 200
        assert client.post("/v1/batch", json={"requests": [ask]}).status_code == 200
        stop.set()
        wait_for(lambda: client.get("/ready").status_code == 503)
        assert client.get("/ready").json() == {"status": "shutting down"}
        assert client.post("/v1/ask", json=ask).status_code == 200
        late = client.post("/v1/batch", json={"requests": [ask]})
        assert (late.status_code, late.json()["error"]["type"]) == (503, "shutting_down")


def test_unknown_options_are_explained() -> None:
    from lamella.serve.ray import app

    with pytest.raises(UsageError, match=r"app\.replica: no such option"):
        app({"replica": 3})
    with pytest.raises(UsageError, match=r"min_replicas: expected .* got 'two'"):
        app({"min_replicas": "two"})


def test_replicas_answer_and_manage_nothing(readers: Path) -> None:
    from lamella.serve.ray import RayOptions
    from lamella.serve.web_app import create_app

    options = RayOptions(models=f"{readers / 'main'},", folder=readers / "more", cpus=2, memory=3)
    settings = options.settings()
    assert (settings.models, settings.threads, settings.memory) == ((str(readers / "main"),), 2, 3 << 20)
    paths = create_app(settings).openapi()["paths"]
    assert {"/v1/ask", "/v1/models"} <= set(paths)
    assert not [path for path in paths if "corrections" in path or path == "/v1/models/{name}"]
    managed = create_app(replace(settings, manages=True)).openapi()["paths"]
    assert "/v1/models/{name}" in managed


def test_a_replica_that_was_stopped_refuses_late_requests(readers: Path) -> None:
    """Ray waits for the requests that a replica has, and then ends the lifespan of its app."""
    from starlette.testclient import TestClient

    from lamella.serve.ray import RayOptions, app
    from lamella.serve.web_app import create_app

    settings = RayOptions(models=str(readers / "main"), timeout=50.0).settings()
    replica = create_app(settings)
    with TestClient(replica) as client:
        assert client.post("/v1/ask", json={"question": QUESTIONS[0], "context": TEXT}).status_code == 200
    for path, body in (("/v1/ask", b'{"question":"a","context":"b"}'), ("/v1/text?name=a.txt", b"text")):
        late = TestClient(replica).post(path, content=body, headers={"Content-Type": "application/json"})
        assert (late.status_code, late.json()["error"]["type"]) == (503, "shutting_down")
    config = app({"models": str(readers / "main"), "timeout": 50.0})._bound_deployment._deployment_config
    assert config.graceful_shutdown_timeout_s > 50 + settings.body_timeout
