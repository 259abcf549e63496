"""The no-answer threshold end to end: tuned by `calibrate`, stored with the model, used by all commands."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration_data import decoding_of, read_json, split_articles, write_tuning_files
from lamella import evaluate, runs
from lamella.calibration import Calibration
from lamella.data.file_formats.formats import read
from lamella.data.file_formats.writers import write
from lamella.encoder.sources import READERS
from lamella.inference.abstention import PRIORS
from lamella.inference.no_answer import na_probability
from lamella.inference.reader import Reader
from tiny_reader import save_tiny_bert, save_tiny_reader

pytestmark = pytest.mark.usefixtures("one_thread", "on_cpu")
SILENT: Any = lambda line: None  # noqa: E731
FP32 = ("--precision", "fp32")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny encoder, three splits whose articles differ, and a run with an untrained reader and its answers."""
    folder = tmp_path_factory.mktemp("calibrate")
    others = split_articles(folder)
    tiny, run = save_tiny_bert(folder / "tiny"), tmp_path_factory.mktemp("runs") / "plain"
    made = {"tiny": tiny, "plain": run, "train": folder / "train.json", "dev": folder / "dev.json"}
    reader = Reader.load(save_tiny_reader(folder / "reader", tiny, abstains=4), precision="fp32")
    evaluate(reader, made["dev"], out=run)
    shutil.copytree(folder / "reader", run / runs.MODEL)
    (run / runs.CONFIG).write_text(json.dumps({"data": {"train": [str(made["train"])]}}), encoding="utf-8")
    return made | write_tuning_files(reader.model, others, folder)


@pytest.fixture
def run(files: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(files["plain"], tmp_path / "run"))


@pytest.fixture
def two(files: dict[str, Path], tmp_path: Path) -> Path:
    """An answerable and an unanswerable question."""
    examples = read(str(files["tuning"])).examples
    write(
        [next(example for example in examples if example.answerable is kind) for kind in (True, False)],
        tmp_path / "two.json",
    )
    return tmp_path / "two.json"


@pytest.mark.parametrize("method", ["temperature", "isotonic"])
def test_a_tuned_threshold_is_stored_and_used_everywhere(
    method: str, run: Path, files: dict[str, Path], lamella: Any, tmp_path: Path
) -> None:
    data = files["many" if method == "isotonic" else "tuning"]
    before = {path.name: path.read_bytes() for path in (run / "model").iterdir()}
    code, out, err = lamella("calibrate", data, "-m", run, "--method", method, "--json", *FP32)
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["stored"] is True
    assert (report["threshold_choice"], report["calibration_choice"]) == ("tuned", "tuned")
    assert report["f1_in_sample"] >= max(report["f1_at_0"], report["crossfit_f1"])
    after = {path.name: path.read_bytes() for path in (run / "model").iterdir()}
    assert {name for name in after if after[name] != before.get(name)} == {"config.json", "README.md"}
    decoding = decoding_of(run)
    assert decoding["null_score_diff_threshold"] == report["threshold"] != 0
    assert decoding["calibration"] == report["calibration"]
    assert decoding["calibration"]["method"] == method
    tuned_on = decoding["tuned_on"]
    assert (tuned_on["data"], tuned_on["questions"]) == (data.name, len(read(str(data)).examples))

    # Evaluating the same questions gives the reported scores, with a warning.
    code, out, err = lamella("evaluate", data, "-m", run, "-o", tmp_path / "same", "--json", *FP32)
    assert code == 0
    assert "was tuned on these questions" in err
    same = json.loads(out)
    assert same["threshold_tuned_on_these"] is True
    assert same["threshold"] == report["threshold"]
    assert (same["f1"], same["exact"]) == (report["f1_in_sample"], report["exact_in_sample"])
    for key in ("f1_at_0", "exact_at_0"):
        assert same[key] == report[key]
    assert same["crossfit_f1"] > same["f1_at_0"]
    code, out, err = lamella("evaluate", files["dev"], "-m", run, "-o", tmp_path / "other", "--json", *FP32)
    assert (code, err) == (0, "")
    assert json.loads(out)["threshold_tuned_on_these"] is False

    # The null odds do not change; answers and probabilities follow the threshold and the calibration.
    odds, odds_before = (read_json(folder / "null_odds.json") for folder in (tmp_path / "other", run))
    assert odds == pytest.approx(odds_before)
    answers, na_prob = (read_json(tmp_path / "other" / name) for name in ("predictions.json", "na_prob.json"))
    assert all((answers[id] == "") == (odds[id] > report["threshold"]) for id in odds)
    assert na_prob != read_json(run / "na_prob.json")
    by_odds = [na_prob[id] for id in sorted(odds, key=odds.__getitem__)]
    assert by_odds == sorted(by_odds)
    asked = Reader.load(run, precision="fp32").ask("Who?", "Titan was found by Huygens.")
    assert asked.no_answer == (asked.null_score > report["threshold"])
    calibration = Calibration.model_validate(decoding["calibration"])
    assert asked.na_prob == na_probability(np.array([asked.null_score]), calibration)[0]
    assert asked.to_json()["na_prob"] == asked.na_prob


