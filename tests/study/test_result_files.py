"""Result files: what is kept of a run, that it suffices to compare runs, and that damage is detected."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.errors import LamellaError, OutputError, RunError, UnreadableError, UsageError
from lamella.inference.prediction_files import read_answers
from lamella.inference.questions import read_questions
from lamella.scoring.best_answers import null_odds_of, score_best_answers
from lamella.scoring.calibrate import threshold_report
from lamella.scoring.metrics import QuestionScores
from lamella.study.compare import compare, compare_records, keep_and_compare
from lamella.study.keep import add_results
from lamella.study.recommend import recommend
from lamella.study.records import read_records
from lamella.study.report.collect import collect
from lamella.study.result_files import F1_SCALE, parse_result, per_question, read_result, result_text
from run_folders import write_files
from samples import needs_torch

Lamella = Callable[..., tuple[int, str, str]]
ARTICLES, PARAGRAPHS, QUESTIONS = 4, 3, 4


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Four articles of three paragraphs with four questions each; every other question has no answer."""
    rng = random.Random(0)
    articles = []
    for article in range(ARTICLES):
        paragraphs = []
        for paragraph in range(PARAGRAPHS):
            words = [f"w{article}{paragraph}{place}" for place in range(8)]
            qas = []
            for place in range(QUESTIONS):
                answers = [{"text": " ".join(words[place : place + 2]), "answer_start": 5 * place}]
                id = f"{rng.random():.12f}"  # in random order, as in SQuAD
                no_answer = place % 2 == 1
                entry = {"id": id, "question": "Which?", "is_impossible": no_answer, "answers": answers}
                qas.append({**entry, "answers": []} if no_answer else entry)
            paragraphs.append({"context": " ".join(words), "qas": qas})
        articles.append({"title": f"t{article}", "paragraphs": paragraphs})
    path = tmp_path / "dev.json"
    path.write_text(json.dumps({"version": "v2.0", "data": articles}))
    return path


def write_scored_run(folder: Path, data: Path, seed: int, *, skill: float = 0.8, **files: Any) -> Path:
    """Write a run that answers correctly with probability `skill`, otherwise partly or wrongly, at threshold 0."""
    rng = random.Random(seed)
    nbest, odds, texts = {}, {}, {}
    for example in read_questions(str(data), labelled=True):
        words = example.context.text.split()
        right = example.answers[0].text if example.answers else words[0]
        text = right if rng.random() < skill else rng.choice([words[-1], right.split()[0]])
        null = rng.gauss(0.5 if example.answers else 2.0, 1.0)
        candidates = [(text, 0.0), ("", null)]
        nbest[example.id] = [
            {"text": candidate, "probability": 0.5, "score": score, "start": 0, "end": len(candidate)}
            for candidate, score in candidates
        ]
        odds[example.id], texts[example.id] = null, "" if null > 0 else text
    config = {
        "data": {"train": ["/somewhere/private/train.json.gz"], "dev": [str(data)]},
        "encoder": {"name": "/somewhere/private/tiny", "tuning": {"name": "adapter", "size": 8}},
        "learner": {
            "seed": seed,
            "learning_rate": skill,
            "distil": {"name": "teacher", "models": ["/p/first/model"]},
            "start": "/somewhere/private/earlier/model",
        },
        "training": {"order_seed": 0},
    }
    write_files(
        folder,
        {
            "run.json": {"state": "finished", "command": "train", "ended": "2026-01-01T10:00:00+00:00"},
            "config.json": config,
            "environment.json": {"lamella": "0.1.0", "libraries": {"torch": "2"}, "arguments": ["/somewhere/private"]},
            "cost.json": {"trainable_parameters": 100 + seed, "train_seconds": 7.5, "device": "cpu, 1 thread"},
            "nbest_predictions.json": nbest,
            "null_odds.json": odds,
            "predictions.json": texts,
            **files,
        },
    )
    return folder


