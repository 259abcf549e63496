"""The HTML report: what it reads and shows, and that it is one small file that loads nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamella.errors import UnreadableError, UsageError
from lamella.study.report.answers import SAMPLES, reliability
from lamella.study.report.collect import WITHOUT_LAYERS, collect
from lamella.study.report.curves import CURVE_POINTS
from lamella.study.report.html import render
from lamella.study.report.write import write_report
from made_runs import QUESTIONS, make_run
from run_folders import write_data, write_run
from samples import needs_torch

Lamella = Callable[..., tuple[int, str, str]]


def embedded(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="content">(.*?)</script>', page, re.DOTALL)
    assert match
    content = json.loads(match[1])
    assert isinstance(content, dict)
    return content


def test_the_report_of_one_run_is_one_file_that_loads_nothing(tmp_path: Path, lamella: Lamella) -> None:
    make_run(tmp_path / "run")
    code, out, err = lamella("report", tmp_path / "run", "--out", tmp_path / "report.html")
    assert (code, err) == (0, "")
    assert "1 run," in out
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "default-src 'none'" in page
    outside = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)  # the scripts are bound by the policy
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#|data:,)""", outside)
    assert "url(" not in outside
    content = embedded(page)
    assert [run["name"] for run in content["runs"]] == ["run"]


def test_json_describes_what_was_written(tmp_path: Path, lamella: Lamella) -> None:
    make_run(tmp_path / "run")
    code, out, _ = lamella("report", tmp_path / "run", "--out", tmp_path / "report.html", "--json")
    written = json.loads(out)
    assert code == 0
    assert written["runs"] == 1
    assert written["bytes"] == (tmp_path / "report.html").stat().st_size


def test_a_folder_of_runs_shows_the_options_that_differ(tmp_path: Path) -> None:
    for seed in range(3):
        make_run(tmp_path / "all" / f"dot-seed{seed}", seed=seed)
    content = collect([tmp_path / "all", tmp_path / "all" / "dot-seed1"])
    assert [run["name"] for run in content["runs"]] == ["dot-seed0", "dot-seed1", "dot-seed2"]
    assert content["varied"] == ["learner.seed"]
    assert [run["options"] for run in content["runs"]] == [{"learner.seed": seed} for seed in range(3)]