def test_a_threshold_that_is_not_known_to_be_better_is_not_stored(run: Path, two: Path, lamella: Any) -> None:
    before = {path.name: path.read_bytes() for path in (run / "model").iterdir()}
    code, out, err = lamella("calibrate", two, "-m", run, *FP32)
    assert (code, err) == (0, "")
    assert out.startswith("threshold 0.0000 kept instead of ")
    assert "at least 10 questions of each kind are needed" in out
    assert "few questions (1 answerable, 1 unanswerable)" in out
    assert "100 of each kind would be enough" in out
    assert "calibration kept as it was" in out
    assert "--force" in out
    assert "unchanged" in out
    assert {path.name: path.read_bytes() for path in (run / "model").iterdir()} == before
    report = json.loads(lamella("calibrate", two, "-m", run, "--json", *FP32)[1])
    assert (report["stored"], report["threshold_choice"], report["calibration_choice"]) == (False, "kept", "kept")
    assert report["threshold"] == 0 != report["threshold_tuned"]
    forced = json.loads(lamella("calibrate", two, "-m", run, "--json", "--force", *FP32)[1])
    assert (forced["stored"], forced["threshold_choice"]) == (True, "forced")
    assert decoding_of(run)["null_score_diff_threshold"] == forced["threshold"] == report["threshold_tuned"]
    card = (run / "model" / "README.md").read_text(encoding="utf-8")
    assert "It was stored, although at least 10 questions" in card
    code, out, err = lamella("calibrate", two, "-m", run, "--method", "isotonic")
    assert (code, out) == (1, "")
    assert "expected at least 100 answerable and 100 unanswerable questions, found 1 and 1" in err


