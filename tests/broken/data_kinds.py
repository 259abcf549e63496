"""Kinds of data files, predictions and run files."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from broken.damage import Damage
from broken.json_damage import broken_json, broken_toml, dump_toml
from broken.kind import Files, Folders, Kind, damage_file
from lamella.config import RunConfig
from tiny_reader import save_tiny_bert

TITAN = "Christiaan Huygens discovered Titan in 1655. The probe Huygens landed on Titan in 2005."
KOREAN = "타이탄은 토성의 위성이다. 1655년에 하위헌스가 발견하였다."
ROWS = [
    {"id": "a", "question": "Who discovered Titan?", "context": TITAN, "answer_text": "Christiaan Huygens",
     "answer_start": 0, "title": "Titan"},
    {"id": "b", "question": "Who landed on Io?", "context": TITAN, "answer_text": "", "answer_start": None,
     "title": "Titan"},
]  # fmt: skip


def squad(context: str = TITAN, answer: str = "Christiaan Huygens", version: str = "v2.0") -> dict[str, Any]:
    """Return a small data set in the format of SQuAD 2.0."""
    answers = [{"text": answer, "answer_start": context.index(answer)}]
    qas = [
        {"id": "a", "question": "Who discovered Titan?", "is_impossible": False, "answers": answers},
        {
            "id": "b",
            "question": "Who landed on Io?",
            "is_impossible": True,
            "answers": [],
            "plausible_answers": answers,
        },
    ]
    return {"version": version, "data": [{"title": "Titan", "paragraphs": [{"context": context, "qas": qas}]}]}


MULTI_CONTEXT = {
    "data": [
        {
            "qa": {"id": "a", "question": "Who discovered Titan?", "answer": ["Huygens"]},
            "paragraphs": [{"title": "Titan", "contents": TITAN}, {"title": "Io", "contents": "Galileo found Io."}],
        }
    ]
}
DOCUMENTS: dict[str, Any] = {
    "squad.json": squad(),
    "korquad.json": squad(KOREAN, "하위헌스", "KorQuAD_v1.0_dev"),
    "flat.json": [{**row, "answers": {"text": ["Huygens"], "answer_start": [11]}} for row in ROWS[:1]],
    "several.json": MULTI_CONTEXT,
}


def read_data(folders: Folders) -> Iterator[list[object]]:
    """Check every data file, and convert it to both formats."""
    encoder = folders.beside / "encoder"
    if not encoder.is_dir():
        save_tiny_bert(encoder)
    for path in sorted(folders.inputs.iterdir()):
        yield ["check", path, "--encoder", encoder]
        yield ["convert", path, folders.output / "data.json"]
        yield ["convert", path, folders.output / "rows.jsonl", "--on-bad-answer", "skip"]


def _one_file_kind(name: str, file: str, data: bytes, structure: str = "") -> Kind:
    def sound(folder: Path, _: Path) -> None:
        (folder / file).write_bytes(data)

    def damages(files: Files) -> Iterator[Damage]:
        yield from damage_file(file, data, structure=structure)

    return Kind(name, sound, damages, read_data, reports=True)


def _json_lines() -> Kind:
    data = "".join(json.dumps(row) + "\n" for row in ROWS).encode()

    def damages(files: Files) -> Iterator[Damage]:
        yield from damage_file("rows.jsonl", data, structure="text")
        for name, row in broken_json(ROWS[0]):
            yield Damage(f"rows.jsonl: {name}", "rows.jsonl", row + b"\n" + json.dumps(ROWS[1]).encode())

    return Kind("jsonl", lambda folder, _: _write(folder / "rows.jsonl", data), damages, read_data, reports=True)


def csv_text(delimiter: str = ",") -> str:
    """Return the rows as CSV."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(ROWS[0]), delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(ROWS)
    return file.getvalue()


def _tables() -> Kind:
    def sound(folder: Path, _: Path) -> None:
        (folder / "rows.csv").write_text(csv_text())

    def damages(files: Files) -> Iterator[Damage]:
        for delimiter in (",", ";", "\t"):
            text = csv_text(delimiter)
            for damage in damage_file("rows.csv", text.encode(), structure="text"):
                yield Damage(f"{damage.name}, separated by {delimiter!r}", damage.file, damage.content)
            lines = text.splitlines()
            for number, line in enumerate(lines):
                for name, changed in {
                    "missing": [],
                    "twice": [line, line],
                    "with a quote": [f'"{line}'],
                    "with more cells": [f"{line}{delimiter * 5}"],
                    "with fewer cells": [line.partition(delimiter)[0]],
                    "of one long cell": ["x" * 200_000],
                    "with zeros": [f"{line}\0\0"],
                }.items():
                    new = "\n".join([*lines[:number], *changed, *lines[number + 1 :]])
                    yield Damage(f"rows.csv: line {number} {name}, by {delimiter!r}", "rows.csv", new.encode())

    return Kind("csv", sound, damages, read_data, reports=True)


