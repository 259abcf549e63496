"""What SECURITY.md promises: no path out of a folder, no secrets in records, nothing that runs code from a model."""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
from pathlib import Path

import pytest

import lamella
from broken.document_kinds import entities_docx
from lamella.child_process import module_environment
from lamella.documents.read_files import ReadProblem, read_files
from lamella.environment import environment
from lamella.errors import UnreadableError
from lamella.runs import kind_of_run
from lamella.serve.settings import Settings

SOURCE = Path(lamella.__file__).parent


@pytest.mark.parametrize("name", ["../other", "/tmp", "..", "", "a/b", "a\\b", "a\0b", 3, None, ["a"]])
def test_a_run_folder_names_only_folders_inside_it(name: object, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"state": "finished", "command": "train", "runs": ["sound", name]}))
    with pytest.raises(UnreadableError, match="expected names of folders inside this one"):
        kind_of_run(tmp_path)


def test_the_arguments_of_other_programs_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/lamella", "train", "run.toml"])
    assert environment()["arguments"] == ["train", "run.toml"]
    monkeypatch.setattr(sys, "argv", ["/site-packages/lamella/__main__.py", "parts"])
    assert environment()["arguments"] == ["parts"]
    monkeypatch.setattr(sys, "argv", ["train.py", "--token", "hf_secret"])
    assert "hf_secret" not in json.dumps(environment())


def test_child_processes_and_settings_do_not_show_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LAMELLA_API_KEYS", "HF_TOKEN", "WANDB_API_KEY", "aws_secret_access_key", "DB_PASSWORD"):
        monkeypatch.setenv(name, "hidden")
    assert "hidden" not in module_environment(OMP_NUM_THREADS="1").values()
    assert module_environment(OMP_NUM_THREADS="1")["OMP_NUM_THREADS"] == "1"
    assert "PATH" in module_environment()
    assert "hidden" not in repr(Settings(keys=("hidden",)))


@functools.cache
def calls() -> list[tuple[str, ast.Call]]:
    """Return all calls in the package, with the name of what is called."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [(ast.unparse(node.func), node) for node in nodes if isinstance(node.func, ast.Name | ast.Attribute)]


def has(call: ast.Call, argument: str, value: object) -> bool:
    return any(
        keyword.arg == argument and isinstance(keyword.value, ast.Constant) and keyword.value.value is value
        for keyword in call.keywords
    )


def test_nothing_is_unpickled_and_no_text_is_run() -> None:
    loads = [call for name, call in calls() if name == "torch.load"]
    assert loads
    assert all(has(call, "weights_only", True) for call in loads)
    called = {name for name, _ in calls()}
    assert not called & {"pickle.load", "pickle.loads", "np.load", "numpy.load", "marshal.loads"}
    assert not called & {"eval", "exec", "compile", "os.system", "os.popen"}
    assert not [name for name, call in calls() if has(call, "shell", True) or has(call, "allow_pickle", True)]


def test_remote_code_is_never_trusted() -> None:
    auto = [call for name, call in calls() if name.startswith("Auto") and name.endswith(".from_pretrained")]
    assert auto
    assert all(has(call, "trust_remote_code", False) or "**options" in ast.unparse(call) for call in auto)
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    assert "trust_remote_code=True" not in text
    assert '"trust_remote_code": True' not in text


def test_exceptions_from_the_audit_name_rules_alone_and_are_listed() -> None:
    """bandit takes each further word for the name of a rule, and warns."""
    listed = (SOURCE.parents[1] / "SECURITY.md").read_text(encoding="utf-8").partition("## Audit")[2]
    lines = [line for path in SOURCE.rglob("*.py") for line in path.read_text(encoding="utf-8").splitlines()]
    exceptions = [line.partition("# nosec")[2] for line in lines if "# nosec" in line]
    assert exceptions
    for text in exceptions:
        assert (found := re.fullmatch(r" (B\d+)(  # .+)?", text)), text
        assert found[1] in listed


def test_entities_that_multiply_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.docx"
    path.write_bytes(entities_docx(9))
    (found,) = read_files([path])
    assert isinstance(found, ReadProblem)
    assert "expected a docx file" in found.reason
