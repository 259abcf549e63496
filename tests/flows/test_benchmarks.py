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
from lamella.models.model import ReaderModel
from rounded_encoders import change_file, round_weights
from trained_readers import save_trained

ROOT = Path(__file__).resolve().parents[2]
RUNNERS = {"bench", "limits"}  # run or describe the others
BENCHMARKS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in RUNNERS)
every_script = pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
every_benchmark = pytest.mark.parametrize(
    "path",
    [path for path in BENCHMARKS if path.stem not in ("long_run", "rounded_base", "trust")],
    ids=lambda path: path.stem,
)


@pytest.fixture(autouse=True)
def _beside_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import what the benchmarks share as they do: from their own folder."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_every_benchmark_is_run_or_listed_with_the_reason_why_not() -> None:
    from suite import catalogue

    run = {Path(each.file).stem for each in catalogue.BENCHMARKS}
    assert not run & set(catalogue.APART)
    assert run | set(catalogue.APART) == {path.stem for path in BENCHMARKS}


def test_the_page_is_made_from_the_results() -> None:
    from suite.page import page

    assert (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8") == page(ROOT / "results" / "benchmarks")


def test_the_floor_is_in_the_unit_of_the_time() -> None:
    from suite.work import floor

    limits = {"cores": 2, "flops": {"fp32": {"1": 10.0, "2": 20.0}}, "bytes": {"1": 5.0, "2": 5.0}, "start": 0.5}
    work = {"flops": 40, "bytes": 5, "starts": 1, "threads": 2}  # products 2 s, traffic 1 s beside them, start 0.5 s
    assert floor({"work": work, "ours": 10.0, "unit": "s"}, limits) == {"floor": 2.5, "share": 0.25}
    assert floor({"work": work, "ours": 5000.0, "unit": "CPU ms per question"}, limits) == {"floor": 2500, "share": 0.5}
    assert floor({"work": work, "ours": 0.1, "unit": "windows/s"}, limits) == {"floor": 0.4, "share": 0.25}
    assert floor({"work": {"seconds": 1.0}, "ours": 4.0, "unit": "s"}, limits) == {"floor": 1.0, "share": 0.25}


def test_the_page_states_missed_goals_and_disturbed_results(tmp_path: Path) -> None:
    from lamella.files import read_json, write_json
    from suite.page import page

    for name in ("limits", "mixers"):
        found = read_json(ROOT / "results" / "benchmarks" / f"{name}.json")
        write_json(tmp_path / f"{name}.json", found | {"others": 0.0})
    quiet = read_json(tmp_path / "mixers.json") | {"ratio": 3.0, "others": 0.0}
    write_json(tmp_path / "mixers.json", quiet)
    assert "**missed by 25 %**" in page(tmp_path)
    assert "**Other programs used" not in page(tmp_path)
    assert "- **No result yet**: ask, inference" in page(tmp_path)
    write_json(tmp_path / "mixers.json", quiet | {"ratio": 8.0, "others": 1.5})
    assert "at least 4](concepts/heads.md#what-a-mixer-costs): met" in page(tmp_path)
    assert "**Other programs used 1.5 to 1.5 cores meanwhile.**" in page(tmp_path)


def test_the_page_fits_the_processor_that_it_was_made_on(tmp_path: Path) -> None:
    from lamella.files import read_json, write_json
    from suite.page import page

    found = {name: read_json(ROOT / "results" / "benchmarks" / f"{name}.json") for name in ("limits", "inference")}
    write_json(tmp_path / "inference.json", found["inference"])
    kinds = {
        "**ARM with dot products, without bf16**": {"machine": "aarch64", "instructions": ["asimddp"]},
        "**ARM with bf16**": {"machine": "aarch64", "instructions": ["asimddp", "i8mm", "bf16"]},
        "**x86 with AMX**": {"machine": "x86_64", "instructions": ["avx512f", "amx_bf16"]},
        "**x86 without AMX**": {"machine": "x86_64", "instructions": ["avx2"]},
    }
    for name, limits in kinds.items():
        write_json(tmp_path / "limits.json", found["limits"] | limits)
        (line,) = (line for line in page(tmp_path).splitlines() if "The table above has the numbers." in line)
        assert line.startswith(f"- {name}")


def test_the_page_shows_another_machine(tmp_path: Path) -> None:
    from lamella.files import read_json, write_json
    from suite.page import page

    for name in ("limits", "mixers"):
        found = read_json(ROOT / "results" / "benchmarks" / f"{name}.json")
        write_json(tmp_path / f"{name}.json", found)
        other = {"machine": "x86_64", "instructions": ["amx_bf16"], "ratio": 7.5, "seconds": 60.0}
        write_json(tmp_path / "another" / f"{name}.json", found | other)
    text = page(tmp_path)
    first, _, second = text.partition("## Results on x86 with AMX")
    assert "[mixers](#mixers) | 7.5 times as fast" in second
    assert "[mixers](#mixers) | 7.5 times as fast" not in first
    assert "instructions for matrix products: amx_bf16" in second


def test_the_page_needs_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", "--results", str(tmp_path), "--page", str(tmp_path / "page.md")])
    with pytest.raises(SystemExit, match=r"expected limits\.json, found none"):
        runpy.run_path(str(ROOT / "benchmarks" / "bench.py"), run_name="__main__")


def test_the_page_states_of_how_many_runs_it_is_made() -> None:
    from suite.page import how_long

    def result(before: float, after: float) -> dict[str, object]:
        return {"load": [before, after], "seconds": 60.0}

    assert how_long([result(1.5, 2.0), result(2.0, 1.0)]) == "Its results come from one run of 2 minutes."
    several = "Its results come from 2 runs, which took 3 minutes in all."
    assert how_long([result(1.5, 2.0), result(2.0, 1.0), result(1.1, 1.0)]) == several


def test_the_page_derives_its_verdicts_from_the_numbers() -> None:
    from suite.catalogue import BENCHMARKS
    from suite.elsewhere import answering, batching, serving
    from suite.page import goal, single_request

    row = {"encoder": "a", "windows": 1, "tokens": 10, "before": 10.0, "ours": 4.0}
    assert "| 2.5 | **missed by 50 %** |" in answering({"goal": 5, "source": "", "rows": [row]})
    assert "| 2.5 | met |" in answering({"goal": 2, "source": "", "rows": [row]})
    row = {"reader": "a", "encoder": "b", "ours": 40.0, "peer": 10.0, "ratio": 4.0, "spread": [3.0, 5.0]}
    assert "| 4.0 (3.0 to 5.0) | **missed by 20 %** |" in serving(
        {"goal": 5, "clients": 2, "source": "", "rows": [row]}
    )
    found = {"ratio": 1.0, "spread": [0.9, 1.1], "clients": 8, "goal": "at least 1.25 x"}
    assert "8 clients 1.00 times" in batching(found)
    assert "of a goal of 1.25: **missed by 20 %**" in batching(found)
    assert single_request({"more": 7.5, "goal": "at most 5 ms more"}).endswith("of at most 5: **missed by 50 %**.")
    (stages,) = (each for each in BENCHMARKS if each.name == "stages")
    of_encoder = {"a": {"stages": {"read": {"of_encoder": 0.1}, "write": {"of_encoder": 1.5}}}}
    assert goal(stages, {"ratio": 0.4, "data": of_encoder}).endswith(": **missed by 50 %** (1.5 on `a`)")


def test_the_page_compares_each_way_to_run_a_reader_with_its_goal_and_bound() -> None:
    from suite.page import variants

    way = {"per_second": 30.0, "ratio": 3.0, "spread": [2.9, 3.1], "alone_ms": 9.0, "f1": 50.0}
    inference = {
        "variants": {
            "peer": way | {"per_second": 10.0},
            "auto": way | {"backend": "onnx", "precision": "fp32"},
            "int8": way | {"backend": "onnx", "precision": "int8"},
        },
        **{"peer": 10.0, "peer_versions": {"transformers": "4.57"}, "work": {"flops": 1e9, "threads": 2}},
    }
    limits = {"cores": 2, "flops": {"fp32": {"2": 40e9}, "int8": {"2": 90e9}}, "bytes": {"2": 1e9}, "start": 1.0}
    rows = variants(inference, limits).splitlines()[2:]
    assert rows == [
        "| pipeline of transformers 4.57 | 10 | 1 |  |  | 9 | 50.0 |",
        "| auto, which is the graph in fp32 | 30 | 3.00 (2.90 to 3.10) | at least 2.5: met | 4.0 | 9 | 50.0 |",
        "| the graph in int8 | 30 | 3.00 (2.90 to 3.10) | at least 4: **missed by 25 %** | 9.0 | 9 | 50.0 |",
    ]


def test_results_of_two_machines_are_not_mixed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lamella.files import write_json

    elsewhere = {"cores": 64, "machine": "riscv64", "processor": "", "instructions": []}
    write_json(tmp_path / "limits.json", elsewhere)
    monkeypatch.setattr(sys, "argv", ["bench.py", "mixers", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match="has results of another machine; give another folder"):
        runpy.run_path(str(ROOT / "benchmarks" / "bench.py"), run_name="__main__")
    assert [path.name for path in tmp_path.iterdir()] == ["limits.json"]


def test_the_features_of_peers_are_pinned_to_the_versions_that_were_recorded() -> None:
    folder = ROOT / "benchmarks" / "peers"
    peers = runpy.run_path(str(folder / "features.py"))
    recorded = json.loads((folder / "features.json").read_text(encoding="utf-8"))["tools"]
    for tool, packages in peers["PACKAGES"].items():
        pinned = dict(package.split("==") for package in (peers["TORCH"], *packages))
        found = {name: version.partition("+")[0] for name, version in recorded[tool]["versions"].items()}
        assert pinned == found, tool


def test_the_runner_refuses_an_unknown_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", "speed"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "benchmarks" / "bench.py"), run_name="__main__")
    assert ended.value.code == 2
    assert "got speed" in capsys.readouterr().err


@every_script
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
    for other in ({}, {"encoder": "b"}, {"batch_size": 48}, {"device": "GPU"}, {"compile": True}):
        file.write_text(json.dumps(with_row(file, {**row, **other})))
    before = json.loads(file.read_text())
    assert len(before) == 5
    after = with_row(file, {**row, "encoder": "b", "compile": False, "ours": 2.0})
    assert [row["ours"] for row in after] == [1.0, 2.0, 1.0, 1.0, 1.0]
    assert [after[0], *after[2:]] == [before[0], *before[2:]]


def test_the_file_of_results_is_as_the_benchmark_writes_it(tmp_path: Path) -> None:
    from lamella.files import write_json

    results = ROOT / "results" / "speed.json"
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
    assert found["unit"]
    assert found["work"]["of"]
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
    arguments = ["--model", reader, "--device", "cpu", "--quick", "--card", "--out", tmp_path / "out.json"]
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
    (fact,) = ReaderModel.load(reader).facts.rounded_base
    assert fact.changed == pytest.approx(100 * result["files"][0]["changed"]["mean"], abs=0.01)
