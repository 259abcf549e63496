"""Classifiers of answerability in every command that compares runs: trained once, on a tiny encoder."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from doubles import save_tiny_encoder
from forks import ForkServer
from lamella import runs
from lamella.files import read_json, write_json
from lamella.heads.tasks import Answerability, Span
from lamella.study.records import DEFAULT_METRICS, read_records

Lamella = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("one_thread")
CLASSIFIERS = ("dot", "last")


@pytest.fixture(scope="session")
def trained(forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of one pass: two classifiers of answerability, `dot` and `last`, and a reader, `span`."""
    folder = tmp_path_factory.mktemp("classifiers")
    encoder = save_tiny_encoder(folder / "tiny", num_hidden_layers=2)
    (folder / "run.toml").write_text(
        f"""
[data]
train = "demo:train"
dev = "demo:dev"
max_train_samples = 40
[windows]
max_seq_length = 128
doc_stride = 32
[training]
epochs = 2
precision = "fp32"
[encoder]
name = "{encoder}"
tuning = "frozen"
[[run]]
name = "dot"
learner = {{ task = "answerability", mixer = "dot", learning_rate = 0.01 }}
[[run]]
name = "last"
learner = {{ task = "answerability", mixer = "last", learning_rate = 0.01 }}
[[run]]
name = "span"
learner = {{ mixer = "last", learning_rate = 0.01 }}
"""
    )
    code, _, err = forks.run("train", folder / "run.toml", "--out", folder / "runs")
    assert code == 0, err
    return folder / "runs"


def results(folder: Path) -> dict[str, float]:
    return dict(read_json(folder / runs.RESULTS))


def test_new_runs_store_the_metric_that_selected_their_checkpoint(trained: Path, lamella: Lamella) -> None:
    metrics = {name: read_json(trained / name / runs.CONFIG)["training"]["metric"] for name in ("dot", "span")}
    assert metrics == {"dot": "answerability_f1", "span": "f1"}
    assert {task.__name__.lower(): task.headline[1] for task in (Span, Answerability)} == DEFAULT_METRICS


def test_runs_that_stored_no_metric_still_load(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "dot", tmp_path / "dot")
    config = read_json(trained / "dot" / runs.CONFIG)
    config["training"]["metric"] = None
    write_json(tmp_path / "dot" / runs.CONFIG, config)
    old, new = read_records([tmp_path / "dot", trained / "dot"]).records
    assert old.options == new.options


def test_compare_ranks_classifiers_by_accuracy(trained: Path, lamella: Lamella) -> None:
    code, out, err = lamella("compare", trained / "dot", trained / "last", "--json")
    assert (code, err) == (0, "")
    compared = json.loads(out)
    assert compared["metric"] == "answerability_accuracy"
    for run in compared["runs"]:
        stored = results(trained / run["name"])
        for key in ("answerability_accuracy", "answerability_f1"):
            assert run[key] == pytest.approx(stored[key])
        assert "f1" not in run
    (difference,) = [run["against_baseline"] for run in compared["runs"] if run["against_baseline"]]
    low, high = difference["answerability_accuracy_interval"]
    assert low <= difference["answerability_accuracy"] <= high
    total = results(trained / "dot")["total"]
    gap = 100 * (difference["won"] - difference["lost"]) / total
    assert difference["answerability_accuracy"] == pytest.approx(gap)
    out = lamella("compare", trained / "dot", trained / "last")[1]
    assert "accuracy at each run's own threshold" in out
    assert "accuracy  no-answer F1" in out
    assert "EM" not in out
    assert not re.search(r"(?<!answer) F1", out)