def _predictions() -> Kind:
    files = {
        "predictions.json": {"a": "Huygens", "b": ""},
        "null_odds.json": {"a": -3.5, "b": 2.0},
        "na_prob.json": {"a": 0.2, "b": 0.9},
    }

    def sound(folder: Path, beside: Path) -> None:
        for name, table in files.items():
            (folder / name).write_text(json.dumps(table))
        (folder / "submission.csv").write_text("Id,Predicted\na,Huygens\nb,\n")
        (beside / "data.json").write_text(json.dumps(squad()))

    def damages(found: Files) -> Iterator[Damage]:
        for name in files:
            yield from damage_file(name, found[name], structure="json")
        yield from damage_file("submission.csv", found["submission.csv"], structure="text")

    def commands(folders: Folders) -> Iterator[list[object]]:
        data, given = folders.beside / "data.json", folders.inputs
        yield ["evaluate", data, given / "predictions.json", "--null-odds", given / "null_odds.json", "--json"]
        yield ["evaluate", data, given / "predictions.json", "--na-prob", given / "na_prob.json"]
        yield ["evaluate", data, given / "submission.csv", "--missing", "empty", "--json"]

    return Kind("predictions", sound, damages, commands)


def _run_files() -> Kind:
    table = RunConfig().model_dump(by_alias=True, exclude_none=True)
    table["data"] |= {"train": "demo:train", "dev": "demo:dev"}

    def sound(folder: Path, _: Path) -> None:
        (folder / "run.toml").write_text(dump_toml(table))

    def damages(files: Files) -> Iterator[Damage]:
        yield from damage_file("run.toml", files["run.toml"], structure="text")
        for name, changed in broken_toml(table):
            yield Damage(f"run.toml: {name}", "run.toml", changed)

    def commands(folders: Folders) -> Iterator[list[object]]:
        yield ["sweep", folders.inputs / "run.toml", "--out", folders.output, "--list"]

    return Kind("run files", sound, damages, commands)


def _sweep_files() -> Kind:
    tables = {
        "grid.toml": {
            "extends": "base.toml",
            "grid": {"learner": {"seed": [0, 1], "mixer": ["last", "dot"]}, "encoder": {"dropout": [0.1, 0.2]}},
        },
        "runs.toml": {
            "extends": ["base.toml"],
            "run": [
                {"name": "first", "encoder": {"tuning": {"name": "top_k", "k": 3}}, "training": {"save_at": [0.5]}},
                {"name": "second", "encoder": {"from": "first@0.5", "tuning": "frozen"}, "learner": {"mixer": "dot"}},
            ],
            "derived": {"copies": ["first@0.5"], "ensembles": [{"name": "both", "members": ["first", "second"]}]},
        },
    }

    def sound(folder: Path, _: Path) -> None:
        (folder / "base.toml").write_text('[data]\ntrain = "demo:train"\ndev = "demo:dev"\n')
        for file, table in tables.items():
            (folder / file).write_text(dump_toml(table))

    def damages(files: Files) -> Iterator[Damage]:
        for file, data in files.items():
            yield from damage_file(file, data, structure="text")
        for file, table in tables.items():
            for name, changed in broken_toml(table):
                yield Damage(f"{file}: {name}", file, changed)

    def commands(folders: Folders) -> Iterator[list[object]]:
        for file in tables:
            yield ["sweep", folders.inputs / file, "--out", folders.output, "--list", "--json"]

    return Kind("sweep files", sound, damages, commands)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def data_kinds() -> Iterator[Kind]:
    """Yield the kinds of data files, predictions and run files."""
    for file, document in DOCUMENTS.items():
        yield _one_file_kind(
            file.removesuffix(".json"), file, json.dumps(document, ensure_ascii=False).encode(), "json"
        )
    yield _json_lines()
    yield _tables()
    yield _one_file_kind("gzip", "data.json.gz", gzip.compress(json.dumps(squad()).encode(), mtime=0))
    yield _predictions()
    yield _run_files()
    yield _sweep_files()
