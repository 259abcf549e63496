"""Reading questions to answer: ids that predictions could not keep apart, and unreadable questions, are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lamella.data.examples import Context, Example
from lamella.errors import DataError
from lamella.inference.questions import check_unique_ids, read_questions

ROME = Context("In Rome.")


@pytest.mark.parametrize(
    "examples",
    [
        [Example("a", "Who?", ROME), Example("a", "When?", ROME)],
        [Example("a", "Who?", ROME), Example("a", "Who?", ROME)],
        [Example("a#0", "Who?", ROME, group="a"), Example("a#1", "When?", ROME, group="a")],
        [Example("a", "Who?", ROME), Example("b", "When?", ROME, group="a")],
    ],
)
def test_an_id_of_several_questions_is_refused(examples: list[Example]) -> None:
    with pytest.raises(DataError, match="question id 'a': expected one question, got several") as error:
        check_unique_ids(examples)
    assert "\n" not in str(error.value)


def test_a_question_about_several_contexts_has_one_id() -> None:
    check_unique_ids([Example("a#0", "Who?", ROME, group="a"), Example("a#1", "Who?", Context("In Oslo."), group="a")])


@pytest.mark.parametrize(
    "broken",
    [
        "no article",
        {"title": "no paragraphs"},
        {"title": "t", "paragraphs": None},
        {"title": "t", "paragraphs": ["no paragraph"]},
        {"title": "t", "paragraphs": [{"context": "no questions"}]},
        {"title": "t", "paragraphs": [{"qas": [{"id": "no context"}]}]},
    ],
)
def test_an_article_that_cannot_be_read_is_not_left_out(broken: Any, tmp_path: Path) -> None:
    question = {"id": "a", "question": "Where?", "answers": [{"text": "Rome", "answer_start": 3}]}
    article = {"title": "Rome", "paragraphs": [{"context": ROME.text, "qas": [question]}]}
    file = tmp_path / "data.json"
    file.write_text(json.dumps({"version": "1.1", "data": [article, broken]}), encoding="utf-8")
    with pytest.raises(DataError, match=r"data\.json: 1 question cannot be read; see why with: lamella check"):
        read_questions(str(file), labelled=True)
    file.write_text(json.dumps({"version": "1.1", "data": [article]}), encoding="utf-8")
    assert len(read_questions(str(file), labelled=True)) == 1
