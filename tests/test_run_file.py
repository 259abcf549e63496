"""Run files that extend others: what merges, what replaces, and one line for every mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lamella.errors import LamellaError
from lamella.plan import load_plan
from lamella.run_file import load_config, merge_tables, read_table
from samples import needs_torch


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("base", "table", "merged"),
    [
        ({"data": {"train": "a"}}, {"data": {"dev": "b"}}, {"data": {"train": "a", "dev": "b"}}),
        ({"data": {"train": ["a", "b"]}}, {"data": {"train": ["c"]}}, {"data": {"train": ["c"]}}),
        (
            {"encoder": {"name": "a", "dropout": 0.1}},
            {"encoder": {"name": "b"}},
            {"encoder": {"name": "b", "dropout": 0.1}},
        ),
        # A part with its name replaces the whole part; options alone change single options of it.
        (
            {"encoder": {"tuning": {"name": "top_k", "k": 3}}},
            {"encoder": {"tuning": {"name": "adapter"}}},
            {"encoder": {"tuning": {"name": "adapter"}}},
        ),
        (
            {"learner": {"schedule": {"name": "linear", "warmup": 0.1}}},
            {"learner": {"schedule": {"warmup": 0.2}}},
            {"learner": {"schedule": {"name": "linear", "warmup": 0.2}}},
        ),
        (
            {"learner": {"schedule": "linear"}},
            {"learner": {"schedule": {"warmup": 0.2}}},
            {"learner": {"schedule": {"name": "linear", "warmup": 0.2}}},
        ),
        (
            {"learner": {"mixer": ["dot"]}},
            {"learner": {"mixer": {"name": "last"}}},
            {"learner": {"mixer": {"name": "last"}}},
        ),
        ({"learner": [{"seed": 1}]}, {"learner": {"seed": 2}}, {"learner": {"seed": 2}}),
        (
            {"grid": {"encoder": {"name": ["a"], "dropout": [0.1]}}},
            {"grid": {"encoder": {"name": ["b"]}}},
            {"grid": {"encoder": {"name": ["b"], "dropout": [0.1]}}},
        ),
        ({}, {"data": {"train": "a"}}, {"data": {"train": "a"}}),
    ],
)
def test_tables_merge_and_values_replace(base: dict[str, Any], table: dict[str, Any], merged: dict[str, Any]) -> None:
    before = str(base), str(table)
    assert merge_tables(base, table) == merged
    assert (str(base), str(table)) == before


@needs_torch
def test_a_run_file_extends_a_chain_of_files_relative_to_each(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{
            "base/all": "[training]\nepochs = 1\nbatch_size = 4\n[encoder]\ntuning = 'frozen'\n",
            "base/long": "extends = 'all.toml'\n[training]\nepochs = 9\n",
            "run": "extends = 'base/long.toml'\n[encoder]\ndropout = 0.1\n",
        },
    )
    config = load_config(tmp_path / "run.toml", ["training.batch_size=8"])
    assert (config.training.epochs, config.training.batch_size) == (9.0, 8)
    assert config.encoder.tuning == {"name": "frozen"}
    assert config.encoder.dropout == 0.1
    assert list(load_plan(tmp_path / "run.toml").runs.values()) == [load_config(tmp_path / "run.toml")]
    assert "extends" not in read_table(tmp_path / "run.toml")


def test_of_several_base_files_the_later_wins(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{
            "reader": "[training]\nepochs = 1\nbatch_size = 4\n",
            "data": "[training]\nepochs = 2\n[data]\ntrain = 'a.json'\n",
            "run": "extends = ['reader.toml', 'data.toml']\n[data]\ndev = 'b.json'\n",
        },
    )
    expected = {"training": {"epochs": 2, "batch_size": 4}, "data": {"train": "a.json", "dev": "b.json"}}
    assert read_table(tmp_path / "run.toml") == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"run": "extends = 'gone.toml'"}, "run.toml: extends: expected a run file, as a path relative to this file; "),
        ({"run": "extends = 3"}, "expected the path of another run file, or a list of paths, got 3."),
        ({"run": "extends = ''"}, "expected the path of another run file, or a list of paths, got ''."),
        ({"run": "extends = []"}, "expected the path of another run file, or a list of paths, got []."),
        ({"run": "extends = ['a.toml', 3]", "a": ""}, "or a list of paths, got ['a.toml', 3]."),
        ({"run": "extends = ['a.toml', 'gone.toml']", "a": ""}, "run.toml: extends: expected a run file"),
        ({"run": "extends = 'run.toml'"}, "run.toml: extends: run files extend each other in a circle: "),
        ({"run": "extends = 'a.toml'", "a": "extends = './run.toml'"}, "a.toml -> "),
        ({"run": "extends = 'a.toml'", "a": "extends = 'gone.toml'"}, "a.toml: extends: expected a run file"),
        ({"run": "extends = 'a.toml'", "a": "[broken"}, "a.toml: broken TOML"),
        ({"run": "extends = '.'"}, "extends: expected a run file"),
    ],
)
def test_a_wrong_base_is_one_clear_line(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    write(tmp_path, **files)
    with pytest.raises(LamellaError) as caught:
        load_config(tmp_path / "run.toml")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
