"""The answers that `Reader.ask` returns: lists of dicts that display as highlighted text in a notebook."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NEAR = 1000  # characters on each side of an answer in which the ends of its sentence are looked for
SURROUNDINGS = 100  # characters of context shown on each side of an answer

_SENTENCE_END = re.compile(r"(?<!\b[A-Z])[.!?…][\"'”’)\]]*(?=\s|$)|[。！？]|\n\s*\n")  # not after an initial
_SPACES = re.compile(r"\s+")


class Answer(dict[str, Any]):
    """An answer: `score`, `probability`, `start` and `end` (characters of the context), `answer`.

    A question with several contexts adds `context`, the number of the answer's own. "No answer" has an empty `answer`.
    """

    def __init__(self, values: Mapping[str, Any], *, text: str = "") -> None:
        super().__init__(values)
        self.text = text  # the context that the answer lies in

    def sentence(self) -> tuple[str, str, str]:
        """Return the sentence that the answer lies in, on one line: the text before the answer, the answer, the rest.

        Without its context, only the answer is known.
        """
        start, end = self["start"], self["end"]
        if self.text[start:end] != self["answer"]:
            return "", self["answer"], ""
        before, after = self.text[max(0, start - NEAR) : start], self.text[end : end + NEAR]
        ends = [match.end() for match in _SENTENCE_END.finditer(before)]
        close = _SENTENCE_END.search(after)
        before, after = before[ends[-1] if ends else 0 :].lstrip(), after[: close.end() if close else None].rstrip()
        before, found, after = (_SPACES.sub(" ", part) for part in (_before(before), self["answer"], _after(after)))
        return before, found, after

    def _repr_html_(self) -> str:
        return f"<div>{_answer_html(self)}</div>"


class Answers(list[Answer]):
    """The answers to one question, best first.

    `score` is the share of an answer among all candidates, "no answer" included, as in official n-best files.
    `probability` is `na_prob` for "no answer"; the answers divide the remaining probability by their scores.

    "No answer" is one of the candidates, with an empty `answer`; it comes first if `no_answer` is true. `best_guess` is
    then the best of the answers that were withheld, so that a person can decide.
    """

    def __init__(
        self,
        answers: Iterable[Answer],
        *,
        question: str = "",
        null_score: float,
        na_prob: float,
        no_answer: bool,
        best_guess: Answer | None = None,
        passages: tuple[int, int] | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        super().__init__(answers)
        self.question = question
        self.null_score = null_score  # score of "no answer" minus the score of the best answer
        self.na_prob = na_prob  # probability of "no answer", calibrated if the model is
        self.no_answer = no_answer  # whether `null_score` exceeds the threshold
        self.best_guess = best_guess  # the best answer, if it was withheld
        self.passages = passages  # how many passages were read, of how many; None if the contexts were read whole
        self.warnings = tuple(warnings)  # reasons to doubt the answers to this question

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        return {
            "answers": list(self),
            "no_answer": self.no_answer,
            "na_prob": self.na_prob,
            "null_score": self.null_score,
            **({} if self.best_guess is None else {"best_guess": self.best_guess}),
            **({} if self.passages is None else {"passages": dict(zip(("read", "of"), self.passages, strict=True))}),
        }

    def _repr_html_(self) -> str:
        items = "".join(f'<li style="margin: 0.3em 0">{_answer_html(answer)}</li>' for answer in self)
        if self.best_guess is not None and self.best_guess not in self:
            items += f'<li style="list-style: none"><small>best guess:</small> {_answer_html(self.best_guess)}</li>'
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
