"""The threshold of an adapted reader: tuned on what was left out if that is enough, else its parent's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from calibration_data import answered_by
from lamella.data.examples import Answer, Context, Example
from lamella.decoding_options import DecodingOptions
from lamella.inference.predict import predict
from lamella.inference.protocols import QAModel
from lamella.models.loading import load_model
from lamella.scoring.threshold import assign_folds
from lamella.serve.adapted_threshold import answers_at, choose_threshold
from tiny_reader import save_tiny_bert, save_tiny_reader

PARENT = DecodingOptions(null_score_diff_threshold=-100.0, window_penalty=0.5)  # never answers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> QAModel:
    folder = tmp_path_factory.mktemp("adapted")
    return load_model(str(save_tiny_reader(folder / "tiny", save_tiny_bert(folder / "encoder"), abstains=4.0)))


@pytest.fixture(scope="module")
def examples(model: QAModel) -> list[Example]:
    """50 questions about ten texts, of which the reader would answer half with the right threshold, and well."""
    contexts = [Context(f"The box number {number} is {number + 40} and was made in {number}.") for number in range(10)]
    words = ("Which", "Who", "Where is", "What", "When was")
    made = [Example(f"{n}-{word}", f"{word} box {n}?", context) for n, context in enumerate(contexts) for word in words]
    return answered_by(model, made)


def test_enough_corrections_tune_it(model: QAModel, examples: list[Example]) -> None:
    choice = choose_threshold(model, PARENT, examples)
    report, decoding = choice.tuned.report, choice.tuned.decoding
    assert report["threshold_choice"] == "tuned"
    assert decoding.null_score_diff_threshold == report["threshold"] > PARENT.null_score_diff_threshold
    assert decoding.tuned_on is not None
    assert decoding.tuned_on.questions == 50
    assert "readily it answers was tuned" in choice.sentence("default")
    assert choice.answers.keys() == {example.id for example in examples}
    assert 10 < sum(text != "" for text in choice.answers.values()) < 40


def test_the_answer_to_a_correction_does_not_depend_on_what_is_right_for_its_text(
    model: QAModel, examples: list[Example]
) -> None:
    """Otherwise the verdict on the adapted reader would be too good."""
    folds = assign_folds(examples)
    assert folds is not None
    changed = {
        example.id: replace(example, answers=() if example.answers else (Answer("The", 0),))
        for example, fold in zip(examples, folds, strict=True)
        if fold == 0
    }
    before, after = (
        choose_threshold(model, PARENT, questions)
        for questions in (examples, [changed.get(example.id, example) for example in examples])
    )
    assert after.tuned.decoding.null_score_diff_threshold != before.tuned.decoding.null_score_diff_threshold
    assert {id_: after.answers[id_] for id_ in changed} == {id_: before.answers[id_] for id_ in changed}


@pytest.mark.parametrize("merge", ["scores", "leads"])
def test_windows_compete_as_in_the_parent(model: QAModel, examples: list[Example], merge: Any) -> None:
    """Its threshold was tuned for that."""
    parent = PARENT.model_copy(update={"merge": merge})
    for questions in (examples, examples[:20]):
        assert choose_threshold(model, parent, questions).tuned.decoding.merge == merge


@pytest.mark.parametrize("kind", ["few", "one kind", "one text"])
def test_otherwise_the_parents_is_kept(model: QAModel, examples: list[Example], kind: str) -> None:
    one_text = examples[0].context
    questions = {
        "few": examples[:20],
        "one kind": [replace(example, answers=()) for example in examples],
        "one text": [
            replace(example, context=one_text, answers=(Answer("The", 0),) if number % 2 else ())
            for number, example in enumerate(examples)
        ],
    }[kind]
    choice = choose_threshold(model, PARENT, questions)
    decoding = choice.tuned.decoding
    assert (decoding.null_score_diff_threshold, decoding.window_penalty) == (-100.0, 0.5)
    assert choice.tuned.report == {}
    assert choice.sentence("default").startswith(
        "It answers as readily as default: tuning its threshold takes about 40"
    )
    assert choice.answers == answers_at(PARENT, predict(model, questions)) == dict.fromkeys(choice.answers, "")


def test_a_tuned_one_that_is_not_better_is_not_stored(model: QAModel, examples: list[Example]) -> None:
    best = choose_threshold(model, PARENT, examples).tuned.decoding
    parent = PARENT.model_copy(
        update={"null_score_diff_threshold": best.null_score_diff_threshold, "window_penalty": 0.0}
    )
    choice = choose_threshold(model, parent, examples)
    assert choice.enough
    assert choice.tuned.report == {}
    assert choice.tuned.decoding.null_score_diff_threshold == parent.null_score_diff_threshold
    assert choice.sentence("mine") == (
        "It answers as readily as mine: a threshold tuned on these corrections is not better on other texts."
    )
