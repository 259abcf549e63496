"""Answers as a notebook shows them: highlighted in their text, escaped, and still plain lists of dicts."""

from __future__ import annotations

import json
import pickle
from html.parser import HTMLParser

from lamella.inference.answer_list import SURROUNDINGS, Answer, Answers

TEXT = "The tower was built by Robert Stevenson in 1810."


class Elements(HTMLParser):
    """The tags of some HTML, the text in each `mark`, and all text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.marked: list[str] = []
        self.text = ""
        self.inside = False
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        self.inside = tag == "mark"
        if self.inside:
            self.marked.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.inside:
            self.marked[-1] += data


def answer(text: str, answer: str, **more: object) -> Answer:
    start = text.index(answer)
    values = {"score": 0.9, "probability": 0.84, "start": start, "end": start + len(answer), "answer": answer, **more}
    return Answer(values, text=text)


def answers(*found: Answer, question: str = "Who built it?", no_answer: bool = False) -> Answers:
    return Answers(found, question=question, null_score=-2.0, na_prob=0.1, no_answer=no_answer)


def test_the_answer_is_highlighted_in_its_text() -> None:
    shown = Elements(answers(answer(TEXT, "Robert Stevenson"))._repr_html_())
    assert shown.marked == ["Robert Stevenson"]
    assert "Who built it?" in shown.text
    assert "The tower was built by Robert Stevenson in 1810." in shown.text
    assert "0.84, characters 23–39" in shown.text


def test_text_from_outside_is_escaped() -> None:
    hostile = "<script>alert('x')</script> & \"<b>Robert</b>\" built it"
    shown = answers(answer(hostile, "<b>Robert</b>"), question="<script>who?</script>")._repr_html_()
    elements = Elements(shown)
    assert set(elements.tags) == {"div", "strong", "ol", "li", "mark", "small"}
    assert elements.marked == ["<b>Robert</b>"]
    assert hostile in elements.text
    assert "<script>who?</script>" in elements.text
    alone = Answer({"score": 1.0, "start": 0, "end": 8, "answer": "<script>"}, text="other")
    assert set(Elements(alone._repr_html_()).tags) == {"div", "mark", "small"}


def test_no_answer_is_shown_as_such() -> None:
    nothing = Answer({"score": 0.7, "probability": 0.6, "start": 0, "end": 0, "answer": ""}, text=TEXT)
    shown = Elements(answers(nothing, no_answer=True)._repr_html_())
    assert shown.marked == []
    assert "no answer 0.60" in shown.text
    assert "tower" not in shown.text


def test_a_withheld_answer_is_shown_as_the_best_guess() -> None:
    nothing = Answer({"score": 0.7, "probability": 0.6, "start": 0, "end": 0, "answer": ""}, text=TEXT)
    guess = answer(TEXT, "Robert Stevenson", probability=0.31)
    found = Answers([nothing], null_score=2.0, na_prob=0.6, no_answer=True, best_guess=guess)
    shown = Elements(found._repr_html_())
    assert shown.marked == ["Robert Stevenson"]
    assert "best guess: The tower was built by Robert Stevenson in 1810. 0.31" in shown.text
    assert json.loads(json.dumps(found.to_json()))["best_guess"] == guess
    listed = Answers([nothing, guess], null_score=2.0, na_prob=0.6, no_answer=True, best_guess=guess)
    assert "best guess" not in listed._repr_html_()  # it is the second answer
    assert pickle.loads(pickle.dumps(found)).best_guess == guess


def test_only_the_surroundings_are_shown_cut_between_words() -> None:
    words = " ".join(f"word{number}" for number in range(200))
    shown = Elements(answer(words, "word100", context=2)._repr_html_()).text
    assert shown.startswith("… word")
    assert ", context 2" in shown
    before, after = shown.split("word100", 1)
    assert len(before) <= SURROUNDINGS + 2
    assert set(before.split()) - {"…"} <= set(words.split())
    assert after.split("…")[0].split()[-1] in words.split()
    unbroken = "x" * 500 + "ANSWER" + "y" * 500
    assert (
        f"… {'x' * SURROUNDINGS}ANSWER{'y' * SURROUNDINGS} …" in Elements(answer(unbroken, "ANSWER")._repr_html_()).text
    )


def test_they_stay_lists_of_dicts() -> None:
    found = answers(answer(TEXT, "Robert Stevenson"))
    plain = [{"score": 0.9, "probability": 0.84, "start": 23, "end": 39, "answer": "Robert Stevenson"}]
    assert found == plain
    assert repr(found) == repr(plain)
    assert json.loads(json.dumps(found)) == plain
    assert json.loads(json.dumps(found.to_json())) == {
        "answers": plain,
        "no_answer": False,
        "na_prob": 0.1,
        "null_score": -2.0,
    }
    copy = pickle.loads(pickle.dumps(found))
    assert copy == plain
    assert copy._repr_html_() == found._repr_html_()