def test_a_copy_gets_the_threshold_and_the_model_stays_as_it_is(
    run: Path, files: dict[str, Path], two: Path, lamella: Any, tmp_path: Path
) -> None:
    before = {path.name: path.read_bytes() for path in (run / "model").iterdir()}
    copy = tmp_path / "new" / "copy"
    arguments = ("calibrate", files["tuning"], "-m", run, "-o", copy, *FP32)
    code, out, err = lamella(*arguments)
    assert (code, err) == (0, "")
    assert f"{copy}: copy of {run} written" in out
    assert {path.name: path.read_bytes() for path in (run / "model").iterdir()} == before
    copied = {path.name: path.read_bytes() for path in copy.iterdir()}
    assert copied.keys() == before.keys()
    assert {name for name in copied if copied[name] != before[name]} == {"config.json", "README.md"}
    threshold = read_json(copy / "config.json")["decoding"]["null_score_diff_threshold"]
    assert f"threshold {threshold:.4f}, tuned on" in out
    assert threshold > 0
    assert Reader.load(copy).model.decoding.null_score_diff_threshold == threshold
    code, out, _ = lamella("ask", "Who?", "--context", files["dev"], "-m", copy)
    assert code == 0
    # What was written is replaced only on request, and nothing but a model is ever replaced.
    write_over = (tmp_path / "other", run, run / "model", run / "model" / "inside", files["tiny"], tmp_path / "file")
    (tmp_path / "other").mkdir()
    for place in (tmp_path / "other" / "notes.txt", tmp_path / "file"):
        place.write_text("mine")
    for place in write_over:
        code, _, err = lamella("calibrate", two, "-m", run, "-o", place, "--overwrite")
        assert code == 1, place
        assert "choose another --out" in err
        assert len(err.splitlines()) == 1
    code, _, err = lamella("calibrate", two, "-m", run, "-o", copy)
    assert code == 1
    assert "exists already; choose another --out, or pass --overwrite" in err
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == copied
    # A copy is written even if nothing in it changes, so that the next command finds it.
    assert lamella("calibrate", two, "-m", run, "-o", copy, "--overwrite", *FP32)[0] == 0
    assert read_json(copy / "config.json")["decoding"] == decoding_of(run)
    (copy / ".git").mkdir()  # a clone of a repository
    code, _, err = lamella("calibrate", two, "-m", run, "-o", copy, "--overwrite")
    assert (code, (copy / ".git").is_dir()) == (1, True)
    assert "holds the folder .git, which would be removed" in err
    code, _, err = lamella("calibrate", two, "-m", run, "-o", copy, "--dry-run")
    assert code == 2
    assert "--dry-run stores nothing" in err
    code, _, err = lamella("calibrate", two, "-m", run, "--overwrite")
    assert code == 2
    assert "--overwrite needs --out" in err


def test_the_way_in_which_windows_compete_is_stored(
    run: Path, files: dict[str, Path], lamella: Any, tmp_path: Path
) -> None:
    """A threshold is tuned on answers that were merged in the new way, also if the threshold itself stays."""
    assert decoding_of(run)["merge"] == "scores"
    copy = tmp_path / "copy"
    code, out, err = lamella("calibrate", files["tuning"], "-m", run, "-o", copy, "--merge", "leads", "--json", *FP32)
    assert (code, err) == (0, "")
    assert json.loads(out)["merge"] == read_json(copy / "config.json")["decoding"]["merge"] == "leads"
    assert "windows compete by their leads" in (copy / "README.md").read_text()
    text = "\n\n".join(dict.fromkeys(example.context.text for example in read(str(files["dev"])).examples))[:20_000]
    question = read(str(files["dev"])).examples[0].question
    ways = [Reader.load(folder, precision="fp32").ask(question, text, threshold=100.0) for folder in (run, copy)]
    assert ways[0] != ways[1]
    short = [Reader.load(folder, precision="fp32").ask(question, text[:100], threshold=100.0) for folder in (run, copy)]
    assert [(answer["start"], answer["score"]) for answer in short[0]] == [
        (answer["start"], answer["score"]) for answer in short[1]
    ]
    assert lamella("calibrate", files["tuning"], "-m", copy, "--force", *FP32)[0] == 0
    assert read_json(copy / "config.json")["decoding"]["merge"] == "leads", "as the model does, by default"


def test_the_packaged_reader_gets_a_threshold_without_training(two: Path, lamella: Any, tmp_path: Path) -> None:
    source = {path.name: path.read_bytes() for path in (READERS / "default").iterdir()}
    for name in ("default", READERS / "default"):
        code, out, err = lamella("calibrate", two, "-m", name)
        assert (code, out) == (2, "")
        assert "comes with the package and is never changed; write a copy of it with the new threshold: --out" in err
    # Two questions show nothing: a copy keeps the threshold and the calibration, and its card gives the error of this.
    code, out, err = lamella("calibrate", two, "-m", "default", "-o", tmp_path / "same", "--json")
    assert (code, err) == (0, "")
    assert (json.loads(out)["threshold_choice"], json.loads(out)["calibration_choice"]) == ("kept", "kept")
    same, packaged = (read_json(folder / "config.json") for folder in (tmp_path / "same", READERS / "default"))
    assert same["decoding"] == {"merge": "scores", **packaged["decoding"]}  # an option that is newer than the reader
    card = (tmp_path / "same" / "README.md").read_text(encoding="utf-8")
    assert f"error of the no-answer probability is {json.loads(out)['ece_before']:.2f} %" in card
    code, out, err = lamella("calibrate", two, "-m", "default", "-o", tmp_path / "mine", "--force", "--json")
    assert (code, err) == (0, "")
    reader = Reader.load(tmp_path / "mine")
    assert reader.model.decoding.null_score_diff_threshold == json.loads(out)["threshold"]
    assert reader.model.decoding.tuned_on is not None
    assert reader.model.decoding.tuned_on.data == "two.json"
    assert {path.name: path.read_bytes() for path in (READERS / "default").iterdir()} == source


