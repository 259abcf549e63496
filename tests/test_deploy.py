"""The files in deploy/: what they name exists, and the dashboard shows figures that the server has."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lamella.cli import app
from tiny_reader import save_tiny_bert, save_tiny_reader

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILES = ("Dockerfile", "Dockerfile.gpu")


def instructions(name: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, each on one line."""
    lines = [line for line in (DEPLOY / name).read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def read_yaml(path: Path) -> Any:
    return pytest.importorskip("yaml").safe_load(path.read_text())


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_an_image_copies_exists_and_is_sent_to_the_builder(name: str) -> None:
    copied = [words.split()[:-1] for kind, words in instructions(name) if kind == "COPY" and "--from" not in words]
    sources = {source for line in copied for source in line}
    assert {"src", "constraints.txt"} <= sources
    assert all((ROOT / source).exists() for source in sources)
    sent = {line[1:] for line in (DEPLOY / f"{name}.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sent == sources
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"]} <= sources  # without them no wheel can be built


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_installs_extras_that_exist_and_runs_without_privileges(name: str) -> None:
    text = (DEPLOY / name).read_text()
    extras = set(re.findall(r'"\.\[([\w,]+)\]"', text)[0].split(","))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"serve", "bundled"} <= extras <= set(project["optional-dependencies"])
    assert ("train" in extras) == name.endswith("gpu")
    kinds = [kind for kind, _ in instructions(name)]
    assert kinds.index("USER") < kinds.index("ENTRYPOINT")
    assert "HEALTHCHECK" in kinds


def test_every_command_has_options_that_the_server_has() -> None:
    commands = [json.loads(words) for name in DOCKERFILES for kind, words in instructions(name) if kind == "ENTRYPOINT"]
    commands.append(["lamella", "serve", *read_yaml(DEPLOY / "compose.yaml")["services"]["server"]["command"]])
    commands.append(shlex.split(re.findall(r"ExecStart=(.+)", (DEPLOY / "lamella.service").read_text())[0]))
    for command in commands:
        assert Path(command[0]).name == "lamella"
        assert command[1] == "serve"
        outcome = CliRunner().invoke(app, [*command[1:], "--help"])
        assert outcome.exit_code == 0
        options = {word for word in command if word.startswith("--")}
        assert options <= set(re.findall(r"--[\w-]+", outcome.output)), command


def test_the_services_of_compose_mount_files_that_exist() -> None:
    compose = read_yaml(DEPLOY / "compose.yaml")
    mounts = [mount.split(":")[0] for service in compose["services"].values() for mount in service.get("volumes", [])]
    files = [mount for mount in mounts if mount.startswith(".")]
    assert files
    assert all((DEPLOY / mount).is_file() for mount in files)
    assert {mount for mount in mounts if not mount.startswith(".")} == set(compose["volumes"])
    assert (DEPLOY / compose["services"]["server"]["build"]["dockerfile"]).name == "Dockerfile"
    (target,) = read_yaml(DEPLOY / "prometheus" / "prometheus.yml")["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target.split(":")[0] in compose["services"]
    assert all(port.startswith("127.0.0.1:") for each in compose["services"].values() for port in each.get("ports", []))


def test_every_query_of_the_dashboard_finds_figures_of_a_server(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    from prometheus_client.parser import text_string_to_metric_families
    from starlette.testclient import TestClient

    from lamella.serve.settings import Settings
    from lamella.serve.web_app import create_app

    ask = {"question": "Who met Ann?", "context": "Ann met Bob."}
    model = save_tiny_reader(tmp_path / "tiny", save_tiny_bert(tmp_path / "encoder"))
    with TestClient(create_app(Settings(models=(str(model),)))) as client:
        assert client.post("/v1/ask", json=ask).status_code == 200
        assert client.post("/v1/batch", json={"requests": [ask, ask]}).status_code == 200
        assert client.post("/", json={"inputs": ask}).status_code == 200
        families = list(text_string_to_metric_families(client.get("/metrics").text))
    samples = [sample for family in families for sample in family.samples if not sample.name.endswith("_created")]
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    shown = set()
    for query in queries:
        for name, labels, default in re.findall(r"(lamella_\w+)(?:{(.*?)})?(?:\[\S+\])?\)* ?(or vector\(0\))?", query):
            wanted = re.findall(r'(\w+)(=~?)"(.*?)"', labels)
            found = [
                sample
                for sample in samples
                if sample.name == name and all(re.fullmatch(value, sample.labels[key]) for key, _, value in wanted)
            ]
            assert found or default, f"{query}: no data for {name} with {labels}"
            shown.add(family_of(name))
    assert shown == {family_of(sample.name) for sample in samples}  # each figure is shown
    values = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    assert values["lamella_queue_seconds_count",] == 4  # every question, whichever way it came
    assert sum(value for key, value in values.items() if key[0] == "lamella_answers_total") == 4
    source = read_yaml(DEPLOY / "grafana" / "datasource.yaml")["datasources"][0]["uid"]
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {source}


def family_of(name: str) -> str:
    return re.sub(r"_(total|bucket|sum|count)$", "", name)
