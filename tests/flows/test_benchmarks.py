"""Every file in benchmarks/: the options they share, and what they write."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from doubles import save_tiny_encoder
from rounded_encoders import change_file, round_weights
from trained_readers import save_trained

BENCHMARKS = sorted((Path(__file__).resolve().parents[2] / "benchmarks").glob("*.py"))
every_benchmark = pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)


def test_there_are_benchmarks() -> None:
    assert {"featurise", "metric", "mixers"} <= {path.stem for path in BENCHMARKS}


@every_benchmark
def test_it_has_the_shared_options(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"python benchmarks/{path.name} " in text
    assert "--quick" in text
    assert "--out" in text


def test_speeds_of_several_encoders_are_rows_of_one_file(tmp_path: Path) -> None:
    with_row = runpy.run_path(str(BENCHMARKS[0].with_name("train_speed.py")))["with_row"]
    file, row = tmp_path / "speed.json", {"encoder": "a", "device": "cpu", "batch_size": 12, "ours": 1.0}
    assert with_row(file, row) == row
    file.write_text(json.dumps({"encoder": "z"}))
    assert with_row(file, row) == row
    file.write_text("[]")
    for added in (row, {**row, "encoder": "b"}, {**row, "batch_size": 48}, {**row, "device": "GPU"}):
        file.write_text(json.dumps(with_row(file, added)))
    before = json.loads(file.read_text())
    assert len(before) == 4
    after = with_row(file, {**row, "encoder": "b", "ours": 2.0})
    assert [row["ours"] for row in after] == [1.0, 2.0, 1.0, 1.0]
    assert [after[0], *after[2:]] == [before[0], *before[2:]]


def test_the_file_of_results_is_as_the_benchmark_writes_it(tmp_path: Path) -> None:
    from lamella.files import write_json

    results = BENCHMARKS[0].parents[1] / "results" / "speed.json"
    with_row = runpy.run_path(str(results.parents[1] / "benchmarks" / "train_speed.py"))["with_row"]
    (tmp_path / "speed.json").write_text("[]")
    for row in json.loads(results.read_text(encoding="utf-8")):
        write_json(tmp_path / "speed.json", with_row(tmp_path / "speed.json", row))
    assert (tmp_path / "speed.json").read_bytes() == results.read_bytes()


@pytest.mark.slow
@every_benchmark
def test_a_quick_run_prints_its_ratio_last_and_writes_the_numbers(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "numbers.json"
    done = subprocess.run(
        [sys.executable, str(path), "--quick", "--out", str(out)], capture_output=True, text=True, check=True
    )
    found = json.loads(out.read_text(encoding="utf-8"))
    low, high = found["spread"]
    assert 0 < low <= found["ratio"] <= high
    assert low < high  # several repeats, never quite alike
    assert found["ours"] > 0
    assert found["peer"] > 0
    assert found["versions"]
    headline = done.stdout.splitlines()[-1]
    assert headline.startswith(f"{path.stem}: ")
    assert any(
        f"{found['ratio']:.{digits}f} x" in headline and f"({low:.{digits}f} to {high:.{digits}f})" in headline
        for digits in (1, 2)
    )


def test_a_draw_of_the_original_rounds_back_to_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = change_file(save_tiny_encoder(tmp_path / "encoder", num_hidden_layers=1), round_weights)
    reader = save_trained(tmp_path / "reader", encoder, encoder={"tuning": "lora"})
    path = BENCHMARKS[0].with_name("rounded_base.py")
    arguments = ["--model", reader, "--device", "cpu", "--quick", "--out", tmp_path / "out.json"]
    monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
    script = runpy.run_path(str(path), run_name="__main__")

    copy = {name: value.numpy() for name, value in load_file(encoder / "model.safetensors").items()}
    draw, steps = {name: value.copy() for name, value in copy.items()}, {n: script["steps_of"](copy[n]) for n in copy}
    script["shift"](draw, steps, seed=1)
    for name, value in copy.items():
        if value.ndim == 2:
            assert np.abs(draw[name] - value).max() > 0.45 * steps[name].min()
            np.testing.assert_allclose(np.round(draw[name] / steps[name]) * steps[name], value, atol=1e-6)
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["draws"], result["files"][0]["questions"]) == (2, 16)
    assert 0.3 < result["difference"]["in_all"] < 1 < result["difference"]["largest"] < 1.74
    assert 0 <= result["files"][0]["changed"]["smallest"] <= result["files"][0]["changed"]["largest"] < 1
    assert "of the answers differ" in capsys.readouterr().out
