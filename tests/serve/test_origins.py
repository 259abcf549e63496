"""Requests that pages of other web sites send through the browser of a person who may ask."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from starlette.testclient import TestClient

from lamella.cli.serve_command import _origin
from lamella.errors import UsageError
from lamella.serve.http_server import names_of
from lamella.serve.settings import Settings
from lamella.serve.web_app import create_app
from running_server import running_server

SITE = "https://example.org"


def client_of(settings: Settings) -> Iterator[TestClient]:
    """A client of a server that has not loaded its reader: what is tested here comes before."""
    app = create_app(settings)
    yield TestClient(app, raise_server_exceptions=False)
    app.state.service.close()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    yield from client_of(Settings(folder=tmp_path_factory.mktemp("models"), cors=(SITE,)))


@pytest.fixture(scope="module")
def local() -> Iterator[TestClient]:
    """A server on this machine, without keys."""
    yield from client_of(Settings(hosts=names_of(Settings(hosts=("qa.example.org",)), "localhost", "127.0.0.1")))


def kind_of(response: Any) -> str:
    assert response.status_code == 403, response.text
    error = response.json()["error"]
    assert "\n" not in error["message"]
    kind: str = error["type"]
    return kind


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("https://evil.example", "127.0.0.1:8000"),
        ("http://127.0.0.1:3000", "127.0.0.1:8000"),  # another program of this machine
        ("http://127.0.0.1", "127.0.0.1:8000"),
        ("http://localhost:8000", "127.0.0.1:8000"),
        ("http://127.0.0.1:8000.evil.example", "127.0.0.1:8000"),
        ("null", "127.0.0.1:8000"),  # a page in a frame without rights, or a file
        ("", "127.0.0.1:8000"),
        ("http://[", "["),
        ("http://a:99999", "a:99999"),
        ("https://example.org.evil.example", "127.0.0.1:8000"),
    ],
)
def test_a_page_of_another_site_is_refused(client: TestClient, origin: str, host: str) -> None:
    headers = {"Origin": origin, "Host": host}
    for method, path in (("DELETE", "/v1/models/nobody"), ("POST", "/v1/models/nobody"), ("POST", "/v1/text")):
        assert kind_of(client.request(method, path, headers=headers)) == "forbidden_origin"
    refused = client.post("/", headers=headers)  # Hugging Face's form
    assert refused.status_code == 403
    assert "Origin" in refused.json()["error"]


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        (None, "127.0.0.1:8000"),  # curl, Python
        ("http://127.0.0.1:8000", "127.0.0.1:8000"),
        ("http://[::1]:8000", "[::1]:8000"),
        ("http://LOCALHOST", "localhost:80"),
        ("https://qa.example.org", "qa.example.org"),  # a proxy adds TLS
        ("https://qa.example.org", "qa.example.org:443"),
        ("https://qa.example.org:8443", "qa.example.org:8443"),
        (SITE, "127.0.0.1:8000"),  # --cors
    ],
)
def test_the_server_s_own_page_and_programs_may_ask(client: TestClient, origin: str | None, host: str) -> None:
    headers = {"Host": host} if origin is None else {"Origin": origin, "Host": host}
    assert client.delete("/v1/models/nobody", headers=headers).status_code == 404
    assert client.get("/health", headers=headers).status_code == 200


def test_a_local_server_answers_to_its_own_names(local: TestClient) -> None:
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "qa.example.org", "qa.example.org:443"):
        assert local.get("/health", headers={"Host": host}).status_code == 200
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "[", "x@"):
        same = {"Host": host, "Origin": f"http://{host}"}  # what DNS rebinding looks like
        assert kind_of(local.get("/health", headers=same)) == "forbidden_host"


def test_hosts_are_checked_where_everyone_is_trusted() -> None:
    own = ("localhost", "127.0.0.1", "::1")
    for host in own:
        assert names_of(Settings(), host, "127.0.0.1" if host == "localhost" else host) == own
    assert names_of(Settings(), "My-Laptop", "127.0.1.1") == (*own, "127.0.1.1", "my-laptop")
    assert names_of(Settings(keys=("key",)), "127.0.0.1", "127.0.0.1") is None
    assert names_of(Settings(), "0.0.0.0", "0.0.0.0") is None
    assert names_of(Settings(hosts=("QA.example.org",)), "0.0.0.0", "0.0.0.0") == (*own, "0.0.0.0", "qa.example.org")


def test_a_server_on_this_machine_refuses_foreign_requests(tmp_path: Path) -> None:
    def status(address: str, **headers: str) -> int:
        body = json.dumps({"question": "Who?", "context": "Ann."}).encode()
        request = urllib.request.Request(address, body, {"Content-Type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    with running_server(tmp_path, "--allow-host", "qa.example.org") as server:
        ask = f"{server.address}/v1/ask"
        assert status(ask) == status(ask, Origin=server.address) == status(ask, Host="qa.example.org") == 200
        assert status(ask, Host="evil.example") == status(ask, Origin="https://evil.example") == 403


@pytest.mark.parametrize(
    "value", ["https://example.org", "http://localhost:3000", "chrome-extension://abc", "*", "null"]
)
def test_an_origin_is_taken_as_browsers_send_it(value: str) -> None:
    assert _origin(value) == value
    assert _origin(f"{value}/") == value


def test_an_origin_is_written_as_browsers_write_it() -> None:
    assert _origin("https://Example.org:443/") == "https://example.org"
    assert _origin("http://LOCALHOST:80") == "http://localhost"
    assert _origin("http://localhost:443") == "http://localhost:443"


@pytest.mark.parametrize("value", ["example.org", "https://", "https://example.org/page", "https://a b", ""])
def test_what_no_browser_sends_is_refused_as_an_origin(value: str) -> None:
    with pytest.raises(UsageError, match=r"serve --cors .*: expected the scheme, the host and perhaps the port"):
        _origin(value)
