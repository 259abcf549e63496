"""The most confident mistakes of runs, in Markdown: the question, and both answers marked in the context."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lamella.data.examples import Example
from lamella.errors import counted
from lamella.inference.prediction import Candidate, Prediction
from lamella.inference.prediction_files import HAS_ANSWER
from lamella.scoring.metrics import QuestionScores
from lamella.study.analysis.mistake_kinds import chosen_candidate, gold_spans
from lamella.study.records import is_number, read_json_object

MOST = 50
AROUND = 300  # characters of the context shown on each side of a mark
GOLD, PREDICTED = ("⟪", "⟫"), ("⟦", "⟧")
TINY = 1e-12  # the smallest probability that has odds
_LIST = re.compile(r"^(\d*)([-+=.)])")  # would begin a list, or turn the previous line into a heading
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~&])")


class Mistake(NamedTuple):
    """A wrong answer, and the confidence of the run in it: its probability in the n-best list."""

    example: Example
    prediction: Prediction
    chosen: Candidate

    @property
    def confidence(self) -> float:
        """The probability of the chosen answer."""
        return self.chosen.probability


def confident_mistakes(
    examples: Sequence[Example],
    scores: QuestionScores,
    texts: Mapping[str, str],
    predictions: Mapping[str, Prediction],
    *,
    most: int = MOST,
) -> list[Mistake]:
    """Return the wrong answers with the highest probability, including "no answer"; ties stay in their order."""
    mistakes = []
    for example, exact in zip(examples, scores.exact.tolist(), strict=True):
        chosen = chosen_candidate(predictions[example.id], texts[example.id])
        if exact < 1 and chosen is not None:
            mistakes.append(Mistake(example, predictions[example.id], chosen))
    return sorted(mistakes, key=lambda mistake: -mistake.confidence)[:most]


def confident_decisions(
    examples: Sequence[Example], scores: QuestionScores, na_prob: Mapping[str, float], *, most: int = MOST
) -> list[Mistake]:
    """Return the wrong decisions to answer with the highest probability; ties stay in their order."""
    mistakes = []
    for example, exact, answered in zip(examples, scores.exact.tolist(), scores.answered.tolist(), strict=True):
        if exact < 1 and example.id in na_prob:
            no_answer = float(na_prob[example.id])
            odds = math.log(max(no_answer, TINY) / max(1 - no_answer, TINY))
            chosen = Candidate(HAS_ANSWER if answered else "", 0, 0, odds, 1 - no_answer if answered else no_answer)
            mistakes.append(Mistake(example, Prediction((chosen,), odds), chosen))
    return sorted(mistakes, key=lambda mistake: -mistake.confidence)[:most]


def read_probabilities(path: Path) -> dict[str, float]:
    """Read the probabilities of a file, by question; what is none is left out."""
    return {id: value for id, value in read_json_object(path).items() if is_number(value) and 0 <= value <= 1}


def mistakes_markdown(mistakes: Mapping[str, Sequence[Mistake]]) -> str:
    """Return the Markdown text, with a section per run."""
    marks = f"True answers are marked {GOLD[0]}…{GOLD[1]}, predicted answers {PREDICTED[0]}…{PREDICTED[1]}."
    lines = ["# The most confident mistakes", "", f"{marks} Probabilities come from the run's own n-best list.", ""]
    for name, of_run in mistakes.items():
        count = f"{counted(len(of_run), 'mistake')}, most confident first." if of_run else "None."
        lines += [f"## {_escape(name)}", "", count, ""]
        for number, mistake in enumerate(of_run, start=1):
            lines += [*_entry(number, mistake), ""]
    return "\n".join(lines)


def marked_context(example: Example, chosen: Candidate) -> str:
    """Return the context around the answers with both marked. The spans may overlap, so the marks are not tags."""
    text = example.context.text
    spans = [(*span, GOLD) for span in gold_spans(example)]
    if chosen.end_char > chosen.begin_char:
        spans.append((chosen.begin_char, chosen.end_char, PREDICTED))
    # At one position an end comes before a begin; of two spans that begin together, the longer one is outside.
    marks = [(begin, 1, -end, signs[0]) for begin, end, signs in spans]
    marks += [(end, 0, -begin, signs[1]) for begin, end, signs in spans]
    shown: list[str] = []
    at = 0
    for position, _, _, sign in sorted(marks):
        shown += [_shorten(text[at:position], head=bool(shown), tail=True), sign]
        at = position
    whole = "".join([*shown, _shorten(text[at:], head=True, tail=False)])
    return _LIST.sub(r"\1\\\2", whole)


def _shorten(text: str, *, head: bool, tail: bool) -> str:
    """Shorten a long stretch of context between marks to its head and tail, in whole words."""
    if len(text) <= AROUND * (head + tail):
        return _escape(text)
    first, last = text[:AROUND], text[len(text) - AROUND :]
    first = f"{first.rpartition(' ')[0] or first} " if head else ""
    last = f" {last.partition(' ')[2] or last}" if tail else ""
    return _escape(f"{first}…{last}")


def _entry(number: int, mistake: Mistake) -> list[str]:
    example, prediction, chosen = mistake
    golds = " / ".join(_escape(text) for text in dict.fromkeys(answer.text for answer in example.answers))
    rest = [candidate for candidate in prediction.candidates if candidate.text != chosen.text]
    second = f"second: {_describe(rest[0])}; " if rest else ""
    return [
        f"### {number}. {_escape(example.question) or '(an empty question)'}",
        "",
        f"- predicted: {_describe(chosen)}",
        f"- true: {golds or 'no answer'}",
        f"- {second}null odds {prediction.null_odds:+.2f}; id {_escape(example.id)}",
        "",
        f"> {marked_context(example, chosen)}",
    ]


def _describe(candidate: Candidate) -> str:
    return f"{_escape(candidate.text) or 'no answer'} ({100 * candidate.probability:.1f} %)"


def _escape(text: str) -> str:
    """Return text that Markdown shows literally, on one line."""
    return _MARKDOWN.sub(r"\\\1", re.sub(r"\s+", " ", text))
