"""The example plugin, installed as a user installs it: trained by the command line, loaded again, and checked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from doubles import save_tiny_encoder
from forks import ForkServer

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "examples" / "plugin"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plugin installed in it, from a copy of its sources: building writes beside them."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(PLUGIN, folder / "source")
    offline = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation"]
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", folder / "site", folder / "source"]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return folder / "site"


def python_path(*folders: Path) -> str:
    return os.pathsep.join(map(str, (*folders, ROOT / "src")))


def run(site: Path, *command: object) -> subprocess.CompletedProcess[str]:
    """Run Python with the plugin installed."""
    environment = {**os.environ, "PYTHONPATH": python_path(site), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment, cwd=site)


def run_lamella(forks: ForkServer, site: Path, *arguments: object) -> str:
    """Run a command with the plugin installed, and return its output."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path(site))
        code, out, err = forks.run(*arguments)
    assert code == 0, err
    assert all("the mixer gated has no graph builder" in line for line in err.splitlines())
    return out


@pytest.fixture(scope="module")
def trained(site: Path, forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the plugin's own run file, a step long and on a tiny encoder."""
    folder = tmp_path_factory.mktemp("run")
    encoder = save_tiny_encoder(folder / "encoder")
    changes = [
        f"encoder.name={encoder}",
        "training.max_steps=1",
        "data.max_train_samples=8",
        "data.max_eval_samples=4",
        "windows.max_seq_length=128",
        "windows.doc_stride=16",
    ]
    settings = [word for change in changes for word in ("--set", change)]
    run_lamella(forks, site, "train", PLUGIN / "run.toml", "--out", folder / "gated", *settings)
    return folder / "gated"


def test_its_mixer_is_listed_like_ours_and_help_does_not_load_it(site: Path, forks: ForkServer) -> None:
    listing = run_lamella(forks, site, "parts", "mixer")
    assert "gated                  A learned gate over the layers of each token" in listing
    assert "temperature: float (> 0) = 1.0" in listing
    ended = run(site, "-X", "importtime", "-m", "lamella", "--help")
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in ended.stderr.splitlines() if "|" in line}
    assert "typer" in loaded
    assert not loaded & {"torch", "lamella_gated"}


def test_a_run_is_trained_with_it_and_its_reader_is_asked_and_analysed(
    site: Path, trained: Path, forks: ForkServer, tmp_path: Path
) -> None:
    assert json.loads((trained / "config.json").read_text())["learner"]["mixer"] == [
        {"name": "gated", "temperature": 2.0}
    ]
    assert json.loads((trained / "model" / "config.json").read_text())["plugins"] == ["lamella_gated.mixers"]
    asked = run_lamella(forks, site, "ask", "What is it?", "--text", "It is a bee.", "--model", trained, "--json")
    assert json.loads(asked)["answers"]
    run_lamella(forks, site, "analyse", trained, "--out", tmp_path / "analysis")
    (analysed,) = json.loads((tmp_path / "analysis" / "analysis.json").read_text())["runs"]
    assert analysed["layer_attention"]["mixer"] == "gated"
    for weights in analysed["layer_attention"]["weights"]["start"].values():
        assert sum(weights) == pytest.approx(1, abs=1e-3)


def test_without_the_plugin_its_reader_names_what_is_missing(trained: Path, lamella: Any) -> None:
    code, _, err = lamella("ask", "What?", "--text", "It is a bee.", "--model", trained)
    assert code == 1
    assert err == (
        f"lamella: {trained / 'model' / 'config.json'}: needs the mixer 'gated', which is not installed here; install "
        "the package that holds lamella_gated.mixers.\n"
    )


def test_its_own_test_passes(site: Path) -> None:
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, PLUGIN / "tests"]
    ended = run(site, *command)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 passed" in ended.stdout
