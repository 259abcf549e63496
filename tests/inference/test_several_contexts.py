"""Questions with several contexts get one answer each, the same as from a Reader, and one score."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles import corpus, save_tiny_encoder, tiny_run_config
from lamella import runs
from lamella.data.examples import Answer, Context, Example
from lamella.data.file_formats.formats import read
from lamella.files import read_json
from lamella.inference.prediction import Candidate, Prediction
from lamella.inference.reader import Reader
from lamella.inference.several_contexts import one_example_per_question, predictions_by_question
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel
from lamella.scoring.evaluate import score_predictions
from lamella.scoring.metrics import score

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = [text[:200] for text in corpus()[:6]]


def entry(id: str, question: str, answer: str, *contents: str) -> dict[str, Any]:
    qa = {"id": id, "question": question, "answer": answer}
    return {"qa": qa, "paragraphs": [{"title": f"t{at}", "contents": text} for at, text in enumerate(contents)]}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three questions, with three, two and one contexts; the last has no answer in its context."""
    word = TEXTS[1].split()[3]
    entries = [
        entry("a", "Who is it?", word, *TEXTS[:3]),
        entry("b", "When was that?", TEXTS[4][5:30], *TEXTS[3:5]),
        entry("c", "Where?", "nowhere at all", TEXTS[5]),
    ]
    path = tmp_path_factory.mktemp("data") / "several.json"
    path.write_text(json.dumps({"data": entries}))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    # The null odds of the questions lie on both sides of this threshold.
    found = ReaderModel(
        load_encoder(str(save_tiny_encoder(folder / "encoder"))),
        tiny_run_config(decoding={"null_score_diff_threshold": -0.62}),
    )
    found.save(folder / "reader")
    return folder / "reader"


def test_a_question_gets_the_answer_that_a_reader_gives_for_all_its_contexts(
    data: Path, model: Path, lamella: Any, tmp_path: Path
) -> None:
    to = ("--model", model, "--precision", "fp32", "--out", tmp_path / "run")
    code, out, err = lamella("predict", data, *to, "--submission", tmp_path / "answers.csv")
    assert (code, err) == (0, "")
    assert out.endswith("3 questions answered from 6 contexts\n")
    texts = read_json(tmp_path / "run" / "question_predictions.json")
    odds = read_json(tmp_path / "run" / "question_null_odds.json")
    assert list(texts) == list(odds) == ["a", "b", "c"]
    assert list(read_json(tmp_path / "run" / "predictions.json")) == ["a#0", "a#1", "a#2", "b#0", "b#1", "c#0"]
    with (tmp_path / "answers.csv").open(newline="") as file:
        assert {row["Id"]: row["Predicted"] for row in csv.DictReader(file)} == texts

    reader = Reader.load(model, precision="fp32", device="cpu")
    contexts = {"a": TEXTS[:3], "b": TEXTS[3:5], "c": [TEXTS[5]]}
    for example in read(data).examples:
        answers = reader.ask(example.question, contexts[example.question_id])
        assert texts[example.question_id] == answers[0]["answer"]
        assert odds[example.question_id] == pytest.approx(answers.null_score, abs=1e-4)
    assert "" in texts.values()
    assert any(texts.values())


def test_a_question_is_scored_once(data: Path, model: Path, lamella: Any, tmp_path: Path) -> None:
    to = ("--model", model, "--precision", "fp32", "--out", tmp_path / "run")
    code, _, err = lamella("evaluate", data, *to)
    assert (code, err) == (0, "")
    results = read_json(tmp_path / "run" / runs.RESULTS)
    assert (results["total"], results["question_total"]) == (6, 3)
    assert (results["HasAns_total"], results["question_HasAns_total"], results["question_NoAns_total"]) == (2, 2, 1)
    code, out, err = lamella("evaluate", data, tmp_path / "run" / "question_predictions.json", "--json")
    assert (code, err) == (0, "")
    scored = json.loads(out)
    assert {f"question_{key}": value for key, value in scored.items()} == {
        key: value for key, value in results.items() if key.startswith("question_")
    }


