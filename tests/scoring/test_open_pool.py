"""Open evaluation: recall of the ranking, answers from a pool, and the same questions with their own contexts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from lamella import Reader
from lamella.data.examples import Answer, Context, Example
from lamella.scoring.open_pool import evaluate_open

pytestmark = pytest.mark.usefixtures("one_thread")

TITAN = Context("Christiaan Huygens discovered the moon Titan in 1655.")
MILL = Context("The mill was built in 1790 by Ann Smith.")
EXAMPLES = [
    Example("1", "Who discovered Titan?", TITAN, (Answer("Christiaan Huygens", 0),)),
    Example("2", "Who built the mill?", MILL, (Answer("Ann Smith", MILL.text.index("Ann")),)),
    Example("3", "Who painted the mill?", MILL),
]


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader.load(device="cpu", precision="fp32")


def test_answers_are_searched_in_all_contexts(reader: Reader) -> None:
    results = evaluate_open(reader, EXAMPLES, pool=["The road is long.", MILL.text])
    assert (results["contexts"], results["questions"], results["total"]) == (3, 3, 3)
    assert results["recall_at_1"] == results["recall_at_50"] == 100
    assert results["exact"] == results["given_exact"] == 100
    assert results["HasAns_total"] == 2
    assert results["seconds_per_question"] > 0


def test_an_answer_counts_as_found_only_in_its_own_context(reader: Reader) -> None:
    decoys = [f"Titan, Titan: who discovered {name} and Titan?" for name in ("Rhea", "Dione")]
    results = evaluate_open(reader, EXAMPLES, pool=[*decoys, "Huygens: Christiaan Huygens."], sample=0)
    assert results["recall_at_1"] == 50
    assert results["recall_at_5"] == 100
    assert "exact" not in results


def test_contexts_of_a_question_count_together(reader: Reader) -> None:
    group = [
        Example("q/0", "Who discovered Titan?", MILL, group="q"),
        Example("q/1", "Who discovered Titan?", TITAN, (Answer("Christiaan Huygens", 0),), group="q"),
    ]
    results = evaluate_open(reader, group)
    assert (results["questions"], results["recall_at_1"], results["exact"], results["given_exact"]) == (
        1,
        100,
        100,
        100,
    )


def test_the_expected_share_of_answerable_questions_holds_in_the_pool_and_with_the_given_contexts(
    reader: Reader,
) -> None:
    eager, strict = (evaluate_open(reader, EXAMPLES, answerable=share) for share in (1 - 1e-9, 1e-9))
    for key in ("HasAns_f1", "given_HasAns_f1"):
        assert (eager[key], strict[key]) == (100, 0)
    for key in ("NoAns_f1", "given_NoAns_f1"):
        assert (eager[key], strict[key]) == (0, 100)


def test_the_command_takes_a_batch_size(lamella: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def load(*_: Any, **options: Any) -> Reader:
        sizes.append(options["batch_size"])
        return cast(Reader, None)  # nothing is asked

    monkeypatch.setattr(Reader, "load", load)
    for option in ([], ["--batch-size", 3]):
        assert lamella("evaluate", "demo:dev", "--open", "--sample", 0, *option)[0] == 0
    assert sizes == [32, 3]


def test_the_command(tmp_path: Path, lamella: Any) -> None:
    rows = [
        {
            "id": example.id,
            "question": example.question,
            "context": example.context.text,
            "answers": {
                "text": [answer.text for answer in example.answers],
                "answer_start": [answer.begin_char for answer in example.answers],
            },
        }
        for example in EXAMPLES
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    code, out, err = lamella("evaluate", data, "--open", "--passages", 1, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["f1"] == 100
    assert "recall_at_10" in lamella("evaluate", data, "--open", "--sample", 0, "--pool", "demo:dev")[1]
    for arguments, message in (
        (["--open", "--out", "run"], "--out"),
        (["--sample", 3, "--model", "default"], "needs --open"),
    ):
        code, out, err = lamella("evaluate", data, *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err
