"""No command overwrites an existing file without --overwrite, and none its own input, ever."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from doubles import save_tiny_encoder, tiny_run_config
from lamella.data.demo import data_path
from lamella.errors import OutputError
from lamella.files import check_output_file, check_output_folder
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel
from run_folders import write_data, write_run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(data_path("demo:train"), tmp_path / "train.json")
    shutil.copy(data_path("demo:dev"), tmp_path / "dev.json")
    return tmp_path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    encoder = load_encoder(str(save_tiny_encoder(folder / "tiny")))
    ReaderModel(encoder, tiny_run_config()).save(folder / "model")
    return folder / "model"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(lamella: Any, *call: Any, because: str) -> None:
    """Run a command that must refuse its output in one line, with exit code 1, and change no file."""
    before = contents(Path.cwd())
    code, _, err = lamella(*call)
    assert (code, err.count("\n")) == (1, 1), err
    assert because in err
    assert contents(Path.cwd()) == before


EXISTS = "exists already; choose another file, or pass --overwrite."
IS_INPUT = "is read by this command and cannot be its output; choose another file."


def test_check_never_takes_a_data_file_for_its_output(data: Path, lamella: Any) -> None:
    """`check --fix train.json dev.json` used to replace train.json by a fixed copy of dev.json."""
    before = contents(data)
    code, out, err = lamella("check", "--fix", "train.json", "dev.json")
    assert (code, out) == (2, "")
    assert err == "lamella: check --fix: expected --fix-to OUT, the file to write the fixed copy to.\n"
    assert contents(data) == before
    refused(lamella, "check", "--fix-to", "train.json", "dev.json", because=EXISTS)
    refused(lamella, "check", "--fix-to", "dev.json", "dev.json", because=IS_INPUT)
    refused(lamella, "check", "--fix-to", "./dev.json", "dev.json", "--overwrite", because=IS_INPUT)
    refused(lamella, "check", "--fix-to", ".", "train.json", "dev.json", "--overwrite", because=IS_INPUT)
    assert lamella("check", "--fix-to", "old.json", "dev.json")[0] == 0
    assert lamella("check", "--fix-to", "old.json", "train.json", "--overwrite")[0] == 0
    assert lamella("check", "--fix-to", "fixed", "train.json", "dev.json")[0] == 0
    refused(lamella, "check", "--fix-to", "fixed", "train.json", "dev.json", because=EXISTS)
    assert lamella("check", "--fix-to", "fixed", "train.json", "dev.json", "--overwrite")[0] == 0


def test_convert(data: Path, lamella: Any) -> None:
    os.symlink("dev.json", data / "link.json")
    os.link("dev.json", data / "hard.json")
    refused(lamella, "convert", "dev.json", "train.json", because=EXISTS)
    for target in ("dev.json", data / "dev.json", "link.json", "hard.json"):
        refused(lamella, "convert", "dev.json", target, "--overwrite", because=IS_INPUT)
    assert lamella("convert", "demo:dev", "train.json", "--overwrite")[0] == 0


def test_predict_submission(data: Path, lamella: Any, model: Path) -> None:
    shutil.copytree(model, data / "model")
    (data / "old.csv").write_text("Id,Predicted\n")
    call = ("predict", "dev.json", "-m", data / "model", "-o", "run", "--submission")
    refused(lamella, *call, "old.csv", because=EXISTS)
    refused(lamella, *call, "dev.json", "--overwrite", because=IS_INPUT)
    refused(lamella, *call, data / "model" / "config.json", "--overwrite", because=IS_INPUT)
    refused(lamella, *call, "run/predictions.json", because="is a file of the run itself")
    assert lamella(*call, "old.csv", "--overwrite")[0] == 0
    assert (data / "old.csv").read_text().count("\n") > 1
    refused(lamella, "predict", "dev.json", "-m", data / "model", "-o", "run", because="already holds a run (finished)")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    questions = write_data(tmp_path / "dev.json", 10)
    write_run(tmp_path / "runs" / "a", questions, [True] * 10)
    write_run(tmp_path / "runs" / "b", questions, [True] * 5 + [False] * 5)
    return tmp_path


@pytest.mark.parametrize("name", ["page.html", "page.md"])
def test_report(name: str, runs: Path, lamella: Any) -> None:
    (runs / name).write_text("mine")
    call = ("report", "runs/a", "--data", "dev.json", "--out")
    refused(lamella, *call, name, because=EXISTS)
    refused(lamella, *call, "dev.json", "--overwrite", because=IS_INPUT)
    refused(lamella, *call, "runs/a/predictions.json", "--overwrite", because=IS_INPUT)
    refused(lamella, *call, "runs", because="got a folder")


@pytest.mark.parametrize("form", ["--flatten", "--half", "--as-transformers", "--onnx"])
def test_export(form: str, data: Path, lamella: Any, model: Path) -> None:
    shutil.copytree(model, data / "model")
    for folder in ("model", ".", "dev.json"):
        refused(lamella, "export", "model", form, folder, because="exists already and is not an empty folder")


def test_an_output_file_is_checked_before_the_work(tmp_path: Path) -> None:
    existing, folder = tmp_path / "a.json", tmp_path / "folder"
    existing.write_text("{}")
    folder.mkdir()
    (folder / "report.html").write_text("")
    (folder / "model.safetensors").write_text("")
    check_output_file(tmp_path / "new.json", inputs=[existing, "demo:dev", folder])
    check_output_file(existing, overwrite=True)
    check_output_file(folder / "report.html", inputs=[folder], overwrite=True)  # an earlier output in an input folder
    check_output_file(folder / "new.json", inputs=[folder])
    for path, inputs in ((existing, [existing]), (folder / "model.safetensors", [folder]), (folder, [])):
        with pytest.raises(OutputError):
            check_output_file(path, inputs=inputs, overwrite=True)
    check_output_folder(tmp_path / "new")
    (tmp_path / "empty").mkdir()
    check_output_folder(tmp_path / "empty")
    for path in (folder, existing):
        with pytest.raises(OutputError):
            check_output_folder(path)
    assert OutputError.exit_code == 1


def test_json_of_fixed_files_goes_to_standard_output_alone(data: Path, lamella: Any) -> None:
    code, out, err = lamella("check", "dev.json", "--fix-to", "fixed.json", "--json")
    assert code == 0
    assert json.loads(out)["problems"] == []
    assert "0 problems fixed" in err


def test_an_occupied_output_has_one_exit_code(runs: Path, lamella: Any, model: Path) -> None:
    encoder = f'[encoder]\nname = "{model.parent / "tiny"}"\ntuning = "frozen"\n'
    windows = "[windows]\nmax_seq_length = 128\ndoc_stride = 32\nmax_query_length = 24\n"
    (runs / "run.toml").write_text(f'{encoder}{windows}[data]\ntrain = ["dev.json"]\n')
    assert lamella("evaluate", "dev.json", "--model", model, "--out", "scored")[0] == 0
    (runs / "mine").mkdir()
    (runs / "mine" / "notes.json").write_text("{}")
    for occupied in ("mine", "mine/notes.json"):
        for call in (
            "train run.toml --out",
            "train run.toml --resume --out",
            "sweep run.toml --out",
            "extract run.toml --out",
            f"predict dev.json --model {model} --out",
            f"evaluate dev.json --model {model} --out",
            "ensemble runs/a runs/b --out",
            "analyse scored --out",
            "compare scored --keep",
        ):
            if call != "compare scored --keep" or occupied != "mine":  # which adds a file to a folder
                refused(lamella, *call.split(), occupied, because=occupied)


def test_a_tilde_that_the_shell_left_means_the_home_folder(
    data: Path, lamella: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shells expand `--out ~/runs`, but not `--out=~/runs`, which made a folder with the name `~`."""
    monkeypatch.setenv("HOME", str(data / "home"))
    assert lamella("convert", "dev.json", "~/dev.jsonl")[0] == 0
    assert lamella("convert", "dev.json", "rest.json", "--hold-out=0.5", "--hold-out-to=~/held.json")[0] == 0
    assert sorted(path.name for path in (data / "home").iterdir()) == ["dev.jsonl", "held.json"]
    assert not (data / "~").exists()


def test_analyse_refuses_its_output_before_the_work(data: Path, lamella: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lamella.study.analysis import analyse

    monkeypatch.setattr(analyse, "analyse", lambda *arguments, **options: pytest.fail("worked in vain"))
    (data / "notes").mkdir()
    (data / "notes" / "mine.txt").write_text("mine")
    refused(lamella, "analyse", "scored", "--out", "notes", because="is not empty and not a run folder")


@pytest.mark.parametrize("call", ["analyse scored", "evaluate dev.json answers.json", "evaluate dev.json --open"])
def test_overwrite_without_an_output_is_refused(data: Path, lamella: Any, call: str) -> None:
    code, _, err = lamella(*call.split(), "--overwrite")
    assert (code, err) == (2, f"lamella: {call.split()[0]} --overwrite: needs --out.\n")
