"""The wheel and the sdist: what they hold, how large they are, and what the wheel requires."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "lamella"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


def test_the_wheel_is_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if name.startswith("lamella/")}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert package == {f"lamella/{path.relative_to(PACKAGE).as_posix()}" for path in files}
    assert package >= {
        "lamella/py.typed",
        "lamella/readers/default/model.safetensors",
        "lamella/readers/default/tokenizer.json",
        "lamella/data/demo/train.json",
        "lamella/study/report/assets/report.js",
        "lamella/study/report/assets/plotly-cartesian.min.js",
    }
    assert all(".dist-info/" in name for name in names - package)
    assert wheel.name.endswith("-py3-none-any.whl"), "nothing is compiled"
    assert wheel.stat().st_size < 4e6


def test_the_wheel_requires_what_answering_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    requirements = metadata.get_all("Requires-Dist") or []
    core = {re.split(r"[<>=\[ ]", requirement)[0] for requirement in requirements if "extra ==" not in requirement}
    assert core == {"bm25s", "numpy", "onnxruntime", "pydantic", "pypdf", "rich", "safetensors", "tokenizers", "typer"}
    with_torch = {line.partition("extra == ")[2].strip("'") for line in requirements if line.startswith("torch>")}
    assert with_torch == {"train", "onnx", "all"}


def test_the_sdist_has_what_the_tests_need(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    for folder in ("src", "tests", "benchmarks", "configs", "data", "docs", "examples", "models", "results"):
        expected = {name for name in tracked.splitlines() if name.startswith(f"{folder}/")}
        assert expected <= names, folder
    pins = {"constraints.txt", "constraints-lowest.txt"}
    assert {"Makefile", "README.md", "LICENSE", "pyproject.toml", ".ci/smoke", *pins} <= names
    assert not {name for name in names if name.startswith((".venv", "runs/", ".git/")) or "__pycache__" in name}
    assert path.stat().st_size < 38e6
