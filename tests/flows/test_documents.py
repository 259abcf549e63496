"""The README, the docs and the packaged run files are correct."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer

from doubles import save_tiny_encoder
from lamella import registry
from lamella.cli import app
from lamella.config import ADDED_DATA_OPTIONS, RunConfig
from lamella.encoder.encoder import Encoder
from lamella.plan import load_plan
from lamella.validation import check_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("data/*.md"), *ROOT.glob("docs/**/*.md")])
CONFIGS = sorted(ROOT.glob("configs/*.toml"))  # those of the papers have tests of their own


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def commands(page: Path) -> list[list[str]]:
    """Every `lamella …` line of the page's shell blocks, as words."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("lamella ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            text = linked.read_text(encoding="utf-8")
            headings = re.findall(r"^#+ (.*)$", text, re.M)
            anchors = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
            assert anchor in anchors | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_in_a_page_is_valid(page: Path) -> None:
    group = typer.main.get_command(app)
    for words in commands(page):
        name, *arguments = words[1:]
        command: Any = group.get_command(None, name)  # type: ignore[attr-defined]
        assert command is not None, words
        command.make_context(name, arguments)


def test_there_are_commands_and_run_files_to_try() -> None:
    assert len(commands(ROOT / "README.md")) >= 4
    assert len(CONFIGS) == 3


def test_the_run_file_in_the_readme_is_valid() -> None:
    (block,) = blocks(ROOT / "README.md", "toml")
    check_config(tomllib.loads(block), where="README.md")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_run_file_that_ships_trains_a_step(path: Path, lamella: Any, tmp_path: Path, one_thread: None) -> None:
    (config, *_) = load_plan(path).runs.values()
    tiny = [] if config.learner.start else [f"encoder.name={save_tiny_encoder(tmp_path / 'tiny')}"]
    changes = [
        *tiny,
        "training.max_steps=1",
        "training.batch_size=2",
        "data.max_train_samples=2",
        "data.max_eval_samples=2",
        "windows.max_seq_length=128",
        "windows.doc_stride=16",
    ]
    settings = [word for change in changes for word in ("--set", change)]
    code, out, err = lamella("train", path, "--out", tmp_path / "run", *settings)
    assert (code, err) == (0, ""), err
    assert "1 step" in out


def test_the_generated_pages_are_current() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_reference_has_keys_and_defaults_that_a_run_file_accepts() -> None:
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text("utf-8")
    seen = set()
    for section, content in re.findall(r"^## `\[(\w+)\]`\n(.*?)(?=^## )", text, re.M | re.S):
        for key, default in re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", content, re.M):
            seen.add(f"{section}.{key}")
            if default != "unset":
                value = tomllib.loads(f"value = {default}")["value"]
                assert check_config({section: {key: value}}, where="reference") == RunConfig()
    assert seen == {*RunConfig().flat(), "training.metrics", *(f"data.{key}" for key in ADDED_DATA_OPTIONS)}
    parts = (ROOT / "docs" / "reference" / "parts.md").read_text("utf-8")
    for default in re.findall(r" = `([^`]*)`(?:<br>| \|)", parts):
        assert default == "unset" or "value" in tomllib.loads(f"value = {default}"), default


@pytest.mark.parametrize("family", ["augmentation", "distiller", "loss", "mixer", "task", "tuning"])
def test_every_part_of_a_reader_is_explained(family: str) -> None:
    explained = "".join(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/concepts/*.md"))
    missing = [name for name in registry.names(family) if f"`{name}`" not in explained]
    assert not missing


def test_the_page_about_tuning_counts_right() -> None:
    """The last column of its table: what of a layer of BERT-base is trained; in words where options decide."""
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", (ROOT / "docs/concepts/tuning.md").read_text("utf-8"), re.M)
    assert sorted(name for name, _ in rows) == sorted(registry.names("tuning"))
    H, m, r = 768, 64, 8
    in_words = {
        "top_k": "7,087,872, or 3,072 below",
        "adapter": "2(2Hm + m + H) + 3,072",
        "lora": "2 · 2Hr, at the default query and value",
        "ia3": "2H + 4H, at the default key, value and ffn_output",
    }
    formulas = {
        "top_k": (7_087_872, 3_072),
        "adapter": 2 * (2 * H * m + m + H) + 3_072,
        "lora": 4 * H * r,
        "ia3": 6 * H,
    }
    for name, count in rows:
        with torch.device("meta"):
            encoder = Encoder(transformers.BertModel(transformers.BertConfig(), add_pooling_layer=False))
            registry.build("tuning", name, encoder)
        bottom, top = (
            sum(value.numel() for value in layer.parameters() if value.requires_grad)
            for layer in (encoder.layer_modules[0], encoder.layer_modules[-1])
        )
        if name in in_words:
            assert count == in_words[name]
            assert formulas[name] == ((top, bottom) if name == "top_k" else top)
        else:
            assert count == f"{top:,}"
        assert name == "top_k" or top == bottom


def test_the_bundled_data_set_has_the_documented_size_and_variety() -> None:
    from lamella.data.file_formats.formats import read

    train, dev = read("demo:train").examples, read("demo:dev").examples
    everything = [*train, *dev]
    titles = {example.context.title for example in everything}
    assert len(titles) == 12
    assert not {example.context.title for example in train} & {example.context.title for example in dev}
    assert len({id(example.context) for example in everything}) == 60
    assert len(everything) == 540
    impossible = [example for example in everything if not example.answers]
    assert len(impossible) == 180
    assert all(example.plausible_answers for example in impossible)
    words = {example.question.split()[0].lower() for example in everything}
    assert {"who", "what", "when", "where", "why", "how", "which", "whose"} <= words
