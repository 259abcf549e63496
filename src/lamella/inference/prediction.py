"""A prediction: the n-best answers of one question, "no answer" among them."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

NO_SPAN = -1e4  # the score of the best span where a context has no token to make one of


class Candidate(NamedTuple):
    """One span of the context, or "no answer" (an empty text at 0)."""

    text: str
    begin_char: int
    end_char: int
    score: float
    probability: float = 0.0
    context: int = 0  # which one, where a question is asked of several

    def to_json(self) -> dict[str, Any]:
        """The words of the official n-best file, with our exact offsets."""
        return {
            "text": self.text,
            "probability": self.probability,
            "score": self.score,
            "start": self.begin_char,
            "end": self.end_char,
        }


@dataclass(frozen=True)
class Prediction:
    """What is known about one question: its n-best list, "no answer" among it, and how the two sides compare."""

    rows: tuple[tuple[Any, ...], ...]  # the candidates as plain tuples, which cost far less to keep; best first
    null_odds: float  # score of "no answer" minus that of the best span

    @functools.cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """Best first."""
        return tuple(map(Candidate._make, self.rows))

    @property
    def best_span(self) -> Candidate:
        """The best candidate that is an answer."""
        return next((one for one in self.candidates if one.text), EMPTY)

    @property
    def null(self) -> Candidate:
        """ "No answer" among the candidates."""
        return next((one for one in self.candidates if not one.text), EMPTY)

    def chosen(self, threshold: float) -> Candidate:
        """The best answer, or "no answer" where the null odds exceed the threshold."""
        return self.null if self.null_odds > threshold else self.best_span

    def text(self, threshold: float) -> str:
        """The answer, or the empty string where the null odds exceed the threshold."""
        return self.chosen(threshold).text


EMPTY = Candidate("", 0, 0, NO_SPAN)
ScoredSpan = tuple[str, int, int, float, int]  # a candidate to be: text, begin and end, score, number of the context


def rank(answers: Sequence[ScoredSpan], null: float) -> Prediction:
    """The n-best list of answers, given best first, and "no answer", with the probability of each among them."""
    best = answers[0][3] if answers else NO_SPAN
    place = bisect.bisect_left(answers, -null, key=lambda one: -one[3])
    texts, begins, ends, scores, contexts = zip(*answers[:place], ("", 0, 0, null, 0), *answers[place:], strict=True)
    weights = [math.exp(score - scores[0]) for score in scores]
    total = sum(weights)
    probabilities = [weight / total for weight in weights]
    rows = tuple(zip(texts, begins, ends, scores, probabilities, contexts, strict=True))
    return Prediction(rows, null_odds=null - best)


def rank_together(predictions: Sequence[Prediction], n_best: int) -> Prediction:
    """One prediction for a question that was asked of several contexts, each of which knows nothing of the others."""
    if len(predictions) == 1:
        return predictions[0]
    answers = [
        (one.text, one.begin_char, one.end_char, one.score, context)
        for context, prediction in enumerate(predictions)
        for one in prediction.candidates
        if one.text
    ]
    answers.sort(key=lambda one: -one[3])  # stable: of equals, the earlier context leads
    return rank(answers[:n_best], min(prediction.null.score for prediction in predictions))
