"""Scores by what questions are like: their length, that of context and answer, question word, place of the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamella.data.examples import Example
from lamella.scoring.metrics import QuestionScores
from lamella.study.analysis.mistake_kinds import answer_places, words

BINS = 5
QUESTION_WORDS = ("who", "whom", "whose", "what", "which", "when", "where", "why", "how")
SAME_AS = {"whom": "who", "whose": "who"}
OTHER = "other"
_LETTERS = re.compile(r"[^\W\d_]+")


class Grouping(NamedTuple):
    """Names of groups in their order, and the number of each question's group; -1 for one that is in none."""

    names: list[str]
    group: NDArray[np.int64]


def groupings(examples: Sequence[Example]) -> dict[str, Grouping]:
    """All the ways in which questions are grouped. Lengths are in words; answers are the first of each question."""
    first = [one.answers[0].text if one.answerable else None for one in examples]
    return {
        "context_length": by_quantiles([words(one.context.text) for one in examples]),
        "question_length": by_quantiles([words(one.question) for one in examples]),
        "answer_length": by_quantiles([None if text is None else words(text) for text in first]),
        "question_word": by_name([question_word(one.question) for one in examples]),
        "answer_position": by_fifths([_position(one) for one in examples]),
    }


def grouped_scores(scores: QuestionScores, grouping: Grouping) -> list[dict[str, Any]]:
    """Exact match and F1 (in percent) of every group that has questions, and the share of them that got an answer.

    The share of answerable ones stands beside them: a reader that is better at one kind scores by the mixture.
    """
    rows = []
    for number, name in enumerate(grouping.names):
        where = grouping.group == number
        if count := int(where.sum()):
            exact, f1 = 100 * float(scores.exact[where].mean()), 100 * float(scores.f1[where].mean())
            shares = {
                "has_answer_share": float(scores.answerable[where].mean()),
                "answered_share": float(scores.answered[where].mean()),
            }
            rows.append({"group": name, "count": count, **shares, "exact": exact, "f1": f1})
    return rows


def by_quantiles(values: Sequence[int | None], bins: int = BINS) -> Grouping:
    """Whole numbers in bins of about equal size, named by their edges, both inclusive.

    Values that are often equal give fewer bins: 1 1 1 1 2 3 has the edges 1 and 2, so "1", "2" and "3".
    """
    known = np.array([value for value in values if value is not None], np.int64)
    if not len(known):
        return Grouping([], np.full(len(values), -1))
    cuts = np.quantile(known, np.arange(1, bins) / bins, method="inverted_cdf")
    edges = [*(int(cut) for cut in np.unique(cuts) if cut < known.max()), int(known.max())]
    lows = [int(known.min()), *(edge + 1 for edge in edges[:-1])]
    names = [str(low) if low == high else f"{low}–{high}" for low, high in zip(lows, edges, strict=True)]
    group = [-1 if value is None else int(np.searchsorted(edges, value)) for value in values]
    return Grouping(names, np.array(group, np.int64))


def by_fifths(values: Sequence[float | None]) -> Grouping:
    """Parts of a whole, in five equal bins; 1 itself is in the last."""
    names = [f"{20 * fifth}–{20 * fifth + 20} %" for fifth in range(5)]
    group = [-1 if value is None else min(4, int(5 * value)) for value in values]
    return Grouping(names, np.array(group, np.int64))


def by_name(names: Sequence[str]) -> Grouping:
    """Groups by a name, the most frequent first, `other` last."""
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    order = sorted(counts, key=lambda name: (name == OTHER, -counts[name], name))
    return Grouping(order, np.array([order.index(name) for name in names], np.int64))


def question_word(question: str) -> str:
    """The first question word of an English question, wherever it stands ("In what year …" asks what).

    "how many" and "how much" are one of their own, as their answers are numbers.
    """
    letters = [word.lower() for word in _LETTERS.findall(question)]
    for word, following in pairwise([*letters, ""]):
        if word in QUESTION_WORDS:
            return "how many" if word == "how" and following in ("many", "much") else SAME_AS.get(word, word)
    return OTHER


def _position(example: Example) -> float | None:
    """Where the first true answer begins, as a part of the context."""
    places = answer_places(example)
    return places[0][0] / len(example.context.text) if places else None