def content_of(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def test_the_kept_scores_equal_those_of_evaluate(tmp_path: Path, data: Path, lamella: Lamella) -> None:
    run = write_scored_run(tmp_path / "run", data, 0)
    assert lamella("compare", run, "--keep", tmp_path / "kept")[0] == 0
    kept = read_result(tmp_path / "kept" / "run.json")
    examples, answered = read_questions(str(data), labelled=True), read_answers(run)
    best = score_best_answers(examples, answered.predictions)
    from lamella.decoding_options import DecodingOptions

    expected = threshold_report(
        DecodingOptions(), examples, best, null_odds_of(examples, answered.predictions), gives_text=True
    )
    scores = kept.scores()
    for key in ("exact_at_0", "f1_at_0", "crossfit_exact", "crossfit_f1"):
        assert scores[key] == pytest.approx(expected[key], abs=1e-4)
    assert scores["f1"] == scores["f1_at_0"] != scores["crossfit_f1"]
    assert scores["best_f1"] >= scores["crossfit_f1"]
    assert 100 * kept.f1.mean() == pytest.approx(expected["crossfit_f1"], abs=0.01)
    assert 100 * kept.exact.mean() == pytest.approx(expected["crossfit_exact"])


def test_the_questions_are_in_the_order_of_their_ids(tmp_path: Path, data: Path) -> None:
    _, files = keep_and_compare([write_scored_run(tmp_path / "run", data, 0)], tmp_path / "kept")
    kept = read_result(files[0])
    examples = sorted(read_questions(str(data), labelled=True), key=lambda example: example.id)
    assert kept.answerable.tolist() == [example.answerable for example in examples]
    texts = [example.context.text for example in examples]
    numbers = kept.paragraphs.tolist()
    assert [texts.index(text) for text in texts] == [numbers.index(number) for number in numbers]
    assert len(set(numbers)) == ARTICLES * PARAGRAPHS == kept.content["dev"]["paragraphs"]


def test_result_files_compare_like_the_runs_they_were_kept_from(tmp_path: Path, data: Path) -> None:
    folders = [write_scored_run(tmp_path / f"r{skill}", data, 1, skill=skill / 10) for skill in (9, 3)]
    folders.append(write_scored_run(tmp_path / "r9-seed2", data, 2, skill=0.9))
    from_runs = compare_records(add_results(read_records(folders)), baseline="r3")
    first, files = keep_and_compare(folders, tmp_path / "kept", baseline=str(folders[1]))
    data.unlink()
    again = compare(files, baseline="r3")
    for comparison in (first, again):
        assert comparison is not None
        assert comparison.thresholds == "crossfit"
        lines = comparison.lines()
        assert lines[1].startswith("EM and F1 at cross-fitted thresholds")
        assert "threshold" not in lines[4].split()  # each fold of the articles has its own
        assert [row.split()[1:] for row in lines[3:]] == [row.split()[1:] for row in from_runs.lines()[3:]]
        assert comparison.to_dict()["runs"][0]["threshold"] is None
    assert compare([tmp_path / "kept"], baseline=str(files[1])).baseline.name == again.baseline.name


def test_a_run_folder_beside_a_result_file_is_scored_like_the_file(tmp_path: Path, data: Path) -> None:
    first, second = (
        write_scored_run(tmp_path / name, data, seed, skill=0.9 - seed / 4) for seed, name in enumerate("ab")
    )
    _, (kept,) = keep_and_compare([first], tmp_path / "a.json")
    mixed = compare([kept, second])
    both, _ = keep_and_compare([first, second], tmp_path / "kept")
    assert both is not None
    assert mixed.to_dict()["runs"][1]["f1"] == both.to_dict()["runs"][1]["f1"]
    assert mixed.thresholds == "crossfit"
    assert compare([first, second]).thresholds == "own"


def test_recommend_and_report_accept_result_files(tmp_path: Path, data: Path, lamella: Lamella) -> None:
    folders = [write_scored_run(tmp_path / f"r{skill}", data, 1, skill=skill / 10) for skill in (9, 3)]
    _, files = keep_and_compare(folders, tmp_path / "kept")
    (tmp_path / "kept" / "speed.json").write_text('{"format": "lamella-speed"}')
    assert recommend([tmp_path / "kept"], max_params=101).best.name == "r9"
    shown = collect([tmp_path / "kept"])
    assert [run["name"] for run in shown["runs"]] == ["r3", "r9"]
    kept = content_of(files[0])["scores"]["own"]
    assert shown["runs"][1]["scores"]["f1"] == pytest.approx(kept["f1"], abs=1e-3)
    assert shown["runs"][1]["cost"]["train_seconds"] == 7.5
    assert shown["samples"] == []
    assert shown["notes"] == []
    code, _, err = lamella("report", tmp_path / "kept", "--out", tmp_path / "report.html")
    assert (code, err) == (0, "")


def test_no_folder_name_is_kept(tmp_path: Path, data: Path) -> None:
    _, (file,) = keep_and_compare([write_scored_run(tmp_path / "run", data, 0)], tmp_path / "kept")
    text, content = file.read_text(), content_of(file)
    assert "private" not in text
    assert str(tmp_path) not in text
    assert content["encoder"]["name"] == content["options"]["encoder.name"] == "tiny"
    assert content["options"]["learner.distil"]["models"] == ["first"]
    assert content["options"]["learner.start"] == "earlier"
    assert content["train"]["files"] == [{"name": "train.json.gz"}]
    assert set(content["dev"]["files"][0]) == {"name", "sha256"}
    assert (content["seed"], content["tuning"]) == ({"learner": 0, "order": 0}, {"name": "adapter", "size": 8})


def test_the_encoder_is_the_last_of_a_chain_of_models(tmp_path: Path, data: Path) -> None:
    first, second = tmp_path / "first" / "models" / "0.3", tmp_path / "second" / "model"
    last = {"name": "some/encoder", "sha256": "abc"}
    train = {"files": ["a.json"], "questions": 7, "unanswerable": 2}
    write_files(first, {"config.json": {"lamella": 1, "base": last, "tuning": {"name": "full"}}})
    facts = {"train": train, "fraction": 0.5}
    config = {"lamella": 1, "base": {"name": str(first), "sha256": "x"}, "tuning": {"name": "frozen"}, "facts": facts}
    write_files(second, {"config.json": config})
    run = write_scored_run(tmp_path / "second", data, 0, **{"config.json": {"data": {"dev": [str(data)]}}})
    _, (file,) = keep_and_compare([run], tmp_path / "kept")
    content = content_of(file)
    assert content["encoder"] == {**last, "parameters": None, "by_way_of": ["first@0.3"]}
    assert content["train"] == {"files": [{"name": "a.json"}], "questions": 7, "unanswerable": 2, "fraction": 0.5}


def test_the_default_reader_may_be_part_of_such_a_chain(tmp_path: Path, data: Path) -> None:
    config = {"lamella": 1, "base": {"name": "default", "sha256": "x"}, "tuning": {"name": "frozen"}}
    write_files(tmp_path / "run" / "model", {"config.json": config})
    _, (file,) = keep_and_compare([write_scored_run(tmp_path / "run", data, 0)], tmp_path / "kept")
    encoder = content_of(file)["encoder"]
    assert (encoder["name"], encoder["by_way_of"]) == ("all-MiniLM-L6-v2", ["default"])


def test_a_run_of_evaluate_records_its_model(tmp_path: Path, data: Path) -> None:
    facts = {"train": {"files": ["a.json"], "questions": 7, "unanswerable": 2}}
    base, tuning = {"name": "some/encoder", "sha256": "abc"}, {"name": "full"}
    record = {"state": "finished", "command": "evaluate", "data": {"files": [str(data)]},
              "model": {"name": "m", "base": base, "tuning": tuning, "facts": facts}}  # fmt: skip
    run = write_scored_run(tmp_path / "run", data, 0, **{"run.json": record, "config.json": {}})
    _, (file,) = keep_and_compare([run], tmp_path / "kept")
    content = content_of(file)
    assert (content["encoder"]["name"], content["tuning"], content["train"]["questions"]) == ("some/encoder", tuning, 7)


@needs_torch
def test_a_training_and_its_evaluation_give_equal_result_files(
    tmp_path: Path, lamella: Lamella, one_thread: None
) -> None:
    from doubles import save_tiny_encoder

    encoder = save_tiny_encoder(tmp_path / "tiny")
    (tmp_path / "run.toml").write_text(f"""
        data = {{train = "demo:train", dev = "demo:dev", max_train_samples = 8}}
        windows = {{max_seq_length = 128, doc_stride = 16}}
        encoder = {{name = "{encoder}", tuning = "frozen"}}
        training = {{max_steps = 1}}
    """)
    assert lamella("train", tmp_path / "run.toml", "--out", tmp_path / "trained")[0] == 0
    asked = ("demo:dev", "--model", tmp_path / "trained", "--out", tmp_path / "asked")
    assert lamella("evaluate", *asked, "--precision", "fp32")[0] == 0
    code, _, err = lamella("compare", tmp_path / "trained", tmp_path / "asked", "--keep", tmp_path / "kept")
    assert (code, err) == (0, "")
    trained, evaluated = (content_of(tmp_path / "kept" / f"{name}.json") for name in ("trained", "asked"))
    assert (trained["command"], evaluated["command"]) == ("train", "evaluate")
    assert trained["encoder"]["name"] == "tiny"
    for key in ("encoder", "tuning", "train", "dev"):
        assert trained[key] == evaluated[key]
    assert trained["train"]["questions"] == 8
    assert trained["scores"]["crossfit"]["f1"] == pytest.approx(
        json.loads((tmp_path / "trained" / "eval_results.json").read_text())["crossfit_f1"], abs=1e-4
    )


@needs_torch
def test_file_hashes_are_those_of_the_files_that_training_read(
    tmp_path: Path, data: Path, lamella: Lamella, one_thread: None
) -> None:
    """Even if the files have changed since."""
    from doubles import save_tiny_encoder

    train, apart = tmp_path / "train.json.gz", tmp_path / "apart.json"
    train.write_bytes(gzip.compress(data.read_bytes()))
    apart.write_text(data.read_text() + "  ")
    read = {path: (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()) for path in (train, data, apart)}
    (tmp_path / "run.toml").write_text(f"""
        data = {{train = "{train}", dev = "{data}", threshold = "{apart}", max_train_samples = 8}}
        windows = {{max_seq_length = 128, doc_stride = 16}}
        encoder = {{name = "{save_tiny_encoder(tmp_path / "tiny")}", tuning = "frozen"}}
        training = {{max_steps = 1}}
        learner = [{{name = "a"}}, {{name = "b", seed = 1}}]
    """)
    code, _, err = lamella("train", tmp_path / "run.toml", "--out", tmp_path / "runs")
    assert (code, err) == (0, "")
    recorded = [{"name": str(path), "size": size, "sha256": sha256} for path, (size, sha256) in read.items()]
    for name in ("a", "b"):
        assert json.loads((tmp_path / "runs" / name / "run.json").read_text())["files"] == recorded
    train.write_bytes(b"another")
    data.write_text(data.read_text() + "\n")
    _, files = keep_and_compare([tmp_path / "runs"], tmp_path / "kept")
    for content in map(content_of, files):
        assert content["train"]["files"] == [{"name": "train.json.gz", "sha256": read[train][1]}]
        assert content["dev"]["files"] == [{"name": "dev.json", "sha256": read[data][1]}]
    now = hashlib.sha256(data.read_bytes()).hexdigest()
    _, (file,) = keep_and_compare([tmp_path / "runs" / "a"], tmp_path / "given.json", data=str(data))
    assert content_of(file)["dev"]["files"][0]["sha256"] == now  # the file passed as --data is the one scored
    record = tmp_path / "runs" / "a" / "run.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "files": []}))
    _, (file,) = keep_and_compare([tmp_path / "runs" / "a"], tmp_path / "before.json")
    assert content_of(file)["dev"]["files"][0]["sha256"] == now


def test_without_anything_to_tune_the_own_threshold_is_used(tmp_path: Path, data: Path) -> None:
    content = json.loads(data.read_text())
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            paragraph["qas"] = [entry for entry in paragraph["qas"] if not entry["is_impossible"]]
    data.write_text(json.dumps(content))
    _, (file,) = keep_and_compare([write_scored_run(tmp_path / "run", data, 0)], tmp_path / "kept")
    kept = read_result(file)
    assert kept.scored_at == "own"
    assert "crossfit" not in kept.content["scores"]
    assert 100 * kept.f1.mean() == pytest.approx(kept.scores()["f1"], abs=0.01)


def test_the_file_of_another_run_is_not_replaced(tmp_path: Path, data: Path, lamella: Lamella) -> None:
    first, second = (write_scored_run(tmp_path / parent / "run", data, seed) for seed, parent in enumerate("ab"))
    kept = tmp_path / "kept"
    for _ in range(2):  # writing the same content again is allowed
        assert lamella("compare", first, "--keep", kept)[0] == 0
    before = (kept / "run.json").read_bytes()
    code, _, err = lamella("compare", second, "--keep", kept)
    assert code == 1
    assert err.count("\n") == 1
    assert "holds another run" in err
    assert (kept / "run.json").read_bytes() == before
    assert lamella("compare", second, "--keep", kept, "--overwrite")[0] == 0
    assert (kept / "run.json").read_bytes() != before
    code, out, _ = lamella("compare", first, second, "--keep", kept, "--json")  # two seeds of a reader
    assert code == 0
    assert json.loads(out)["kept"] == [str(kept / "a-run.json"), str(kept / "b-run.json")]
    assert sorted(path.name for path in kept.iterdir()) == ["a-run.json", "b-run.json", "run.json"]


def test_a_result_file_that_is_read_is_never_replaced(tmp_path: Path, data: Path, lamella: Lamella) -> None:
    first, second = (write_scored_run(tmp_path / name, data, seed) for seed, name in enumerate("ab"))
    kept = tmp_path / "kept.json"
    assert lamella("compare", first, "--keep", kept)[0] == 0
    before = kept.read_bytes()
    code, _, err = lamella("compare", kept, second, "--keep", kept, "--overwrite")
    assert code == 1
    assert "kept.json: is read by this command and cannot be its output" in err
    assert kept.read_bytes() == before


def test_nothing_is_written_if_one_of_the_files_cannot_be(tmp_path: Path, data: Path) -> None:
    runs = [write_scored_run(tmp_path / name, data, seed) for seed, name in enumerate("ab")]
    write_files(tmp_path / "kept", {"b.json": {"mine": True}})
    with pytest.raises(OutputError, match=r"b\.json: holds something else"):
        keep_and_compare(runs, tmp_path / "kept")
    assert not (tmp_path / "kept" / "a.json").exists()


def test_usage_errors(tmp_path: Path, data: Path, lamella: Lamella) -> None:
    runs = [write_scored_run(tmp_path / name, data, seed) for seed, name in enumerate("ab")]
    with pytest.raises(UsageError, match="expected a folder for 2 runs"):
        keep_and_compare(runs, tmp_path / "one.json")
    code, _, err = lamella("compare", runs[0], "--keep", tmp_path / "one.txt")
    assert (code, err.count("\n")) == (2, 1)
    assert "one.txt: expected FILE.json or a folder" in err
    assert not (tmp_path / "one.txt").exists()
    (tmp_path / "of-0.3").mkdir()
    assert lamella("compare", runs[0], "--keep", tmp_path / "of-0.3")[0] == 0
    _, (kept,) = keep_and_compare(runs[:1], tmp_path / "a.json")
    with pytest.raises(UsageError, match="only result files already kept"):
        keep_and_compare([kept], tmp_path / "again")
    with pytest.raises(UsageError, match="at least two readers"):
        compare([kept])
    assert lamella("compare", *runs, "--overwrite")[0] == 2
    (runs[0] / "nbest_predictions.json").unlink()
    with pytest.raises(RunError, match=r"expected nbest_predictions\.json"):
        keep_and_compare(runs, tmp_path / "kept")
    write_files(runs[1], {"eval_results.json": {"f1": 99.0}})
    with pytest.raises(RunError, match=r"expected the recorded F1 of 99\.00, got"):
        keep_and_compare(runs[1:], tmp_path / "kept")
    write_files(runs[1], {"eval_results.json": {}, "config.json": {"data": []}})
    with pytest.raises(LamellaError, match=r"damaged|--data"):
        keep_and_compare(runs[1:], tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_different_questions_are_an_error(tmp_path: Path, data: Path) -> None:
    _, (whole,) = keep_and_compare([write_scored_run(tmp_path / "a", data, 0)], tmp_path / "kept")
    content = json.loads(data.read_text())
    content["data"].pop()
    fewer = tmp_path / "fewer.json"
    fewer.write_text(json.dumps(content))
    with pytest.raises(RunError, match=r"48 questions of dev\.json\), got 36 questions of fewer\.json with other ids"):
        compare([whole, write_scored_run(tmp_path / "b", fewer, 0)])


def _edit(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(content: dict[str, Any]) -> None:
        *keys, last = path.split(".")
        for key in keys:
            content = content[key]
        if value is None:
            del content[last]
        else:
            content[last] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_edit("version", 2), "expected version 1"),
        (_edit("scores.crossfit.f1", 99.0), "scores.crossfit.f1 is 99.0, and its questions give"),
        (_edit("scores.crossfit.NoAns_exact", 99.0), "NoAns_exact"),
        (_edit("per_question.answerable", "01"), "differ in length"),
        (_edit("per_question.exact", "0x"), "a value is missing or has the wrong type"),
        (_edit("per_question.partial_f1", [[1000, 5]]), "a value is missing or has the wrong type"),
        (_edit("per_question.paragraph", [10**6] * 48), "a paragraph number is out of range"),
        (_edit("per_question", None), "a value is missing or has the wrong type"),
        (_edit("dev.questions", 47), "dev.questions is 47"),
        (_edit("cost", []), "cost is not an object"),
        (_edit("encoder", None), "a value is missing or has the wrong type"),
        (_edit("scores.at_0.f1", 99.0), "scores.at_0.f1 is 99.0, and its questions give"),
        (_edit("per_question.at_0", []), "scores.at_0"),
        (_edit("per_question.at_0", [[1000, 1, 5]]), "a value is missing or has the wrong type"),
        (_edit("scores.best.f1", 99.0), "its sha256 does not match its content"),
        (_edit("cost.trainable_parameters", 1), "its sha256 does not match its content"),
        (_edit("sha256", "0" * 64), "its sha256 does not match its content"),
    ],
)
def test_a_changed_file_is_detected(
    tmp_path: Path, data: Path, edit: Callable[[dict[str, Any]], None], message: str
) -> None:
    _, (file,) = keep_and_compare([write_scored_run(tmp_path / "run", data, 0)], tmp_path / "kept")
    content = content_of(file)
    edit(content)
    file.write_text(json.dumps(content))
    with pytest.raises(UnreadableError, match=message) as raised:
        read_records([file])
    assert "\n" not in str(raised.value)


