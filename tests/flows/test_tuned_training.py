"""The no-answer threshold of trained readers: tuned by `train` (`data.threshold`), on the card, kept in copies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from calibration_data import decoding_of, read_json, split_articles, write_tuning_files
from doubles import save_tiny_encoder
from lamella import runs
from lamella.data.file_formats.formats import read
from lamella.data.file_formats.writers import write
from lamella.inference.predict import predict
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel
from lamella.plan import make_plan
from lamella.training.fitting import bookkeeping
from lamella.training.run import train_plan
from outcomes import outcome

pytestmark = pytest.mark.usefixtures("one_thread", "on_cpu")
SILENT: Any = lambda line: None  # noqa: E731
FP32 = ("--precision", "fp32")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny encoder, three splits whose articles differ, and a run trained without a threshold."""
    folder = tmp_path_factory.mktemp("calibrate")
    others = split_articles(folder)
    save_tiny_encoder(folder / "tiny", num_hidden_layers=1)
    made = {name.removesuffix(".json"): folder / name for name in ("train.json", "dev.json", "tiny")}
    made["plain"] = train(table(made), tmp_path_factory.mktemp("runs") / "plain")
    return made | write_tuning_files(ReaderModel.load(made["plain"]), others, folder)


def table(files: dict[str, Path], **sections: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "data": {"train": str(files["train"]), "dev": str(files["dev"])},
        "windows": {"max_seq_length": 128, "doc_stride": 32, "max_query_length": 24},
        "encoder": {"name": str(files["tiny"]), "tuning": "frozen"},
        "learner": {"learning_rate": 1e-2},
        "training": {"epochs": 2, "batch_size": 4, "precision": "fp32"},
    }
    return {**given, **{name: {**given.get(name, {}), **options} for name, options in sections.items()}}


def train(given: dict[str, Any], out: Path, **options: Any) -> Path:
    train_plan(make_plan(given, where="test"), out, **options)
    return out


@pytest.fixture
def trained(files: dict[str, Path]) -> Path:
    return files["plain"]


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def two(files: dict[str, Path], tmp_path: Path) -> Path:
    """An answerable and an unanswerable question."""
    examples = read(str(files["tuning"])).examples
    write(
        [next(example for example in examples if example.answerable is kind) for kind in (True, False)],
        tmp_path / "two.json",
    )
    return tmp_path / "two.json"


