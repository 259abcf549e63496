"""A command that is killed with SIGKILL at any point leaves what was finished, and completes when it is repeated."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from doubles import save_tiny_encoder
from forks import ForkServer
from kill_cases import Case, Files, Tally, Trial
from lamella.data.file_formats.formats import read
from lamella.data.file_formats.writers import write
from lamella.documents.index_file import INDEX, StoredIndex
from lamella.plan import make_plan
from lamella.run_file import read_table
from lamella.training.run import train_plan
from run_files import write_run_file

pytestmark = pytest.mark.usefixtures("one_thread", "on_cpu")

SCORED = 'evaluate_every = "2 steps"\nsave_at = [0.5]'
LORA = 'tuning = "lora"'
HEADS = "[grid.learner]\nseed = [0, 1]"
POINTS = int(os.environ.get("LAMELLA_KILL_POINTS", "12"))  # per command
KILLS = "LAMELLA_KILLS"  # the environment variable with the file to write the counts to


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands read: an encoder, run files, two readers trained from them, data to tune on, documents."""
    folder = tmp_path_factory.mktemp("material")
    encoder = f'name = "{save_tiny_encoder(folder / "tiny", num_hidden_layers=1)}"'
    write_run_file(folder / "full.toml", encoder, training=SCORED)
    write_run_file(folder / "lora.toml", f"{encoder}\n{LORA}", steps=2)
    write_run_file(folder / "heads.toml", f'{encoder}\ntuning = "frozen"', HEADS, training=SCORED)
    (folder / "sweep").mkdir()
    write_run_file(folder / "sweep" / "first.toml", encoder, steps=2)
    write_run_file(folder / "sweep" / "heads.toml", 'from = "first"\ntuning = "frozen"', HEADS, steps=2)
    for name in ("full", "lora"):
        train_plan(make_plan(read_table(folder / f"{name}.toml"), where="test"), folder / name)
    write(read("demo:dev").examples[:60], folder / "tuning.json")
    documents = folder / "documents"
    documents.mkdir()
    for number in range(3):
        (documents / f"{number}.txt").write_text(f"Titan {number} is a moon of Saturn. " * 20)
    return folder


def texts_of_index(folder: Path) -> Files:
    """The documents of an index and their texts; the times of the files, which it also holds, differ each time."""
    index = StoredIndex(folder / "documents" / INDEX)
    return {record.name: index.text(number).encode() for number, record in enumerate(index.records)}


def cases(material: Path) -> dict[str, Case]:
    full, lora, tuning = (str(material / name) for name in ("full", "lora", "tuning.json"))

    def training(name: str) -> Case:
        command = ("train", str(material / f"{name}.toml"), "--out", "out")
        return Case(command, again=(*command, "--resume"))

    def export(form: str) -> Case:
        return Case(("export", lora, f"--{form}", "out"), replaced="out")

    def copy_reader(folder: Path) -> None:
        shutil.copytree(material / "full" / "model", folder / "out")

    def copy_documents(folder: Path) -> None:
        shutil.copytree(material / "documents", folder / "documents")

    def keep_one(folder: Path) -> None:
        (folder / "kept").mkdir()
        shutil.copy(material / "tuning.json", folder / "kept" / "lora.json")

    return {
        "train": training("full"),
        "train, several": training("heads"),
        "sweep": Case(("sweep", str(material / "sweep"), "--out", "out")),
        "extract": Case(("extract", str(material / "heads.toml"), "--out", "out")),
        **{f"export --{form}": export(form) for form in ("onnx", "half", "flatten", "as-transformers", "peft")},
        "calibrate": Case(("calibrate", tuning, "--model", "out", "--force"), prepare=copy_reader),
        "calibrate --out": Case(
            ("calibrate", tuning, "--model", lora, "--out", "out", "--overwrite"), prepare=copy_reader, replaced="out"
        ),
        "index": Case(("index", "documents"), prepare=copy_documents, view=texts_of_index),
        "compare --keep": Case(
            ("compare", full, lora, "--keep", "kept", "--overwrite"), prepare=keep_one, replaced="kept/lora.json"
        ),
    }


NAMES = tuple(cases(Path()))


@pytest.fixture
def trial(request: pytest.FixtureRequest, material: Path, tmp_path: Path, forks: ForkServer) -> Iterator[Trial]:
    trial = Trial(cases(material)[request.param], tmp_path / "work", forks)
    yield trial
    _record(request.param, trial.tally)


def _record(name: str, tally: Tally) -> None:
    """Add the counts of a command to the file that $LAMELLA_KILLS names."""
    if not (file := os.environ.get(KILLS)):
        return
    path = Path(file)
    counts = json.loads(path.read_text()) if path.exists() else {}
    earlier = counts.get(name, {"kills": 0, "equal": 0, "reported": 0, "losses": []})
    counts[name] = {key: earlier[key] + value for key, value in asdict(tally).items()}
    path.write_text(json.dumps(counts, indent=2) + "\n")


@pytest.mark.parametrize("trial", ["train", "export --half", "calibrate --out", "index"], indirect=True)
def test_killed_at_a_few_exact_points(trial: Trial) -> None:
    for change in (trial.changes // 2, trial.changes):
        trial.kill_at(change)
    assert trial.tally.losses == []
    assert trial.tally.equal == trial.tally.kills == 2


@pytest.mark.slow
@pytest.mark.parametrize("trial", NAMES, indirect=True)
def test_killed_at_exact_points(trial: Trial) -> None:
    """Points that are spread over the command, the first and the last among them; POINTS is large to try them all."""
    points = {1 + round(number * (trial.changes - 1) / (POINTS - 1)) for number in range(POINTS)}
    for change in sorted(points):
        trial.kill_at(change)
    assert trial.tally.losses == []


@pytest.mark.slow
@pytest.mark.parametrize("trial", NAMES, indirect=True)
def test_killed_at_random_moments(trial: Trial) -> None:
    for moment in trial.random_moments(6):
        trial.kill_after(moment)
    assert trial.tally.losses == []
    assert trial.tally.kills >= 3
