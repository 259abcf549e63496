"""The script that makes questions about whole articles."""

from __future__ import annotations

import gzip
import json
import random
import runpy
from pathlib import Path
from typing import Any

import pytest

from lamella import load_examples

SCRIPT = str(Path(__file__).parents[2] / "docs" / "whole_articles.py")
TOWNS = ["Abony", "Bodrog", "Cegled", "Dorog", "Eger", "Fony", "Gyula", "Heves", "Iszka", "Jobb"]


def _paragraph(town: str, number: int) -> dict[str, Any]:
    context = f"{town} has {number + 3} bridges over its river. " + 12 * f"People of {town} like walking on them. "
    question = {"id": town, "question": f"How many bridges does {town} have?", "is_impossible": False}
    answer = {"text": f"{number + 3} bridges", "answer_start": context.index(f"{number + 3} bridges")}
    impossible = {"id": f"{town}-no", "question": "Why?", "answers": [], "is_impossible": True}
    return {"context": context, "qas": [{**question, "answers": [answer]}, impossible]}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    articles = [
        {"title": "Towns", "paragraphs": [_paragraph(town, number) for number, town in enumerate(TOWNS)]},
        {"title": "Few", "paragraphs": [_paragraph("Kup", 20)]},
    ]
    with gzip.open(tmp_path / "towns-all-held.json.gz", "wt", encoding="utf-8") as file:
        json.dump({"version": "2", "data": articles}, file)
    monkeypatch.setattr("sys.argv", ["whole_articles.py", str(tmp_path / "towns")])
    runpy.run_path(SCRIPT, run_name="__main__")
    return tmp_path / "towns-articles.json.gz"


def test_every_other_question_loses_its_answer(made: Path) -> None:
    examples = load_examples(made, labelled=True).examples
    assert [example.answerable for example in examples] == [True, False] * 5  # none about the short article
    for example in examples:
        for answer in example.answers:
            assert example.context.text[answer.begin_char :].startswith(answer.text)
        town = example.question.removeprefix("How many bridges does ").removesuffix(" have?")
        assert (f"{town} has" in example.context.text) is example.answerable


def test_the_paragraphs_stand_in_the_order_of_the_article(made: Path) -> None:
    for example in load_examples(made, labelled=True).examples:
        places = [example.context.text.find(f"{town} has") for town in TOWNS]
        found = [place for place in places if place >= 0]
        assert found == sorted(found)
        assert len(found) == (10 if example.answerable else 9)


def test_a_shorter_length_keeps_the_paragraphs_around_the_own() -> None:
    around = runpy.run_path(SCRIPT)["_around"]
    assert around(["a" * 10, "b" * 10, "c" * 10, "d" * 10, "e" * 10], 2, 30) == (
        12,
        "\n\n".join(["b" * 10, "c" * 10, "d" * 10]),
    )


def test_the_same_chance_gives_the_same_questions() -> None:
    ask = runpy.run_path(SCRIPT)["ask"]
    articles = [{"title": "Towns", "paragraphs": [_paragraph(town, number) for number, town in enumerate(TOWNS)]}]
    assert ask(articles, "towns", random.Random(1)) == ask(articles, "towns", random.Random(1))
    assert ask(articles, "towns", random.Random(1)) != ask(articles, "towns", random.Random(2))