def test_a_mixture_is_compared_by_the_decision_to_answer(trained: Path, lamella: Lamella, tmp_path: Path) -> None:
    code, out, err = lamella("compare", trained)
    assert (code, err) == (0, "")
    assert "dot, last only decide that; span also finds the answer" in out
    compared = {run["name"]: run for run in json.loads(lamella("compare", trained, "--json")[1])["runs"]}
    for name, run in compared.items():
        assert run["answerability_accuracy"] == pytest.approx(results(trained / name)["answerability_accuracy"])

    code, out, err = lamella("compare", trained, "--keep", tmp_path / "kept", "--json")
    assert (code, err) == (0, "")
    kept = {file.stem: read_json(file) for file in sorted((tmp_path / "kept").iterdir())}
    assert {name: content.get("task") for name, content in kept.items()} == {
        "dot": "answerability",
        "last": "answerability",
        "span": None,
    }
    code, out, err = lamella("compare", tmp_path / "kept")
    assert code != 0
    assert len(err.splitlines()) == 1
    assert "span.json: expected a classifier of answerability" in err
    code, out, err = lamella("compare", tmp_path / "kept" / "dot.json", trained / "span")
    assert (code, err) == (0, "")
    assert "dot only decides that; span also finds the answer" in out


def test_kept_classifiers_are_compared_and_shown_on_a_page(trained: Path, lamella: Lamella, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    code, _, err = lamella("compare", trained / "dot", trained / "last", "--keep", kept)
    assert (code, err) == (0, "")
    out = lamella("compare", kept, "--json")[1]
    accuracy = {run["name"]: run["answerability_accuracy"] for run in json.loads(out)["runs"]}
    for name in CLASSIFIERS:
        assert accuracy[name] == pytest.approx(results(trained / name)["crossfit_answerability_accuracy"], abs=0.01)
    assert lamella("report", kept, "--out", tmp_path / "page.md")[0] == 0
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    (head,) = [line for line in page.splitlines() if line.startswith("| run |")]
    titles = [cell.strip() for cell in head.split("|")[1:-1]]
    assert {"accuracy", "no-answer F1", "accuracy at 0", "accuracy, best"} <= {*titles}
    assert not {"EM", "F1", "F1 at 0"} & {*titles}
    (row,) = [line for line in page.splitlines() if line.startswith("| dot |")]
    cells = dict(zip(titles, (cell.strip() for cell in row.split("|")[1:-1]), strict=True))
    assert cells["accuracy"].startswith(f"{accuracy['dot']:.2f} [")
    assert float(cells["accuracy at 0"]) == pytest.approx(
        results(trained / "dot")["answerability_accuracy_at_0"], abs=0.01
    )
    assert '"no answer"' in page
    assert "not distinguishable" in page or "points of accuracy" in page


def test_a_page_of_readers_and_classifiers_has_a_section_for_each(
    trained: Path, lamella: Lamella, tmp_path: Path
) -> None:
    assert lamella("report", trained, "--out", tmp_path / "page.md")[0] == 0
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    readers, classifiers = page.partition("## Classifiers")[::2]
    assert "| span |" in readers
    assert "| F1 " in readers
    assert "| dot |" in classifiers
    assert "| accuracy |" in classifiers


def test_recommend_chooses_a_classifier_by_accuracy(trained: Path, lamella: Lamella) -> None:
    code, out, err = lamella("recommend", trained / "dot", trained / "last", "--json")
    assert (code, err) == (0, "")
    best = json.loads(out)["best"]
    assert best["answerability_accuracy"] == pytest.approx(
        max(results(trained / name)["answerability_accuracy"] for name in CLASSIFIERS)
    )
    out = lamella("recommend", trained / "dot", trained / "last")[1]
    assert out.startswith(f"take {best['name']}: accuracy {best['answerability_accuracy']:.2f}")


def content_of(report: Path) -> dict[str, Any]:
    found = re.search(r'<script[^>]*id="content"[^>]*>(.*?)</script>', report.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def test_the_html_report_shows_the_scores_of_classifiers(trained: Path, lamella: Lamella, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(trained / "dot", old)
    config = read_json(old / runs.CONFIG)
    config["training"]["metric"] = None
    write_json(old / runs.CONFIG, config)
    for folders in ([trained / "dot", trained / "last"], [old], [trained]):
        code, _, err = lamella("report", *folders, "--out", tmp_path / "report.html", "--overwrite")
        assert (code, err) == (0, "")
        content = content_of(tmp_path / "report.html")
        assert content["metric"] == "answerability_accuracy"
        for run in content["runs"]:
            assert content["metric"] in run["scores"]
            if run["task"] == "answerability":
                assert sum(run["confusion"].values()) == run["questions"]
                right = [count for title, count in run["confusion"].items() if "correctly" in title]
                assert 100 * sum(right) / run["questions"] == pytest.approx(
                    run["scores"]["answerability_accuracy"], abs=0.01
                )
                assert run["reliability"]
                assert {answer["text"] for answer in run["answers"]} <= {"", "has an answer"}


def test_classifiers_are_analysed_by_their_decisions(trained: Path, lamella: Lamella, tmp_path: Path) -> None:
    for folders, names in (([trained / "dot", trained / "last"], CLASSIFIERS), ([trained], (*CLASSIFIERS, "span"))):
        code, out, err = lamella("analyse", *folders, "--sample", 4, "--out", tmp_path / f"{len(names)}")
        assert (code, err) == (0, "")
        assert "accuracy by question word" in out
        assert "EM" not in out
        numbers = read_json(tmp_path / f"{len(names)}" / runs.ANALYSIS)
        assert [run["run"] for run in numbers["runs"]] == [*names]
        for run in numbers["runs"]:
            stored = results(trained / run["run"])
            assert run["answerability_accuracy"] == pytest.approx(stored["answerability_accuracy"])
            assert run["answerability_f1"] == pytest.approx(stored["answerability_f1"])
            wrong = run["confusion"]["abstained_wrongly"] + run["confusion"]["answered_the_unanswerable"]
            assert wrong + run["right"]["count"] == stored["total"]
        assert numbers["runs"][0]["layer_attention"]["questions"] == 4
        mistakes = (tmp_path / f"{len(names)}" / runs.MISTAKES).read_text(encoding="utf-8")
        assert re.search(r"predicted: (no answer|has an answer) \(\d", mistakes)
        assert "⟦" not in mistakes.partition("\n## ")[2]


@pytest.mark.parametrize("how", ["mean", "max", "product", "vote"])
def test_classifiers_decide_together(trained: Path, lamella: Lamella, tmp_path: Path, how: str) -> None:
    members = [trained / name for name in CLASSIFIERS]
    code, out, err = lamella("ensemble", *members, "--how", how, "--data", "demo:dev", "--out", tmp_path / "ran")
    assert (code, err) == (0, "")
    assert f"{how}, at the question level" in out
    assert re.search(r"over dot +answerability_accuracy [+-]\d", out)
    odds = [read_json(member / runs.NULL_ODDS) for member in members]
    together = read_json(tmp_path / "ran" / runs.NULL_ODDS)
    for id, combined in together.items():
        first, second = (of_member[id] for of_member in odds)
        if first > 0 and second > 0:
            assert combined > 0
        if how == "product":
            assert combined == pytest.approx((first + second) / 2, abs=1e-3)
    scores = results(tmp_path / "ran")
    gain = scores["gains"]["dot"]["answerability_accuracy"]
    assert gain == pytest.approx(scores["answerability_accuracy"] - results(trained / "dot")["answerability_accuracy"])
    assert lamella("compare", tmp_path / "ran", *members)[0] == 0


def test_an_ensemble_of_stored_decisions_needs_no_model(trained: Path, lamella: Lamella, tmp_path: Path) -> None:
    members = [trained / name for name in CLASSIFIERS]
    assert lamella("ensemble", *members, "--out", tmp_path / "together")[0] == 0
    assert len(read_json(tmp_path / "together" / runs.NULL_ODDS)) == results(trained / "dot")["total"]
    for more, expected in (
        ([trained / "span"], "dot, last, which only decide whether there is an answer, and span, which finds it"),
        (["--level", "span"], "leave it out"),
    ):
        code, _, err = lamella("ensemble", *members, *more, "--out", tmp_path / "refused")
        assert code in (1, 2)
        assert expected in err
        assert len(err.splitlines()) == 1
        assert not (tmp_path / "refused").exists()
