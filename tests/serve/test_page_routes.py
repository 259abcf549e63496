"""The routes behind the page: its files and their policy, texts of files, corrections, adaptations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from starlette.testclient import TestClient

import lamella.serve
from lamella.serve.settings import Settings
from lamella.serve.texts import MOST_BYTES
from lamella.serve.web_app import create_app
from samples import needs_torch
from tiny_reader import save_tiny_bert, save_tiny_reader

PAGE = Path(lamella.serve.__file__).parent / "page"
CORRECTION = {"question": "Who?", "context": "😀 Huygens found it.", "start": 2, "end": 9}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return save_tiny_reader(folder / "tiny", save_tiny_bert(folder / "encoder"))


@pytest.fixture(scope="module")
def client(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    settings = Settings(models=(str(tiny),), folder=tmp_path_factory.mktemp("models"))
    with TestClient(create_app(settings), raise_server_exceptions=False) as client:
        yield client


def error_of(response: Any, status: int) -> str:
    assert response.status_code == status, response.text
    message: str = response.json()["error"]["message"]
    assert "\n" not in message
    return message


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_may_reach_nothing_but_its_server(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert client.head(path).headers["content-type"] == response.headers["content-type"]
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    for file in PAGE.iterdir():
        addresses = re.findall(r"(?:https?:)?//[a-z]+\.[^\s\"'`]*", file.read_text("utf-8"))
        assert [address for address in addresses if "www.w3.org" not in address] == [], file.name


def test_every_file_that_the_page_names_is_served(client: TestClient) -> None:
    pages = "".join(page.read_text("utf-8") for page in PAGE.glob("*.html"))
    named = set(re.findall(r'(?:href|src)="(page/[^"]+)"', pages))
    for module in PAGE.glob("*.js"):
        named |= {f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', module.read_text("utf-8"))}
    assert named == {f"page/{file.name}" for file in PAGE.iterdir() if file.suffix != ".html"}
    for name in named:
        assert client.get(name).content == (PAGE / name.removeprefix("page/")).read_bytes()
    tag = client.get("/page/app.js").headers["etag"]
    assert client.get("/page/app.js", headers={"If-None-Match": tag}).status_code == 304
    for path in ("/page/settings.py", "/page/..%2fsettings.py", "/page/%2e%2e/settings.py", "/page/nothing.js"):
        assert client.get(path).status_code == 404


def test_the_text_of_a_file_is_returned(client: TestClient) -> None:
    html = client.post("/v1/text?name=a.html", content=b"<p>Titan</p>")
    assert html.json() == {"text": "Titan", "kind": "html"}
    plain = client.post("/v1/text", content="Größe".encode(), headers={"Content-Type": "text/plain"})
    assert plain.json() == {"text": "Größe", "kind": "txt"}
    assert "got '.exe'" in error_of(client.post("/v1/text?name=a.exe", content=b"x"), 415)
    assert "an empty file" in error_of(client.post("/v1/text?name=a.txt", content=b""), 422)
    long = client.post("/v1/text?name=a.txt", content=b"x" * (MOST_BYTES + 1))
    assert "expected at most" in error_of(long, 413)
    for name in ("/etc/passwd", "../../etc/passwd.txt", "file:///etc/passwd"):  # a name is only a name
        response = client.post("/v1/text", params={"name": name}, content=b"content")
        assert "root:" not in response.text


def test_a_file_that_is_too_large_is_named(client: TestClient) -> None:
    message = error_of(client.post("/v1/text?name=report.pdf", content=b"a" * 21_000_000), 413)
    assert message == (
        "'report.pdf': expected at most 20,971,520 bytes, got 21,000,000; open a part of it, or paste its text."
    )
    assert error_of(client.post("/v1/text", content=b"a" * 21_000_000), 413).startswith("file: expected at most ")


def test_corrections_are_added_listed_downloaded_and_removed(client: TestClient) -> None:
    added = client.post("/v1/corrections", json=CORRECTION)
    assert added.status_code == 201
    assert added.json()["answer"] == "Huygens"
    listed = client.get("/v1/corrections").json()
    assert [row["question"] for row in listed["corrections"]] == ["Who?"]
    assert (listed["least"], listed["adaptation"]) == (20, None)
    squad = client.get("/v1/corrections/squad.json")
    assert "attachment" in squad.headers["content-disposition"]
    assert json.loads(squad.content)["data"][0]["paragraphs"][0]["qas"][0]["answers"] == [
        {"text": "Huygens", "answer_start": 2}
    ]
    assert client.delete(f"/v1/corrections/{added.json()['id']}").status_code == 200
    assert "expected the id of a correction" in error_of(client.delete(f"/v1/corrections/{added.json()['id']}"), 404)


@pytest.mark.parametrize(
    "change",
    [{"end": None}, {"no_answer": True}, {"start": None, "end": None}, {"end": 99}, {"question": ""}, {"path": "/x"}],
    ids=str,
)
def test_a_correction_that_says_two_things_or_nothing_is_refused(client: TestClient, change: dict[str, Any]) -> None:
    assert error_of(client.post("/v1/corrections", json={**CORRECTION, **change}), 422)
    assert client.get("/v1/corrections").json()["corrections"] == []


@needs_torch
def test_an_adaptation_needs_corrections_and_a_known_id(client: TestClient) -> None:
    message = error_of(client.post("/v1/adaptations", json={"model": "nobody"}), 404)
    assert "nobody" in message
    assert "at least 20 corrections, got 0" in error_of(client.post("/v1/adaptations", json={}), 409)
    for method, path in (("GET", ""), ("POST", "/discard"), ("POST", "/keep")):
        body = {"name": "mine"} if path == "/keep" else None
        response = client.request(method, f"/v1/adaptations/..%2f{path}", json=body)
        assert response.status_code == 404


def test_without_a_folder_nothing_can_be_written(tiny: Path) -> None:
    with TestClient(create_app(Settings(models=(str(tiny),)))) as client:
        assert client.get("/info").json()["manages_models"] is False
        for method, path in (("GET", "corrections"), ("POST", "corrections"), ("POST", "adaptations")):
            assert client.request(method, f"/v1/{path}").status_code == 404
        assert client.post("/v1/text?name=a.txt", content=b"x").status_code == 200


def test_with_keys_only_the_page_itself_is_open(tiny: Path, tmp_path: Path) -> None:
    settings = Settings(models=(str(tiny),), folder=tmp_path, keys=("secret",))
    with TestClient(create_app(settings)) as client:
        assert client.get("/").status_code == client.get("/page/app.js").status_code == 200
        for path in ("corrections", "adaptations", "text"):
            assert client.post(f"/v1/{path}").status_code == 401
        assert client.get("/v1/corrections", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_a_damaged_file_of_corrections_is_reported_without_its_folder(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "corrections.json").write_text("{")
    settings = Settings(models=(str(tiny),), folder=tmp_path)
    with TestClient(create_app(settings), raise_server_exceptions=False) as client:
        response = client.get("/v1/corrections")
        message = error_of(response, 503)
        assert str(tmp_path) not in message
        assert response.headers["X-Request-Id"] in message