def test_a_file_without_hash_and_a_file_with_another_layout_can_be_read(tmp_path: Path, data: Path) -> None:
    _, (file,) = keep_and_compare([write_scored_run(tmp_path / "run", data, 0)], tmp_path / "kept")
    content = content_of(file)
    assert result_text(content) == file.read_text()  # writing it again gives the same text
    file.write_text(json.dumps(dict(sorted(content.items())), indent=7))
    assert read_result(file).content == content
    del content["sha256"]
    file.write_text(json.dumps(content))
    assert "sha256" not in read_result(file).content


def test_any_other_file_is_an_error(tmp_path: Path, lamella: Lamella) -> None:
    write_files(tmp_path, {"other.json": {"format": "lamella-speed"}, "list.json": []})
    for name in ("other.json", "list.json"):
        code, _, err = lamella("compare", tmp_path / name)
        assert code == 2
        assert "result file" in err
        assert err.count("\n") == 1
    assert lamella("compare", tmp_path)[0] == 1


@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from([0.0, 1.0]), st.floats(0, 1), st.integers(0, 5)),
        min_size=1,
        max_size=30,
    )
)
def test_the_lists_restore_the_scores(rows: list[tuple[bool, float, float, int]]) -> None:
    ids = tuple(f"q{(7 * place) % 31}" for place in range(len(rows)))
    answerable, exact, partial, paragraphs = (np.array(column) for column in zip(*rows, strict=True))
    f1 = np.maximum(exact, partial)
    scores = QuestionScores(ids, answerable, answerable, exact=exact, f1=f1)
    at_0 = scores.withheld(paragraphs % 2 == 0)
    lists: Mapping[str, Any] = per_question(
        scores, at_0, {id: str(number) for id, number in zip(ids, paragraphs, strict=True)}, "own"
    )
    back = parse_result({"per_question": json.loads(json.dumps(lists))})
    order = np.argsort(np.array(ids))
    np.testing.assert_array_equal(back.exact, exact[order])
    np.testing.assert_array_equal(back.answerable, answerable[order])
    np.testing.assert_allclose(back.f1, f1[order], atol=0.5 / F1_SCALE + 1e-12)
    assert back.at_0 is not None
    np.testing.assert_array_equal(back.at_0[0], at_0.exact[order])
    np.testing.assert_allclose(back.at_0[1], at_0.f1[order], atol=0.5 / F1_SCALE + 1e-12)
    same = paragraphs[order][:, None] == paragraphs[order][None]
    np.testing.assert_array_equal(back.paragraphs[:, None] == back.paragraphs[None], same)