def test_runs_with_the_same_name_get_their_parent_folders(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        make_run(tmp_path / parent / "dot")
    assert [run["name"] for run in collect([tmp_path / "a", tmp_path / "b"])["runs"]] == ["a/dot", "b/dot"]


def test_answers_are_counted_as_by_hand(tmp_path: Path) -> None:
    """Five questions, two of them unanswerable: one of each right, one partly right, one abstained."""
    make_run(
        tmp_path / "run",
        predictions={"q0": "Huygens", "q1": "the probe Huygens", "q2": "", "q3": "Saturn", "q4": ""},
        na_prob={"q0": 0.1, "q1": 0.2, "q2": 0.8, "q3": 0.4, "q4": 0.9},
        questions=QUESTIONS[:5],
    )
    run = collect([tmp_path / "run"])["runs"][0]
    assert run["confusion"] == {
        "answered, exactly right": 1,
        "answered, not exactly right": 1,
        "abstained although there is an answer": 1,
        "abstained correctly": 1,
        "answered an unanswerable question": 1,
    }
    words = {row["group"]: (row["questions"], row["exact"], row["f1"]) for row in run["groups"]["question word"]}
    # "the" is dropped, so "probe huygens" shares one of two words with "huygens": 2·½·1 / (½ + 1).
    assert words == {"what": (2, 50.0, 83.3333), "when": (1, 0.0, 0.0), "who": (2, 50.0, 50.0)}
    answered = {row["group"]: (row["questions"], row["answered"]) for row in run["groups"]["answerable"]}
    assert answered == {"has an answer": (3, 66.6667), "has no answer": (2, 50.0)}
    # Most confident first: q0 right, q1 two thirds, then nothing more; three answers in all.
    assert run["precision_recall"]["recall"] == pytest.approx([100 / 3, *[500 / 9] * 4], abs=1e-3)
    assert run["precision_recall"]["precision"] == pytest.approx([100, 250 / 3, 500 / 9, 125 / 3, 100 / 3], abs=1e-3)
    assert run["reliability"]["predicted"] == [10, 20, 40, 80, 90]
    assert run["reliability"]["observed"] == [0, 0, 100, 100, 0]
    assert run["reliability"]["ece"] == pytest.approx(100 * (0.1 + 0.2 + 0.6 + 0.2 + 0.9) / 5)


def test_questions_with_the_same_probability_share_their_outcome_in_the_calibration_plot() -> None:
    """A reader that always says 50 % is calibrated on these questions, whatever their order in the file."""
    drawn = reliability(np.full(100, 0.5), np.arange(100) >= 50)
    assert drawn["observed"] == [50] * 10
    assert drawn["ece"] == 0


@needs_torch
def test_layer_weights_are_gamma_times_w_as_the_mixer_applies_them(tmp_path: Path) -> None:
    w, gamma = np.array([[0.1, 0.2, 0.3], [0.0, 1.0, 2.0]]), np.array([2.0, 1.0])
    make_run(tmp_path / "plain", weights=(w, gamma))
    make_run(tmp_path / "soft", weights=(w, gamma), normalise="softmax")
    plain, soft = (run["layers"] for run in collect([tmp_path / "plain", tmp_path / "soft"])["runs"])
    assert plain == {"numbers": [1, 2, 3], "weights": {"start": [0.2, 0.4, 0.6], "end": [0.0, 1.0, 2.0]}}
    assert sum(soft["weights"]["start"]) == pytest.approx(2)
    assert soft["weights"]["end"][2] == pytest.approx(np.e**2 / (1 + np.e + np.e**2), abs=1e-4)


def test_parameters_come_from_cost_json_or_from_the_saved_model(tmp_path: Path) -> None:
    weights = (np.ones((2, 3)), np.ones(2))
    make_run(tmp_path / "counted", weights=weights)
    make_run(tmp_path / "recorded", weights=weights, cost={"trainable_parameters": 1000, "train_seconds": 5.0})
    counted, recorded = collect([tmp_path / "counted", tmp_path / "recorded"])["runs"]
    assert counted["cost"] == {"parameters": 8, "train_seconds": 60}
    assert recorded["cost"] == {"parameters": 1000, "train_seconds": 5}


def test_a_long_history_is_averaged_over_stretches(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=10 * CURVE_POINTS, evaluations=3 * CURVE_POINTS)
    curve = collect([tmp_path / "run"])["runs"][0]["curve"]
    assert len(curve["loss"]) == CURVE_POINTS
    assert curve["step"][0] == 5.5  # of steps 1 to 10
    assert len(curve["evaluations"]["f1"]) == len(curve["evaluations"]["step"]) == CURVE_POINTS


def test_a_curve_has_the_parts_of_the_loss(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=0)
    steps = [{"event": "step", "step": n, "epoch": n / 2, "loss": 3.0, "start": 1.0, "distillation": n} for n in (1, 2)]
    history = "".join(json.dumps({**step, "learning_rate": 1e-3}) + "\n" for step in steps)
    (tmp_path / "run" / "history.jsonl").write_text(history, encoding="utf-8")
    curve = collect([tmp_path / "run"])["runs"][0]["curve"]
    assert curve["parts"] == {"start": [1.0, 1.0], "distillation": [1.0, 2.0]}
    assert curve["loss"] == [3.0, 3.0]


def test_runs_with_different_fractions_share_a_line(tmp_path: Path) -> None:
    for fraction in (0.1, 1.0):
        for seed in (0, 1):
            for mixer in ("last", "dot"):
                make_run(tmp_path / f"{mixer}-{fraction}-{seed}", mixer=mixer, fraction=fraction, seed=seed)
    records = collect([tmp_path])["runs"]
    assert {(run["alike"], run["fraction"]) for run in records} == {
        (mixer, fraction) for mixer in ("last", "dot") for fraction in (0.1, 1.0)
    }


def test_the_seeds_of_a_head_share_a_line_of_fractions_beside_the_run_under_them(tmp_path: Path) -> None:
    """Each seed reads the encoder of its own seed, and one run is newer than the others."""
    for seed in (0, 1, 2):
        make_run(tmp_path / f"bert-seed{seed}", mixer="last", seed=seed)
        for fraction in (0.1, 1.0):
            head = tmp_path / f"head-fraction{fraction}-seed{seed}"
            make_run(head, mixer="dot", fraction=fraction, seed=seed)
            config = json.loads((head / "config.json").read_text("utf-8"))
            config["encoder"] = {"name": f"/private/runs/bert-seed{seed}/model"}
            if seed == 1:
                config["training"] |= {"compile": False, "checkpoint_every": 50.0}
            (head / "config.json").write_text(json.dumps(config), "utf-8")
    records = collect([tmp_path])["runs"]
    assert {(run["alike"], run["fraction"], run["base"]) for run in records} == {
        ("dot", 0.1, "bert"), ("dot", 1.0, "bert"), (None, 1.0, None)
    }  # fmt: skip


def test_scripts_in_texts_are_shown_and_never_executed(tmp_path: Path) -> None:
    bad = "</script><script>alert(1)</script>"
    make_run(
        tmp_path / "run", predictions={"q0": bad, "q1": "\u2028\ud800", "q2": "", "q3": ""}, questions=QUESTIONS[:4]
    )
    written = write_report([tmp_path / "run"], tmp_path / "report.html", title=f"<b>{bad}")
    page = (tmp_path / "report.html").read_text("utf-8")
    assert bad not in page
    assert page.count("</script>") == 3
    assert written["bytes"] > 1_000_000
    assert bad in [answer["text"] for answer in embedded(page)["runs"][0]["answers"]]


def test_a_placeholder_in_the_data_stays_text() -> None:
    content: dict[str, Any] = {"runs": [{"name": "@script@ @style@"}], "notes": []}
    page = render(content, title="@content@")
    assert embedded(page)["runs"] == content["runs"]
    assert "<h1>@content@</h1>" in page


def test_the_report_of_a_hundred_runs_is_below_8_mb(tmp_path: Path) -> None:
    long = "A quite long context of a paragraph, with many words. " * 200
    questions = [(f"q{row}", f"What is number {row}?", long, "quite long") for row in range(300)]
    layers = (np.random.default_rng(0).normal(size=(2, 24)), np.ones(2))
    for number in range(100):
        make_run(
            tmp_path / "all" / f"a-run-with-quite-a-long-name-learning_rate0.001-{number}",
            seed=number,
            steps=2000,
            evaluations=100,
            weights=layers,
            questions=questions,
            predictions={id: f"an answer of some length {number}" for id, *_ in questions},
            na_prob={id: (row + number) % 97 / 97 for row, (id, *_) in enumerate(questions)},
            data=tmp_path / "dev.json",
        )
    written = write_report([tmp_path / "all"], tmp_path / "report.html")
    assert written["runs"] == 100
    assert 2_000_000 < written["bytes"] < 8_000_000
    content = embedded((tmp_path / "report.html").read_text("utf-8"))
    (samples,) = content["samples"]
    assert len(samples) == SAMPLES
    assert all(len(sample["context"]) <= 1500 for sample in samples)


def test_a_gold_answer_keeps_its_position_in_a_cut_context(tmp_path: Path) -> None:
    text = "x " * 3000 + "Huygens" + " y" * 3000
    make_run(tmp_path / "run", questions=[("q0", "Who?", text, "Huygens")], predictions={"q0": "Huygens"})
    (samples,) = collect([tmp_path / "run"])["samples"]
    (begin, end) = samples[0]["spans"][0]
    assert samples[0]["context"][begin:end] == "Huygens"
    assert samples[0]["cut"] == [True, True]


def test_without_torch_the_report_is_written_with_a_note(tmp_path: Path) -> None:
    """In a process of its own, in which torch cannot be imported."""
    for name in ("a", "b"):
        make_run(tmp_path / name, weights=(np.ones((2, 3)), np.ones(2)))
    script = (
        "import json, sys; sys.modules['torch'] = None; from lamella.study.report.collect import collect; "
        "content = collect(sys.argv[1:]); "
        "print(json.dumps([content['notes'][0], [run['layers'] for run in content['runs']]]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "a", tmp_path / "b"], capture_output=True, text=True, check=True
    )
    assert json.loads(ended.stdout) == [WITHOUT_LAYERS, [None, None]]


def test_without_the_data_the_rest_is_shown_with_a_note(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "dev.json").unlink()
    content = collect([tmp_path / "run"])
    assert "confusion" not in content["runs"][0]
    assert content["runs"][0]["scores"]["f1"] == 50
    assert any("dev.json" in note for note in content["notes"])


def test_a_run_of_evaluate_is_compared_with_the_data_in_its_record(tmp_path: Path) -> None:
    """As `evaluate` and `predict` write it: without options, with the data in its record."""
    data = write_data(tmp_path / "held-out.json", 4)
    write_run(tmp_path / "run", data, [1, 1, 1, 0])
    content = collect([tmp_path / "run"])
    (run,) = content["runs"]
    assert (run["data"], run["questions"]) == ("held-out.json", 4)
    assert run["confusion"]["answered, exactly right"] == 3
    assert len(content["samples"][0]) == 4
    assert content["notes"] == []


def test_the_report_does_not_reveal_folders(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name, data=tmp_path / f"{name}.json")
    write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text("utf-8")
    assert str(tmp_path) not in page
    assert [run["data"] for run in embedded(page)["runs"]] == ["a.json", "b.json"]
    assert [run["data_set"] for run in embedded(page)["runs"]] == [0, 1]


def test_an_unfinished_run_is_noted(tmp_path: Path) -> None:
    make_run(tmp_path / "run", state="unfinished")
    assert any("Not finished" in note for note in collect([tmp_path / "run"])["notes"])


def test_a_usage_error_is_one_line_and_writes_nothing(tmp_path: Path, lamella: Lamella) -> None:
    make_run(tmp_path / "run")
    unrelated = tmp_path / "unrelated.json"
    make_run(tmp_path / "elsewhere", data=unrelated, questions=[("z9", "Who?", "Huygens.", "Huygens")])
    (tmp_path / "empty").mkdir()
    (tmp_path / "there.html").write_text("mine")
    out = tmp_path / "report.html"
    for arguments in (
        [tmp_path / "absent", "--out", out],
        [tmp_path / "empty", "--out", out],
        [tmp_path / "run", "--out", tmp_path / "empty"],
        [tmp_path / "run", "--out", tmp_path / "there.html"],
        [tmp_path / "run", "--out", tmp_path / "report.pdf"],
        [tmp_path / "run", "--out", tmp_path / "report"],
        [tmp_path / "run", "--data", tmp_path / "no.json", "--out", out],
        [tmp_path / "run", "--data", unrelated, "--out", out],
    ):
        code, printed, err = lamella("report", *arguments)
        assert code in (1, 2), arguments
        assert printed == ""
        assert err.startswith("lamella: ")
        assert err.count("\n") == 1, err
        assert not out.exists()
    assert (tmp_path / "there.html").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "text"), [("eval_results.json", "[1]"), ("history.jsonl", "{}\nnot json\n"), ("history.jsonl", "[1]\n")]
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "run" / name).write_text(text)
    with pytest.raises(UnreadableError, match=name):
        collect([tmp_path / "run"])


