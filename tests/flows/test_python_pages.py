"""The Python code of the README, the docs and `examples/` runs; the README's picture and table match their sources."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import lamella
from doubles import save_tiny_encoder

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = (
    "README.md",
    "docs/reference/python.md",
    "docs/reference/formats.md",
    "docs/tutorials/first-reader.md",
    "docs/how-to/documents.md",
    "docs/concepts/augmentation.md",
)
SMALL: dict[str, Any] = {
    "training": {"max_steps": 1, "batch_size": 2},
    "data": {"max_train_samples": 3, "max_eval_samples": 2},
    "windows": {"max_seq_length": 128, "doc_stride": 16},
}

pytestmark = pytest.mark.usefixtures("one_thread", "on_cpu")


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with the configs and examples of the repository."""
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def small_training(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `lamella.train` take one step; on a tiny encoder, unless it starts from another reader."""
    train, tiny = lamella.train, str(save_tiny_encoder(checkout / "tiny"))

    def train_briefly(config: Any = None, **options: Any) -> lamella.Run:
        file = tomllib.loads(Path(config).read_text("utf-8")) if config else {}
        starts = "start" in {**file.get("learner", {}), **options.get("learner", {})}
        small = {section: {**options.get(section, {}), **values} for section, values in SMALL.items()}
        encoder = {**options.get("encoder", {}), **({} if starts else {"name": tiny})}
        return train(config, **{**options, **small, **({"encoder": encoder} if encoder else {})})

    monkeypatch.setattr(lamella, "train", train_briefly)


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_from_top_to_bottom(
    page: str, small_training: None, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace: dict[str, Any] = {}
    code = python_blocks(page)
    assert code
    for block in code:
        exec(compile(block, page, "exec"), namespace)
    assert capsys.readouterr().out


def test_the_answers_of_the_readme_are_what_the_commands_print(lamella: Any) -> None:
    answers = re.findall(r"^```text\n(.*?)^```", README, re.M | re.S)
    asked = [
        ("When did the probe land on Titan?", "--context", ROOT / "examples" / "titan.txt"),
        ("What is the exit code after Ctrl-C?", "--in", ROOT / "docs"),
    ]
    for question, answer in zip(asked, answers, strict=True):
        code, out, _ = lamella("ask", *question)
        assert code == 0
        assert out.split("  ")[0] == answer.split("  ")[0]


@pytest.mark.parametrize("script", ["answer", "train_on_csv", "compare_heads"])
def test_an_example_runs(script: str, small_training: None, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(ROOT / "examples" / f"{script}.py"))["main"]
    main()
    out = capsys.readouterr().out
    expected = {"answer": "14 January 2005", "train_on_csv": "F1 on questions", "compare_heads": "best: runs/heads/"}
    assert expected[script] in out


def test_there_are_no_other_examples() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {"answer", "compare_heads", "train_on_csv"}


def test_the_picture_of_the_readme_is_current() -> None:
    command = [sys.executable, str(ROOT / "docs" / "picture.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "docs/images/thin-vs-full.svg" in README


def test_the_page_of_other_texts_is_current() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "wild.py"))["page"]
    assert (ROOT / "docs" / "results" / "wild.md").read_text(encoding="utf-8") == page()
    assert "docs/results/wild.md" in README


def test_the_table_of_tools_in_the_readme_is_as_measured() -> None:
    """A cell is yes or no as the probe found; a dash where nothing was probed."""
    measured = json.loads((ROOT / "benchmarks/peers/features.json").read_text(encoding="utf-8"))["tools"]
    tools = ["lamella", "transformers-4", "transformers-5", "run-qa-loader", "adapters", "peft", "haystack"]
    rows = {
        "answers a question in one call": "answers",
        "leaves a question unanswered that the text does not answer": "abstains",
        "reads the official SQuAD 2.0 file": "reads_squad",
        "scores exact match and F1": "scores",
        "trains bottleneck adapters": "adapters",
        "trains LoRA": "lora",
    }
    for title, key in rows.items():
        (cells,) = re.findall(rf"^\| {re.escape(title)} \| (.*) \|$", README, re.M)
        findings = [measured[tool].get(key) for tool in tools]
        assert cells.split(" | ") == [
            "–" if finding is None else "yes" if finding["works"] else "no" for finding in findings
        ]
    on_five = [measured[tool]["versions"].get("transformers", "").startswith("5.") for tool in tools]
    (cells,) = re.findall(r"^\| runs on transformers 5 \| (.*) \|$", README, re.M)
    assert cells.split(" | ") == [
        "–" if tool == "run-qa-loader" else "yes" if five else "no" for tool, five in zip(tools, on_five, strict=True)
    ]
    assert not measured["adapters"]["installs_with_transformers_5"]["works"]
    assert not measured["adapters"]["imports_with_transformers_5"]["works"]


def test_the_speed_in_the_readme_is_as_measured() -> None:
    rows = json.loads((ROOT / "results" / "speed.json").read_text(encoding="utf-8"))
    (row,) = [row for row in rows if row["encoder"] == "all-mpnet-base-v2" and not row.get("compile")]
    assert f"**{row['ours']:,.0f} windows per second" in README
    assert f"against {row['peer']:,.0f} for" in README.replace("\n", " ")


def test_the_list_of_decisions_is_complete() -> None:
    pages = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("0*.md"))
    listed = re.findall(r"^(\d+)\. \[.*\]\((.*)\)$", (ROOT / "docs/decisions/README.md").read_text("utf-8"), re.M)
    assert [(f"{int(number):04}", name) for number, name in listed] == [(name[:4], name) for name in pages]


def test_the_page_about_the_layout_names_every_room_and_no_module_that_is_gone() -> None:
    page = (ROOT / "docs/decisions/0008-layout.md").read_text(encoding="utf-8")
    source = ROOT / "src" / "lamella"
    rooms = {path.parent.name for path in source.glob("*/__init__.py")}
    assert all(f"`{room}/`" in page for room in rooms)
    for module in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", page):
        assert (source / module).is_file() or (ROOT / module).is_file(), module
