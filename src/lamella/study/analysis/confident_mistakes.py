"""A page of the most confident mistakes of runs, in Markdown: the question, and both answers marked in the context."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lamella.data.examples import Example
from lamella.inference.prediction import Candidate, Prediction
from lamella.scoring.metrics import QuestionScores
from lamella.study.analysis.mistake_kinds import answer_places, chosen_candidate

MOST = 50
AROUND = 300  # characters of the context that are shown on each side of a mark
GOLD, GIVEN = ("⟪", "⟫"), ("⟦", "⟧")
_LIST = re.compile(r"^(\d*)([-+=.)])")  # would begin a list, or make a heading of the line before
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~&])")


class Mistake(NamedTuple):
    """A wrong answer, and how sure the run was of it: the probability in its own n-best list."""

    example: Example
    prediction: Prediction
    given: Candidate

    @property
    def confidence(self) -> float:
        return self.given.probability


def confident_mistakes(
    examples: Sequence[Example],
    scores: QuestionScores,
    texts: Mapping[str, str],
    predictions: Mapping[str, Prediction],
    *,
    most: int = MOST,
) -> list[Mistake]:
    """The wrong answers, "no answer" among them, that were thought most probable; of equals, the earlier first."""
    found = []
    for example, exact in zip(examples, scores.exact.tolist(), strict=True):
        given = chosen_candidate(predictions[example.id], texts[example.id])
        if exact < 1 and given is not None:
            found.append(Mistake(example, predictions[example.id], given))
    return sorted(found, key=lambda mistake: -mistake.confidence)[:most]


def mistakes_page(mistakes: Mapping[str, Sequence[Mistake]]) -> str:
    """The page: a section for every run."""
    marks = f"True answers stand in {GOLD[0]}…{GOLD[1]}, the answer given in {GIVEN[0]}…{GIVEN[1]}."
    lines = ["# The most confident mistakes", "", f"{marks} Probabilities are those of the run's own n-best list.", ""]
    for name, found in mistakes.items():
        lines += [f"## {_plain(name)}", "", f"{len(found)} mistakes, the surest first." if found else "None.", ""]
        for number, mistake in enumerate(found, start=1):
            lines += [*_entry(number, mistake), ""]
    return "\n".join(lines)


def marked(example: Example, given: Candidate) -> str:
    """The context around the answers, with both marked; they may overlap, so these are marks and not tags."""
    text = example.context.text
    spans = [(*place, GOLD) for place in answer_places(example)]
    if given.text:
        spans.append((given.begin_char, given.end_char, GIVEN))
    # At one place an end comes before a begin; of two that begin there the longer is outside, as it is at their ends.
    marks = [(first, 1, -last, signs[0]) for first, last, signs in spans]
    marks += [(last, 0, -first, signs[1]) for first, last, signs in spans]
    shown: list[str] = []
    at = 0
    for place, _, _, sign in sorted(marks):
        shown += [_shortened(text[at:place], head=bool(shown), tail=True), sign]
        at = place
    whole = "".join([*shown, _shortened(text[at:], head=True, tail=False)])
    return _LIST.sub(r"\1\\\2", whole)


def _shortened(text: str, *, head: bool, tail: bool) -> str:
    """A stretch of the context that stands between marks: where it is long, only its head and tail, in whole words."""
    if len(text) <= AROUND * (head + tail):
        return _plain(text)
    first, last = text[:AROUND], text[len(text) - AROUND :]
    first = f"{first.rpartition(' ')[0] or first} " if head else ""
    last = f" {last.partition(' ')[2] or last}" if tail else ""
    return _plain(f"{first}…{last}")


def _entry(number: int, mistake: Mistake) -> list[str]:
    example, prediction, given = mistake
    golds = " / ".join(_plain(text) for text in dict.fromkeys(one.text for one in example.answers))
    others = [one for one in prediction.candidates if one.text != given.text]
    second = f"next: {_named(others[0])}; " if others else ""
    return [
        f"### {number}. {_plain(example.question) or '(an empty question)'}",
        "",
        f"- given: {_named(given)}",
        f"- true: {golds or 'no answer'}",
        f"- {second}null odds {prediction.null_odds:+.2f}; id {_plain(example.id)}",
        "",
        f"> {marked(example, given)}",
    ]


def _named(candidate: Candidate) -> str:
    return f"{_plain(candidate.text) or 'no answer'} ({100 * candidate.probability:.1f} %)"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return _MARKDOWN.sub(r"\\\1", re.sub(r"\s+", " ", text))