def test_every_command_that_answers_merges_contexts(data: Path, model: Path, lamella: Any, tmp_path: Path) -> None:
    for name in ("one", "two"):
        to = ("--model", model, "--precision", "fp32", "--out", tmp_path / name)
        assert lamella("predict", data, *to)[0] == 0
    members = (tmp_path / "one", tmp_path / "two")
    code, _, err = lamella("ensemble", *members, "--data", data, "--out", tmp_path / "both")
    assert (code, err) == (0, "")
    (tmp_path / "run.toml").write_text(
        f"[data]\ntrain = 'demo:train'\ndev = '{data}'\nmax_train_samples = 4\n[encoder]\nname = '{model}'\n"
        "[windows]\nmax_seq_length = 64\ndoc_stride = 16\nmax_query_length = 24\n[training]\nmax_steps = 1\n"
    )
    code, _, err = lamella("train", tmp_path / "run.toml", "--out", tmp_path / "trained")
    assert (code, err) == (0, "")
    for run in ("both", "trained"):
        assert set(read_json(tmp_path / run / "question_predictions.json")) == {"a", "b", "c"}
        assert read_json(tmp_path / run / runs.RESULTS)["question_total"] == 3
    code, out, err = lamella("compare", *members, "--json")
    assert (code, err) == (0, "")
    compared = json.loads(out)
    assert (compared["questions"], compared["contexts"]) == (3, 6)


def answers(*rows: tuple[str, float]) -> Prediction:
    """A prediction from texts and scores, best first, "no answer" included."""
    candidates = tuple(Candidate(text, at, at + len(text), score) for at, (text, score) in enumerate(rows))
    bare = Prediction(candidates, 0.0)
    return Prediction(candidates, bare.null.score - bare.best_span.score)


EXAMPLES = [
    Example("a#0", "Who?", Context("one two"), group="a"),
    Example("b", "What?", Context("three"), (Answer("three", 0),)),
    Example("a#1", "Who?", Context("four"), (Answer("four", 0),), group="a"),
]


class Deciding:
    """The part of a model that scoring uses."""

    def __init__(self, gives_text: bool) -> None:
        self.gives_text, self.decoding = gives_text, tiny_run_config().decoding


def test_the_best_answer_competes_with_the_smallest_no_answer_score() -> None:
    predictions = {
        "a#0": answers(("", 9.0), ("one", 1.0)),
        "b": answers(("", 5.0), ("three", 4.0)),
        "a#1": answers(("four", 4.0), ("", 3.0)),
    }
    found = predictions_by_question(EXAMPLES, predictions, n_best=20)
    assert list(found) == ["a", "b"]
    assert [(candidate.text, candidate.score, candidate.context) for candidate in found["a"].candidates] == [
        ("four", 4.0, 1),
        ("", 3.0, 0),
        ("one", 1.0, 0),
    ]
    assert (found["a"].null_odds, found["a"].text(0.0)) == (-1.0, "four")
    assert found["b"] == predictions["b"]
    results = score_predictions(Deciding(gives_text=True), EXAMPLES, predictions)
    assert (results["question_exact"], results["question_total"], results["exact"]) == (50.0, 2, pytest.approx(200 / 3))


def test_without_texts_the_smallest_null_odds_decide() -> None:
    odds = {"a#0": 4.0, "b": 2.0, "a#1": -3.0}
    predictions = {id: Prediction((Candidate("", 0, 0, value),), value) for id, value in odds.items()}
    found = predictions_by_question(EXAMPLES, predictions, n_best=20, gives_text=False)
    assert {id: prediction.null_odds for id, prediction in found.items()} == {"a": -3.0, "b": 2.0}
    results = score_predictions(Deciding(gives_text=False), EXAMPLES, predictions)
    assert (results["question_answerability_accuracy"], results["question_total"]) == (50.0, 2)
    assert "question_exact" not in results


def test_true_answers_of_all_contexts_are_merged() -> None:
    asked = one_example_per_question(EXAMPLES)
    assert [(example.id, [answer.text for answer in example.answers]) for example in asked] == [
        ("a", ["four"]),
        ("b", ["three"]),
    ]
    assert score(asked, {"a": "four", "b": ""})["exact"] == 50.0


def test_without_several_contexts_no_files_are_added(model: Path, lamella: Any, tmp_path: Path) -> None:
    (tmp_path / "flat.jsonl").write_text(
        json.dumps({"id": "x", "question": "Who?", "context": TEXTS[0], "answers": [TEXTS[0].split()[2]]})
    )
    to = ("--model", model, "--precision", "fp32", "--out", tmp_path / "run")
    code, _, err = lamella("evaluate", tmp_path / "flat.jsonl", *to)
    assert (code, err) == (0, "")
    assert not list((tmp_path / "run").glob("question_*"))
    assert not [key for key in read_json(tmp_path / "run" / runs.RESULTS) if key.startswith("question")]