def test_training_keeps_a_threshold_that_is_not_known_to_be_better(
    files: dict[str, Path], two: Path, trained: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    given = table(files, data={"threshold": str(two)}, decoding={"null_score_diff_threshold": 1.5})
    train_plan(make_plan(given, where="test"), tmp_path / "run", log=lines.append)
    decoding = decoding_of(tmp_path / "run")
    assert (decoding["null_score_diff_threshold"], decoding["tuned_on"], decoding["calibration"]) == (1.5, None, None)
    assert any("threshold 1.5000 kept instead of" in line for line in lines)
    assert any(line.startswith("few questions") for line in lines)
    scores, plain = (read_json(folder / "eval_results.json") for folder in (tmp_path / "run", trained))
    assert "threshold_tuned_on_these" not in scores
    assert scores["f1_at_0"] == plain["f1"]
    card = (tmp_path / "run" / "model" / "README.md").read_text(encoding="utf-8")
    assert "exceed 1.50. A threshold tuned on 2 questions of `two.json` was not stored: at least 10" in card


def test_the_model_card_describes_the_stored_threshold(
    run: Path, files: dict[str, Path], lamella: Any, tmp_path: Path
) -> None:
    card = run / "model" / "README.md"
    before = card.read_text(encoding="utf-8")
    assert "## Threshold" not in before
    report = json.loads(lamella("calibrate", files["tuning"], "-m", run, "--json", *FP32)[1])
    text = card.read_text(encoding="utf-8")
    questions = len(read(str(files["tuning"])).examples)
    assert (
        f"exceed {report['threshold']:.2f}. This threshold was tuned on {questions} questions of `tuning.json`" in text
    )
    assert "Scores that depend on the threshold were measured at 0.00, before it was tuned" in text
    for row in ("at threshold 0", "at the tuned threshold, on the same questions: optimistic", "on the other articles"):
        assert row in text
    assert f"expect this | {report['crossfit_exact']:.2f} | {report['crossfit_f1']:.2f} |" in text
    error = f"was {report['ece_uncalibrated']:.2f} % before calibration, and is {report['crossfit_ece']:.2f} % after it"
    assert error in text
    # The rest of the card does not change, and a later copy has the same text.
    cost = before.partition("## Cost")[2]
    assert cost
    assert text.partition("## Cost")[2] == cost
    ReaderModel.load(run).save(tmp_path / "other" / "model")
    assert (tmp_path / "other" / "model" / "README.md").read_text(encoding="utf-8") == text
    lamella("export", run, "--half", tmp_path / "half")
    lamella("calibrate", files["tuning"], "-m", tmp_path / "half", *FP32)
    assert "in fp16, rounded once from fp32" in (tmp_path / "half" / "README.md").read_text(encoding="utf-8")


def test_a_model_based_on_another_ignores_its_threshold(
    run: Path, files: dict[str, Path], lamella: Any, tmp_path: Path
) -> None:
    upper = train(table(files, encoder={"name": str(run)}, training={"max_steps": 1}), tmp_path / "upper")
    before = load_encoder(str(run)).sha256
    assert lamella("calibrate", files["tuning"], "-m", run, *FP32)[0] == 0
    assert load_encoder(str(run)).sha256 == before
    assert ReaderModel.load(upper).decoding.tuned_on is None


def test_a_run_file_names_the_data_to_tune_on(
    files: dict[str, Path], trained: Path, lamella: Any, tmp_path: Path
) -> None:
    """The weights are the same as without it; the scores of the run are taken at the tuned threshold."""
    lines: list[str] = []
    given = table(files, data={"threshold": str(files["tuning"])})
    best = train_plan(make_plan(given, where="test"), tmp_path / "run", log=lines.append)
    run = tmp_path / "run"
    weights = Path("model") / "model.safetensors"
    assert (run / weights).read_bytes() == (trained / weights).read_bytes()
    out = lamella("calibrate", files["tuning"], "-m", trained, "--dry-run", "--json", *FP32)[1]
    assert decoding_of(run)["tuned_on"] == json.loads(out)["tuned_on"]
    threshold = decoding_of(run)["null_score_diff_threshold"]
    card = (run / "model" / "README.md").read_text(encoding="utf-8")
    assert f"exceed {threshold:.2f}. This threshold was tuned on" in card
    assert read_json(run / "model" / "config.json")["facts"]["calibrated"]["threshold"] == threshold
    assert threshold == json.loads(out)["threshold"]
    assert any(line.startswith(f"threshold {threshold:.4f}") for line in lines)
    plain, scores = (read_json(folder / "eval_results.json") for folder in (trained, run))
    assert scores == best["run"]
    assert scores["threshold"] == threshold
    assert scores["f1_at_0"] == plain["f1"] == plain["f1_at_0"]
    assert (scores["step"], scores["epoch"]) == (plain["step"], plain["epoch"])
    history = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert history[-1] == {"event": "threshold", **scores}
    out = lamella("evaluate", files["dev"], "-m", run, "-o", tmp_path / "dev", "--json", *FP32)[1]
    expected = {key: value for key, value in scores.items() if key not in ("step", "epoch")}
    assert json.loads(out) == pytest.approx(expected, abs=1e-4)  # computed by onnxruntime, the run's by torch
    assert read_json(tmp_path / "dev" / "predictions.json") == read_json(run / "predictions.json")
    assert read_json(tmp_path / "dev" / "na_prob.json") == pytest.approx(read_json(run / "na_prob.json"), abs=1e-5)


def test_every_learner_of_a_pass_has_its_own_threshold(files: dict[str, Path], tmp_path: Path) -> None:
    """It is tuned for the best model, which is not always the last."""
    given = table(files, data={"threshold": str(files["tuning"])}, learner={"learning_rate": 0.1})
    deeper = save_tiny_encoder(tmp_path / "deeper", num_hidden_layers=2)  # `dot` weighs layers
    given["encoder"] |= {"name": str(deeper)}
    given["training"] |= {"epochs": 4, "metric": "answerability_accuracy"}
    given["grid"] = {"learner": {"mixer": ["last", "dot"], "task": ["span", "answerability"]}}
    out = train(given, tmp_path / "runs")
    folders = sorted(path.parent for path in out.glob("*/model"))
    models = [ReaderModel.load(folder) for folder in folders]
    scores = [read_json(folder / "eval_results.json") for folder in folders]
    reports = [model.facts.calibrated for model in models]
    assert len({report["threshold_tuned"] for report in reports}) == 4
    for report in reports:  # the tuned threshold is used where it is better than 0 on other articles
        metric = "f1" if "f1_at_0" in report else "answerability_accuracy"
        better = report[f"crossfit_{metric}"] > report[f"{metric}_at_0"]
        assert report["threshold"] == (report["threshold_tuned"] if better else 0)
    assert min(results["step"] for results in scores) < max(results["step"] for results in scores)
    dev = read(str(files["dev"])).examples
    for folder, model, results in zip(folders, models, scores, strict=True):
        assert results["threshold"] == model.decoding.null_score_diff_threshold
        odds = {id: prediction.null_odds for id, prediction in predict(model, dev).items()}
        assert odds == pytest.approx(read_json(folder / "null_odds.json"), rel=1e-4, abs=1e-4)
    assert [row["scores"] for row in read_json(out / "runs.json")["runs"]] == [
        read_json(out / row["run"] / "eval_results.json") for row in read_json(out / "runs.json")["runs"]
    ]


def test_a_run_killed_during_tuning_resumes_to_the_same_result(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = table(files, data={"threshold": str(files["tuning"])})
    whole = train(given, tmp_path / "whole")

    def kill(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(bookkeeping, "tune_decoding", kill)
        with pytest.raises(KeyboardInterrupt):
            train(given, tmp_path / "killed")
    assert decoding_of(tmp_path / "killed")["tuned_on"] is None
    train(given, tmp_path / "killed", resume=True)
    resumed, expected = outcome(tmp_path / "killed"), outcome(whole)
    for name in ("history.jsonl", "eval_results.json", "na_prob.json", "model/config.json"):
        assert resumed[name] == expected[name], name


def test_a_threshold_is_tuned_without_dev_data_too(files: dict[str, Path], tmp_path: Path) -> None:
    out = train(table(files, data={"dev": [], "threshold": str(files["tuning"])}), tmp_path / "run")
    assert decoding_of(out)["tuned_on"] is not None
    assert not (out / runs.RESULTS).exists()


def test_contexts_in_several_splits_are_reported(files: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(files["dev"], tmp_path / "copy.json")
    lines: list[str] = []
    given = table(files, data={"threshold": str(tmp_path / "copy.json")}, training={"max_steps": 0})
    train_plan(make_plan(given, where="test"), tmp_path / "run", log=lines.append)
    assert any("in both the threshold and the dev data" in line for line in lines)


def test_a_model_without_texts_has_nothing_to_submit(files: dict[str, Path], lamella: Any, tmp_path: Path) -> None:
    given = table(files, learner={"task": "answerability"}, training={"max_steps": 1})
    run = train(given, tmp_path / "run")
    code, _, err = lamella("predict", files["dev"], "-m", run, "-o", tmp_path / "p", "--submission", tmp_path / "a.csv")
    assert code == 2
    assert "--submission" in err
    assert not (tmp_path / "p").exists()
    code, out, err = lamella("calibrate", files["tuning"], "-m", run)
    assert (code, err) == (0, "")
    assert "accuracy" in out