def test_a_run_with_invalid_times_has_no_training_time(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    record = {"state": "finished", "command": "train", "started": None, "ended": "yesterday"}
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    assert "train_seconds" not in collect([tmp_path / "run"])["runs"][0]["cost"]


def test_a_damaged_model_is_named(tmp_path: Path) -> None:
    make_run(tmp_path / "run", weights=(np.ones((2, 3)), np.ones(2)))
    (tmp_path / "run" / "model" / "model.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(UnreadableError, match=r"model\.safetensors"):
        collect([tmp_path / "run"])


def test_a_report_without_folders_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        collect([])


@pytest.mark.parametrize("name", ["report.pdf", "report.docx", "report"])
def test_a_file_name_without_a_known_format_is_an_error_before_any_work(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"expected a file name that ends in \.html, \.htm or \.md, got '"):
        write_report([tmp_path / "no-such-run"], tmp_path / name)
    assert not (tmp_path / name).exists()


def test_the_suffix_may_be_htm_or_in_capitals(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    for name in ("report.htm", "REPORT.HTML"):
        write_report([tmp_path / "run"], tmp_path / name)
        assert (tmp_path / name).read_text("utf-8").startswith("<!doctype html>")


def test_the_device_of_times_is_part_of_the_report(tmp_path: Path) -> None:
    for name, device in {"a": "NVIDIA H200", "b": "cpu, 2 threads"}.items():
        make_run(tmp_path / name, cost={"train_seconds": 5.0, "device": device})
    content = collect([tmp_path / "a", tmp_path / "b"])
    assert [run["device"] for run in content["runs"]] == ["NVIDIA H200", "cpu, 2 threads"]
    assert any("several devices (NVIDIA H200; cpu, 2 threads)" in note for note in content["notes"])


def test_a_curve_has_seconds_and_dev_loss(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=30, evaluations=30)
    curve = collect([tmp_path / "run"])["runs"][0]["curve"]
    assert curve["evaluations"]["seconds"][:2] == [2.0, 4.0]
    assert curve["evaluations"]["dev_loss"][:2] == [4.0, 2.0]
    assert curve["seconds"] == [2.0 * step for step in range(1, 31)]  # a step between any two evaluations
    assert curve["tenths"]["epoch"][:2] == [0.1, 0.2]
    assert set(curve["tenths"]["seconds"]) == {2.0}
    make_run(tmp_path / "rarely", steps=30, evaluations=3)
    assert "tenths" not in collect([tmp_path / "rarely"])["runs"][0]["curve"]


def test_recorded_layer_weights_are_shown(tmp_path: Path) -> None:
    make_run(tmp_path / "run", mixer="dot")
    weights = {"start": {"all": [0.25, 0.75], "answer": [1.0, 0.0]}, "end": {"all": [0.5, 0.5], "answer": [0.0, 1.0]}}
    (tmp_path / "run" / "layers.json").write_text(json.dumps({"layers": [0, 12], "weights": weights}))
    layers = collect([tmp_path / "run"])["runs"][0]["layers"]
    assert layers == {"numbers": [0, 12], "weights": {"start": [0.25, 0.75], "end": [0.5, 0.5]}}
    (tmp_path / "run" / "layers.json").write_text(json.dumps({"layers": [0], "weights": weights}))
    with pytest.raises(UnreadableError, match=r"layers\.json: expected a weight for every layer"):
        collect([tmp_path / "run"])


def test_heads_name_the_run_under_them(tmp_path: Path) -> None:
    """The plot of less data draws it as the reference; a base that is not shown is not named."""
    for name, encoder in (("bert", "/private/base"), ("head", str(tmp_path / "bert" / "model"))):
        make_run(tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps({**config, "encoder": {"name": encoder}}))
    shown = {run["name"]: run["base"] for run in collect([tmp_path / "bert", tmp_path / "head"])["runs"]}
    assert shown == {"bert": None, "head": "bert"}
