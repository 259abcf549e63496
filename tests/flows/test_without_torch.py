"""Commands that run no model: they import neither torch nor transformers, and work where these are not installed.

The answers of a reader without torch are tested by `make smoke`, and by the tests that `make test-light` runs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lamella.cli import app, with_one_command
from lamella.cli.app import COMMANDS
from lamella.data.dataset import load_examples
from made_runs import make_run
from samples import HAS_TORCH

HEAVY = ("torch", "transformers", "accelerate", "onnx", "onnxscript", "ray", "wandb", "tensorboard")
LEAST_TESTS = 1700  # that `make test-light` runs; their number grows

# As if the libraries were not installed; a command that asks for one of them is reported, even if it goes on without.
SCRIPT = f"""
import sys
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
def find_light(name, *rest):
    if name in {HEAVY}:
        sys.stderr.write(f"IMPORTED {{name}}\\n")
        return None
    return find_spec(name, *rest)
PathFinder.find_spec = find_light
"""
COMMAND_LINE = "from lamella.__main__ import main\nmain()"


def run_light(*arguments: str | Path, script: str = COMMAND_LINE) -> str:
    """Run a command or script without the heavy libraries, and return what it prints."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr[-2000:]
    return ended.stdout


def test_the_front_door() -> None:
    script = """
import lamella
from lamella import LamellaError, Reader, RunConfig, load_examples
print(len(load_examples("demo:dev").examples), RunConfig().training.epochs)
"""
    assert run_light(script=script) == "135 2.0\n"


def test_only_the_command_that_is_called_is_built() -> None:
    for name in COMMANDS:
        assert [info.callback.__name__ for info in with_one_command(name).registered_commands if info.callback] == [
            name
        ]
    assert with_one_command("aks") is with_one_command("") is app
    assert len(app.registered_commands) == len(COMMANDS)


def test_every_help_page() -> None:
    """In one process: `main` is called for each page."""
    script = """
from lamella.cli import app
for command in ([], *([name] for name in sys.argv[1:])):
    try:
        app(args=[*command, "--help"], prog_name="lamella")
    except SystemExit as ended:
        assert not ended.code
"""
    pages = run_light(*COMMANDS, script=script)
    assert re.findall(r"^Usage: lamella (\w+) ", pages, re.MULTILINE) == list(COMMANDS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs with predictions, and nothing of their models."""
    folder = tmp_path_factory.mktemp("runs")
    for mixer in ("last", "dot"):
        make_run(folder / mixer, mixer=mixer)
    return folder


@pytest.fixture(scope="module")
def predictions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("predictions") / "predictions.json"
    examples = load_examples("demo:dev").examples
    path.write_text(json.dumps({e.id: e.answers[0].text if e.answers else "" for e in examples}), encoding="utf-8")
    return path


Commands = dict[str, Callable[[Path, Path, Path], list[str | Path]]]
EACH: Commands = {
    "check": lambda runs, predictions, out: ["demo:dev"],
    "convert": lambda runs, predictions, out: ["demo:dev", out / "dev.jsonl"],
    "evaluate": lambda runs, predictions, out: ["demo:dev", predictions],
    "compare": lambda runs, predictions, out: [runs],
    "recommend": lambda runs, predictions, out: [runs],
    "report": lambda runs, predictions, out: [runs, "--out", out / "report.html"],
}


@pytest.mark.parametrize("command", EACH)
def test_a_command_that_runs_no_model(command: str, runs: Path, predictions: Path, tmp_path: Path) -> None:
    assert run_light(command, *EACH[command](runs, predictions, tmp_path))


def test_most_of_the_suite_runs_without_torch(request: pytest.FixtureRequest) -> None:
    if HAS_TORCH or request.config.args != request.config.getini("testpaths"):
        pytest.skip("counts the tests of `make test-light`")
    assert request.session.testscollected >= LEAST_TESTS