def test_features_are_fitted_on_several_files_and_used_everywhere(
    run: Path, files: dict[str, Path], lamella: Any, tmp_path: Path
) -> None:
    half = tmp_path / "half.json"
    write(read(str(files["many"])).examples[::3], half)
    copy = tmp_path / "copy"
    arguments = ("calibrate", files["tuning"], half, "-m", run, "-o", copy, "--method", "features", "--force", *FP32)
    code, out, err = lamella(*arguments)
    assert code == 1  # some questions are in both files
    assert "expected one question, got several" in err
    ids = {example.id for example in read(str(files["tuning"])).examples}
    write([example for example in read(str(half)).examples if example.id not in ids], half)
    code, out, err = lamella(*arguments)
    assert (code, err) == (0, "")
    assert "by features fitted on" in out
    assert re.search(r"^  half\.json: F1 \d+\.\d\d → \d+\.\d\d, AURC ", out, re.MULTILINE)
    decoding = read_json(copy / "config.json")["decoding"]
    assert decoding["calibration"]["method"] == "features"
    assert decoding["tuned_on"]["data"] == "tuning.json, half.json"
    assert "if its log-odds, by the features `null_odds`, `margin`" in (copy / "README.md").read_text(encoding="utf-8")
    # The probability decides, in every command; Bayes' rule moves it.
    answered = {}
    for how in ("eager", "balanced", "strict"):
        out = tmp_path / how
        code, _, err = lamella("evaluate", files["dev"], "-m", copy, "-o", out, "--answer", how, "--json", *FP32)
        assert (code, err) == (0, "")
        texts, na_prob, odds = (
            read_json(out / name) for name in ("predictions.json", "na_prob.json", "null_odds.json")
        )
        assert all((texts[id] == "") == (na_prob[id] > 0.5) == (odds[id] > 0) for id in texts)
        assert (
            read_json(out / "run.json")["model"]["answerable"] == {"eager": 0.9, "balanced": 0.5, "strict": 0.25}[how]
        )
        answered[how] = sum(map(bool, texts.values()))
    again = tmp_path / "again"
    assert lamella("predict", files["dev"], "-m", copy, "-o", again, "--answer", "strict", *FP32)[0] == 0
    assert read_json(again / "predictions.json") == texts
    assert answered["eager"] >= answered["balanced"] >= answered["strict"]
    assert answered["eager"] > answered["strict"]
    score = evaluate(Reader.load(copy, precision="fp32"), files["dev"], answerable=PRIORS["eager"])
    assert score["f1"] == pytest.approx(read_json(tmp_path / "eager" / "eval_results.json")["f1"])
    for arguments, words in [
        (("evaluate", files["dev"], tmp_path / "eager" / "predictions.json", "--answer", "strict"), "needs --model"),
        (("calibrate", half, half, "-m", run), "got one of them twice"),
        (("calibrate", half, half.parent / "." / ".." / half.parent.name / half.name, "-m", run), "one of them twice"),
    ]:
        code, _, err = lamella(*arguments)
        assert code == 2
        assert words in err


def test_the_command_prints_a_summary_and_a_dry_run_stores_nothing(
    run: Path, files: dict[str, Path], lamella: Any
) -> None:
    before = decoding_of(run)
    code, out, err = lamella("calibrate", files["tuning"], "-m", run, "--dry-run", *FP32)
    assert (code, err) == (0, "")
    for words in (
        "threshold ",
        "at threshold 0:",
        "too optimistic",
        "what to expect",
        "calibration error",
        "nothing stored",
    ):
        assert words in out
    assert decoding_of(run) == before
    code, out, _ = lamella("calibrate", files["tuning"], "-m", run, *FP32)
    assert code == 0
    assert "stored" in out
    assert decoding_of(run) != before


