"""Mixed sets, held-out articles and mixtures from the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lamella.data.dataset import load_examples
from samples import needs_torch


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_convert_makes_a_mixed_set(lamella: Any) -> None:
    code, out, err = lamella("convert", "demo:dev", "mixed.json", "--negatives", "0.5")
    assert code == 0, err
    assert out == "mixed.json: 135 questions (0 fixed, 0 skipped), 45 negatives\n"
    examples = load_examples("mixed.json").examples
    assert sum(not example.answerable for example in examples) == 45 + 45
    assert sum(example.id.endswith("-negative") for example in examples) == 45


def test_convert_holds_out_articles(lamella: Any) -> None:
    code, out, err = lamella("convert", "demo:train", "train.json", "--hold-out", "0.2", "--hold-out-to", "dev.json")
    assert code == 0, err
    assert out.splitlines() == [
        "train.json: 315 questions (0 fixed, 0 skipped)",
        "dev.json: 90 questions (0 fixed, 0 skipped)",
    ]
    titles = [{one.context.title for one in load_examples(name).examples} for name in ("train.json", "dev.json")]
    assert [len(names) for names in titles] == [7, 2]
    assert not titles[0] & titles[1]


def test_convert_lengthens_contexts(lamella: Any) -> None:
    code, out, err = lamella("convert", "demo:dev", "long.json", "--negatives", "0.5", "--lengthen", "3000")
    assert code == 0, err
    assert re.fullmatch(
        r"long.json: 135 questions \(.*\), 45 negatives, contexts of 3,\d{3} characters on average\n", out
    )
    examples = load_examples("long.json").examples
    assert sum(example.answerable for example in examples) == 45


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--lengthen", "0"], "--lengthen"),
        (["--hold-out", "0.2"], "--hold-out and --hold-out-to need each other"),
        (["--hold-out-to", "dev.json"], "--hold-out and --hold-out-to need each other"),
        (["--hold-out", "0.2", "--hold-out-to", "out.json"], "expected another file than OUT"),
        (["--hold-out", "0.2", "--hold-out-to", "dev.xyz"], "dev.xyz: expected a file name that ends in .json"),
        (["--hold-out", "0.2", "--hold-out-to", "sub/../out.json"], "expected another file than OUT"),
        (["--hold-out", "0", "--hold-out-to", "dev.json"], "expected articles for both files, got none for dev.json"),
        (["--hold-out", "1", "--hold-out-to", "dev.json"], "expected articles for both files, got none for out.json"),
        (["--negatives", "1.5"], "--negatives"),
    ],
)
def test_mistakes_write_nothing(lamella: Any, options: list[str], expected: str, folder: Path) -> None:
    code, _, err = lamella("convert", "demo:train", "out.json", *options)
    assert code == 2
    assert expected in err
    assert not list(folder.iterdir())


def test_the_held_out_file_is_not_overwritten(lamella: Any) -> None:
    Path("dev.json").write_text("mine")
    code, _, err = lamella("convert", "demo:train", "train.json", "--hold-out", "0.2", "--hold-out-to", "dev.json")
    assert (code, Path("dev.json").read_text()) == (1, "mine")
    assert "dev.json" in err
    assert not Path("train.json").exists()


RUN_FILE = """
[data]
train = ["demo:dev", { file = "demo:train", weight = 2, negatives = 0.5 }]
"""


@needs_torch
def test_check_shows_the_mixture_of_a_run_file(lamella: Any) -> None:
    Path("run.toml").write_text(RUN_FILE)
    code, out, err = lamella("check", "run.toml")
    assert code == 0, err
    assert "demo:train: squad, 9 articles" in out
    assert "demo:dev: weight 1, negatives 0: an epoch takes 135 questions (14.3 %), 45 without an answer" in out
    assert "demo:train: weight 2, negatives 0.5: an epoch takes 810 questions (85.7 %)" in out
    _, out, _ = lamella("check", "run.toml", "--json")
    shares = json.loads(out)["mixture"]
    assert [(share["file"], share["taken"]) for share in shares] == [("demo:dev", 135), ("demo:train", 810)]
    assert {share["run_file"] for share in shares} == {"run.toml"}


@needs_torch
def test_check_of_a_plain_run_file_checks_its_data(lamella: Any) -> None:
    Path("run.toml").write_text('[data]\ntrain = "demo:train"\ndev = "nowhere.json"\n')
    code, out, err = lamella("check", "run.toml")
    assert code == 2
    assert "nowhere.json" in err
    assert "weight" not in out


@needs_torch
def test_check_refuses_a_run_file_without_data(lamella: Any) -> None:
    Path("run.toml").write_text("[training]\nepochs = 1\n")
    code, out, err = lamella("check", "run.toml")
    assert (code, out) == (2, "")
    assert err == "lamella: run.toml: expected data files, found none; set data.train or data.dev.\n"
