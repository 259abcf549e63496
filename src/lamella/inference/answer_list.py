"""The answers that `Reader.ask` returns: lists of dicts that display as highlighted text in a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

SURROUNDINGS = 100  # characters of context shown on each side of an answer


class Answer(dict[str, Any]):
    """An answer: `score`, `probability`, `start` and `end` (characters of the context), `answer`.

    A question with several contexts adds `context`, the number of the answer's own. "No answer" has an empty `answer`.
    """

    def __init__(self, values: Mapping[str, Any], *, text: str = "") -> None:
        super().__init__(values)
        self.text = text  # the context that the answer lies in

    def _repr_html_(self) -> str:
        return f"<div>{_answer_html(self)}</div>"


class Answers(list[Answer]):
    """The answers to one question, best first.

    `score` is the share of an answer among all candidates, "no answer" included, as in official n-best files.
    `probability` is `na_prob` for "no answer"; the answers divide the remaining probability by their scores.

    "No answer" is one of the candidates, with an empty `answer`; it comes first if `no_answer` is true.
    """

    def __init__(
        self,
        answers: Iterable[Answer],
        *,
        question: str = "",
        null_score: float,
        na_prob: float,
        no_answer: bool,
    ) -> None:
        super().__init__(answers)
        self.question = question
        self.null_score = null_score  # score of "no answer" minus the score of the best answer
        self.na_prob = na_prob  # probability of "no answer", calibrated if the model is
        self.no_answer = no_answer  # whether `null_score` exceeds the model's threshold

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        return {
            "answers": list(self),
            "no_answer": self.no_answer,
            "na_prob": self.na_prob,
            "null_score": self.null_score,
        }

    def _repr_html_(self) -> str:
        items = "".join(f'<li style="margin: 0.3em 0">{_answer_html(answer)}</li>' for answer in self)
        return f"<div><strong>{html.escape(self.question)}</strong><ol>{items}</ol></div>"


def _answer_html(answer: Answer) -> str:
    """Return an answer highlighted within the text around it; all text is escaped."""
    probability = f'<small style="opacity: 0.7">{answer.get("probability", answer.get("score", 0.0)):.2f}'
    if not answer["answer"]:
        return f"<em>no answer</em> {probability}</small>"
    start, end = answer["start"], answer["end"]
    number = f", context {answer['context']}" if "context" in answer else ""
    place = f"{probability}, characters {start}–{end}{number}</small>"
    if answer.text[start:end] != answer["answer"]:  # its context is not known
        return f"<mark>{html.escape(answer['answer'])}</mark> {place}"
    before, after = _before(answer.text[:start]), _after(answer.text[end:])
    return f"{html.escape(before)}<mark>{html.escape(answer['answer'])}</mark>{html.escape(after)} {place}"


def _before(text: str) -> str:
    """Return the end of a text, cut between words."""
    if len(text) <= SURROUNDINGS:
        return text
    shown = text[-SURROUNDINGS:]
    return f"… {shown.split(maxsplit=1)[-1] if ' ' in shown.strip() else shown}"


def _after(text: str) -> str:
    """Return the beginning of a text, cut between words."""
    if len(text) <= SURROUNDINGS:
        return text
    shown = text[:SURROUNDINGS]
    return f"{shown.rsplit(maxsplit=1)[0] if ' ' in shown.strip() else shown} …"