def test_a_threshold_is_tuned_for_int8(run: Path, files: dict[str, Path], lamella: Any, tmp_path: Path) -> None:
    call = ("calibrate", files["tuning"], "-m", run, "--precision")
    plain, rounded = (json.loads(lamella(*call, name, "--dry-run", "--json")[1]) for name in ("fp32", "int8"))
    assert "precision" not in plain
    assert (plain["tuned_on"]["precision"], rounded["tuned_on"]["precision"]) == (None, "int8")
    assert rounded["threshold_tuned"] == pytest.approx(plain["threshold_tuned"], abs=0.5)
    assert rounded["threshold_tuned"] != plain["threshold_tuned"]
    code, out, err = lamella(*call, "int8")
    assert (code, err) == (0, "")
    questions = len(read(str(files["tuning"])).examples)
    assert out.startswith(f"threshold {rounded['threshold']:.4f}, tuned on {questions} questions answered in int8\n")
    assert decoding_of(run)["tuned_on"] == rounded["tuned_on"]
    card = (run / "model" / "README.md").read_text(encoding="utf-8")
    assert f"tuned on {questions} questions of `tuning.json`, answered in int8.\n" in card
    # The scores that it reports are those of int8 answers.
    code, out, _ = lamella("evaluate", files["tuning"], "-m", run, "-o", tmp_path / "i", "--json", *call[-1:], "int8")
    assert code == 0
    assert json.loads(out)["f1"] == rounded["f1_in_sample"]


def test_mistakes_get_one_line(run: Path, files: dict[str, Path], lamella: Any, tmp_path: Path) -> None:
    before = decoding_of(run)
    answerable = tmp_path / "answerable.json"
    write([example for example in read("demo:dev").examples if example.answerable][:5], answerable)
    config = tmp_path / "run.toml"
    config.write_text('[data]\ntrain = "demo:train"\ndev = "demo:dev"\nthreshold = "demo:dev"\n')
    for arguments, exit_code, words in [
        (["calibrate", answerable, "-m", run], 1, "only answerable"),
        (["calibrate", "nowhere.json", "-m", run], 2, "nowhere.json"),
        (["calibrate", "demo:dev", "-m", files["tiny"]], 2, "--dry-run"),
        (["calibrate", files["train"], "-m", run], 2, "was trained on"),
        (["calibrate", files["train"].parent / "." / "train.json", "-m", run / "model"], 2, "was trained on"),
        (["calibrate", "demo:dev", "-m", "nowhere"], 2, "nowhere"),
        (["train", config, "-o", tmp_path / "out"], 2, "data.threshold: demo:dev is also in data.dev"),
    ]:
        code, out, err = lamella(*arguments)
        assert (code, out) == (exit_code, ""), err
        assert words in err
        assert len(err.splitlines()) <= 2, err
    assert decoding_of(run) == before
    config_file = run / "model" / "config.json"
    broken = read_json(config_file)
    broken["decoding"]["calibration"] = {"method": "isotonic", "odds": [1.0, 0.0], "probability": [0.0, 1.0]}
    config_file.write_text(json.dumps(broken))
    code, _, err = lamella("evaluate", "demo:dev", "-m", run, "-o", tmp_path / "out")
    assert code == 1
    assert "strictly increasing odds" in err


def test_a_submission_holds_every_answer(run: Path, files: dict[str, Path], lamella: Any, tmp_path: Path) -> None:
    code, _, err = lamella(
        "predict", files["dev"], "-m", run, "-o", tmp_path / "out", "--submission", tmp_path / "sub" / "answers.csv"
    )
    assert code == 0
    assert all("questions cut to 24 tokens" in line for line in err.splitlines())
    with (tmp_path / "sub" / "answers.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["Id", "Predicted"]
    assert rows == sorted(map(list, read_json(tmp_path / "out" / "predictions.json").items()))
