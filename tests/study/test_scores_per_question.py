"""Questions with several contexts are scored per context and per question, wherever scores are shown.

`careful` abstains well: it is the better reader per context. `eager` always answers, and scores best where the answer
is: it is the better reader per question.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from doubles import tiny_run_config
from lamella import runs
from lamella.errors import UnreadableError
from lamella.files import read_json, write_json
from lamella.inference.prediction import Candidate, Prediction
from lamella.inference.prediction_files import write_predictions
from lamella.inference.questions import read_questions
from lamella.scoring.evaluate import score_predictions
from lamella.study.compare import compare
from lamella.study.keep import add_results, write_results
from lamella.study.papers.paper_page import paper_page
from lamella.study.records import read_records
from lamella.study.report.collect import collect
from lamella.study.report.markdown import markdown_report
from lamella.study.result_files import read_result

QUESTIONS = 20


class Model:
    """The part of a model that scoring and writing predictions use."""

    gives_text = True
    decoding = tiny_run_config().decoding


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions about three contexts, of which the second contains the answer; two questions share each context."""
    entries = [
        {
            "qa": {"id": f"q{n}", "question": "Which?", "answer": f"a{n}"},
            "paragraphs": [{"title": f"t{n}-{at}", "contents": text} for at, text in enumerate(
                (f"nothing here {n // 2}", f"found: a{n - n % 2} a{n - n % 2 + 1}.", f"nor there {n // 2}")
            )],
        }
        for n in range(QUESTIONS)
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("data") / "several.json"
    path.write_text(json.dumps({"data": entries}))
    return path


def write_reader(folder: Path, data: Path, name: str, seed: int = 0) -> Path:
    examples, predictions = read_questions(str(data)), {}
    for example in examples:
        number = int(example.question_id[1:])
        answer = example.answers[0].text if example.answerable else "nothing"
        span = 2.0 if example.answerable else 1.0
        # `careful` finds every second answer, and `eager` abstains nowhere.
        null = 0.0 if name == "eager" or (example.answerable and number % 2) else 5.0
        rows = sorted([(answer, span), ("", null)], key=lambda row: -row[1])
        candidates = tuple(Candidate(text, 0, len(text), score, 0.5) for text, score in rows)
        predictions[example.id] = Prediction(candidates, null - span)
    folder.mkdir(parents=True)
    write_predictions(folder, Model(), predictions, examples)
    write_json(folder / runs.RESULTS, score_predictions(Model(), examples, predictions))
    write_json(folder / runs.CONFIG, {"learner": {"mixer": name, "seed": seed}, "training": {"order_seed": 0}})
    write_json(folder / runs.RUN, {"state": "finished", "command": "train", "data": {"files": [str(data)]}})
    return folder


@pytest.fixture(scope="module")
def readers(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("korquad-loss")
    # The rows of the Korean paper's table of losses.
    return [write_reader(folder / run, data, name) for run, name in (("baseline", "careful"), ("answer", "eager"))]


@pytest.fixture(scope="module")
def kept(readers: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept") / "korquad-loss"
    write_results(add_results(read_records(readers)), folder)
    return folder


def test_compare_shows_both(readers: list[Path]) -> None:
    comparison = compare(readers)
    assert (comparison.questions, comparison.contexts) == (QUESTIONS, 3 * QUESTIONS)
    values = {run["name"]: run for run in comparison.to_dict()["runs"]}
    assert values["baseline"]["f1"] == pytest.approx(100 * 50 / 60)
    assert (values["baseline"]["question_f1"], values["answer"]["question_f1"]) == (50.0, 100.0)
    assert values["answer"]["against_baseline"]["f1"] == pytest.approx(-50.0)
    assert values["answer"]["against_baseline_by_question"]["f1"] == pytest.approx(50.0)
    assert comparison.rows()[1]["question_f1_difference"] == pytest.approx(50.0)
    lines = comparison.lines()
    assert lines[0] == "20 questions with 60 contexts about 10 paragraphs; baseline: baseline"
    context, question = lines.index("per context:"), lines.index("per question:")
    assert lines[context + 1].startswith("baseline beats answer by 50.0 F1 [")
    assert lines[question + 1].startswith("answer beats baseline by 50.0 F1 [")
    assert "question EM  question F1" in str(comparison)
    # Contexts of one question depend on each other, so paragraphs are resampled; single answers are independent.
    assert comparison.differences["answer"].resampled == "paragraphs"
    assert comparison.question_differences["answer"].resampled == "questions"


def test_result_files_hold_both(kept: Path, readers: list[Path]) -> None:
    content = read_json(kept / "baseline.json")
    assert (content["dev"]["questions"], content["by_question"]["dev"]["questions"]) == (60, 20)
    assert content["by_question"]["scores"]["own"]["f1"] == 50.0
    # Every question has an answer, so nothing can be cross-fitted per question.
    assert (content["per_question"]["scored_at"], content["by_question"]["per_question"]["scored_at"]) == (
        "crossfit",
        "own",
    )
    assert len((kept / "baseline.json").read_text().splitlines()) < 120  # a line per list, not one per number
    comparison = compare([kept])
    assert {reader.name: reader.by_question and reader.by_question.mean_f1 for reader in comparison.readers} == {
        "answer": 100.0,
        "baseline": 50.0,
    }
    assert (comparison.thresholds, comparison.question_thresholds) == ("crossfit", "own")
    # A run folder beside a result file is scored in the same way.
    mixed = compare([readers[0], kept / "answer.json"])
    assert mixed.question_differences["answer"].f1.value == pytest.approx(50.0)


def test_a_changed_score_per_question_is_detected(kept: Path, tmp_path: Path) -> None:
    content = read_json(kept / "baseline.json")
    content["by_question"]["scores"]["own"]["f1"] = 90.0
    (tmp_path / "changed.json").write_text(json.dumps(content))
    with pytest.raises(UnreadableError, match=r"scores\.own\.f1 is 90\.0, and its questions give 50"):
        read_result(tmp_path / "changed.json")


def test_the_reports_show_both(kept: Path, readers: list[Path]) -> None:
    text, _ = markdown_report([kept])
    assert "20 questions with 60 contexts about 30 paragraphs" in text
    assert "F1 per question" in text
    assert text.index("Per context:") < text.index("Per question:")
    shown = collect(readers)["runs"]
    assert [run["scores"]["question_f1"] for run in shown] == [50.0, 100.0]


def test_the_page_of_a_paper_decides_its_findings_per_question_too(kept: Path) -> None:
    (table,) = paper_page("korquad-table2", [kept]).tables
    first = next(finding for finding in table["findings"] if finding["finding"] == "Weights in the loss do harm.")
    (per_context, per_question) = (
        next(row for row in first[key] if row["worse"] == "answer") for key in ("comparisons", "other_comparisons")
    )
    assert (per_context["metric"], per_question["metric"]) == ("f1", "question_f1")
    assert (per_context["ours"], per_question["ours"]) == (pytest.approx(50.0), pytest.approx(-50.0))
    assert (per_context["verdict"], per_question["verdict"]) == ("same sign and clear", "reversed")


def test_a_finding_may_be_shown_with_thresholds_from_other_articles(kept: Path) -> None:
    (table,) = paper_page("korquad-table2", [kept]).tables
    (found,) = (
        row
        for finding in table["findings"]
        for row in finding.get("other_comparisons", [])
        if "crossfit" in row["metric"]
    )
    # With a threshold of its own, each reader is right about every context. Per question there is nothing to tune:
    # each question has an answer.
    assert (found["metric"], found["worse"], found["ours"]) == ("crossfit_f1", "answer", 0.0)


@pytest.mark.parametrize("several", [True, False])
def test_the_metric_of_training_may_be_per_question(several: bool, data: Path, lamella: Any, tmp_path: Path) -> None:
    from doubles import save_tiny_encoder

    encoder = save_tiny_encoder(tmp_path / "encoder")
    (tmp_path / "run.toml").write_text(
        f"[data]\ntrain = 'demo:train'\ndev = '{data if several else 'demo:dev'}'\nmax_train_samples = 4\n"
        f"max_eval_samples = 6\n[encoder]\nname = '{encoder}'\n[windows]\nmax_seq_length = 64\ndoc_stride = 16\n"
        "max_query_length = 24\n[training]\nmax_steps = 1\nmetric = 'question_f1'\n"
    )
    code, out, err = lamella("train", tmp_path / "run.toml", "--out", tmp_path / "run")
    if not several:
        assert code == 2
        assert "training.metric" in err
        assert "expected dev data with several contexts per question for question_f1, got one context each" in err
        return
    assert (code, err) == (0, "")
    assert "per question EM " in out
    results = read_json(tmp_path / "run" / runs.RESULTS)
    assert results["question_total"] < results["total"]
    assert read_json(tmp_path / "run" / runs.CONFIG)["training"]["metric"] == "question_f1"
