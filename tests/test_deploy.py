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


def test_the_dashboard_shows_figures_that_the_server_has() -> None:
    pytest.importorskip("prometheus_client")
    from lamella.serve.server_metrics import Metrics

    names = {
        sample.name
        for metric in with_labels(Metrics()).registry.collect()
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    shown = {name for query in queries for name in re.findall(r"lamella_\w+", query)}
    assert shown <= names
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in names}
    assert families == {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in shown}  # each figure is shown
    source = read_yaml(DEPLOY / "grafana" / "datasource.yaml")["datasources"][0]["uid"]
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {source}


def with_labels(metrics: Any) -> Any:
    """Count one of each, since figures with labels appear when they are first used."""
    metrics.requests.labels("/v1/ask", 200).inc()
    metrics.seconds.labels("/v1/ask").observe(1)
    metrics.answers.labels("default", "yes").inc()
    return metrics