def test_a_real_dev_set_makes_a_small_file(real_data: Path, tmp_path: Path) -> None:
    run = write_scored_run(tmp_path / "run", real_data / "cs224n-dev.json.gz", 0, skill=0.7)
    _, (file,) = keep_and_compare([run], tmp_path / "kept")
    assert len(read_result(file).f1) == 6078
    assert file.stat().st_size < 65_000


def write_history(folder: Path, evaluations: int, steps_between: int = 3) -> None:
    """A history in which the loss of step n is n, and its distance to the teacher n / 1000."""
    lines: list[dict[str, Any]] = []
    for number in range(1, evaluations + 1):
        steps = range(steps_between * (number - 1) + 1, steps_between * number + 1)
        lines += [{"event": "step", "step": n, "epoch": n / 10, "loss": n, "distillation": n / 1000} for n in steps]
        at = {"step": steps[-1], "epoch": steps[-1] / 10, "exact": 50.123, "f1": 60.126}
        lines.append({"event": "evaluation", **at, "dev_loss": 1 / number, "seconds": 1.5 * number})
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_curve_and_the_layer_weights_are_kept(data: Path, tmp_path: Path) -> None:
    run = write_scored_run(tmp_path / "runs" / "dot", data, seed=0)
    write_history(run, 3)
    layers = {"layers": [0, 1], "weights": {"start": {"all": [0.25, 0.75]}, "end": {"all": [0.5, 0.5]}}}
    (run / "layers.json").write_text(json.dumps(layers))
    keep_and_compare([run], tmp_path / "kept.json")
    content = read_result(tmp_path / "kept.json").content
    assert content["layers"] == layers
    assert content["curve"] == {
        "epoch": [0.3, 0.6, 0.9],
        "seconds": [1.5, 3.0, 4.5],
        "dev_loss": [1.0, 0.5, 0.33333],
        "exact": [50.12, 50.12, 50.12],
        "f1": [60.13, 60.13, 60.13],
        "loss": [2.0, 5.0, 8.0],
        "parts": {"distillation": [0.002, 0.005, 0.008]},
    }
    assert not any("--layers" in note for note in collect([tmp_path / "kept.json"])["notes"])
    assert any("--layers: no sample answer" in note for note in collect([tmp_path / "kept.json"], layers=True)["notes"])
    (run / "layers.json").write_text(json.dumps({"layers": [0], "weights": {"start": [1]}}))
    with pytest.raises(UnreadableError, match=r"layers\.json: expected a weight for every layer"):
        keep_and_compare([run], tmp_path / "damaged.json")
    assert not (tmp_path / "damaged.json").exists()
    shown = collect([tmp_path / "kept.json"])["runs"][0]
    assert shown["curve"]["evaluations"]["dev_loss"] == [1.0, 0.5, 0.33333]
    assert (shown["curve"]["seconds"], shown["curve"]["loss"]) == ([1.5, 3.0, 4.5], [2.0, 5.0, 8.0])
    assert shown["layers"]["weights"] == {"start": [0.25, 0.75], "end": [0.5, 0.5]}
    changed = {**content, "curve": {**content["curve"], "f1": [60.13, 60.13, 61.0]}}
    (tmp_path / "changed.json").write_text(json.dumps(changed))
    with pytest.raises(UnreadableError, match="its sha256 does not match"):
        read_result(tmp_path / "changed.json")
    (tmp_path / "short.json").write_text(result_text({**content, "curve": {**content["curve"], "f1": [60.13]}}))
    with pytest.raises(UnreadableError, match="a value is missing or has the wrong type"):
        read_result(tmp_path / "short.json")
    (tmp_path / "layers.json").write_text(result_text({**content, "layers": {**layers, "layers": [0, 1, 2]}}))
    with pytest.raises(UnreadableError, match="a value is missing or has the wrong type"):
        read_result(tmp_path / "layers.json")


def test_a_long_curve_is_thinned_out_evenly(data: Path, tmp_path: Path) -> None:
    run = write_scored_run(tmp_path / "runs" / "dot", data, seed=0)
    write_history(run, 119)
    keep_and_compare([run], tmp_path / "kept.json")
    curve = read_result(tmp_path / "kept.json").content["curve"]
    assert len(curve["epoch"]) == 60
    assert (curve["epoch"][0], curve["epoch"][-1]) == (0.3, 35.7)
    assert curve["loss"][:3] == [2.0, 6.5, 12.5]  # means over all steps since the point before
    assert (tmp_path / "kept.json").read_text().count("\n") < 200


def test_a_run_without_a_history_has_no_curve(data: Path, tmp_path: Path) -> None:
    run = write_scored_run(tmp_path / "runs" / "dot", data, seed=0)
    keep_and_compare([run], tmp_path / "kept.json")
    assert not {"curve", "layers"} & read_result(tmp_path / "kept.json").content.keys()
