"""Kinds of run folders and result files, as the study commands read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from broken.damage import Damage
from broken.json_damage import broken_json
from broken.kind import Files, Folders, Kind, damage_file
from broken.oracle import run_command
from made_runs import QUESTIONS, make_run
from samples import HAS_TORCH

COST: dict[str, Any] = {
    "trainable_parameters": 100,
    "total_parameters": 1000,
    "trainable_percent_of_encoder": 10.0,
    "model_bytes": 4000,
    "device": "cpu",
    "precision": "fp32",
    "train_seconds": 3.0,
    "peak_memory_bytes": 1 << 28,
    "inference_seconds_per_1000": 2.5,
    "inference_flops_per_window": 1e9,
}

ASKED = QUESTIONS[1:3]  # one with an answer, one without


def _make_run(folder: Path, data: Path, **options: Any) -> None:
    """Write a run folder with n-best lists."""
    scores = dict.fromkeys(("exact", "f1", "best_f1", "HasAns_f1", "NoAns_f1"), 100.0)
    make_run(folder, data=data, cost=COST, scores=scores, questions=ASKED, **options)
    lists = {}
    for id, _, context, answer in ASKED:
        text = answer or "Titan"
        place = context.index(text)
        found = {"text": text, "probability": 0.6, "score": 3.0, "start": place, "end": place + len(text)}
        lists[id] = [found, {"text": "", "probability": 0.4, "score": 2.5, "start": 0, "end": 0}]
    (folder / "nbest_predictions.json").write_text(json.dumps(lists))


def _runs() -> Kind:
    """Return run folders beside a sound one."""

    def sound(folder: Path, beside: Path) -> None:
        weights = ([[0.1, 0.2, 0.7]] * 2, [1.0, 1.0])
        _make_run(beside / "other", beside / "dev.json", mixer="last", seed=1)
        _make_run(folder / "run", beside / "dev.json", weights=weights)

    def damages(files: Files) -> Iterator[Damage]:
        for file, data in files.items():
            structure = {".json": "json", ".safetensors": "safetensors"}.get(Path(file).suffix, "text")
            yield from damage_file(file, data, structure=structure)
        record = json.loads(files["run/history.jsonl"].splitlines()[-1])
        first = files["run/history.jsonl"].splitlines(keepends=True)[:-1]
        for name, line in broken_json(record):
            yield Damage(f"run/history.jsonl: {name}", "run/history.jsonl", b"".join([*first, line, b"\n"]))

    def commands(folders: Folders) -> Iterator[list[object]]:
        both = [folders.inputs / "run", folders.beside / "other"]
        yield ["compare", *both, "--json"]
        yield ["compare", *both, "--keep", folders.output]
        yield ["recommend", *both, "--max-ms", "5"]
        if HAS_TORCH:
            yield ["analyse", *both, "--sample", "0", "--out", folders.output]
        yield ["report", *both, "--out", folders.output / "report.html"]
        yield ["report", *both, "--out", folders.output / "report.md"]

    return Kind("run folders", sound, damages, commands)


def _results() -> Kind:
    def sound(folder: Path, beside: Path) -> None:
        _make_run(beside / "run", beside / "dev.json", weights=([[0.1, 0.2, 0.7]] * 2, [1.0, 1.0]))
        _make_run(beside / "other", beside / "dev.json", mixer="last", seed=1)
        outcome = run_command(["compare", beside / "run", "--keep", folder / "result.json"])
        assert outcome.code == 0, outcome

    def damages(files: Files) -> Iterator[Damage]:
        data = files["result.json"]
        yield from damage_file("result.json", data, structure="json")
        unhashed = {key: value for key, value in json.loads(data).items() if key != "sha256"}
        for name, changed in broken_json(unhashed):
            yield Damage(f"result.json without hash: {name}", "result.json", changed)

    def commands(folders: Folders) -> Iterator[list[object]]:
        both = [folders.inputs / "result.json", folders.beside / "other"]
        yield ["compare", *both]
        yield ["recommend", *both, "--max-params", "5000", "--json"]
        yield ["report", *both, "--out", folders.output / "report.html"]
        yield ["report", *both, "--out", folders.output / "report.md"]

    return Kind("result files", sound, damages, commands)


def run_kinds() -> Iterator[Kind]:
    """Yield the kinds of run folders and result files."""
    yield _runs()
    yield _results()
