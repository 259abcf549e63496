"""A prediction: the n-best answers of one question, with "no answer" among them."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

RANK_WEIGHT = 0.5  # of BM25 against the scores of a reader; tuned in docs/decisions/0049-open-questions.md
NO_SPAN = -1e4  # score of the best span in a context without a single token


class Candidate(NamedTuple):
    """A span of the context, or "no answer" (an empty text at 0)."""

    text: str
    begin_char: int
    end_char: int
    score: float
    probability: float = 0.0
    context: int = 0  # number of its context, where a question has several


@dataclass(frozen=True)
class Prediction:
    """The n-best list of one question, "no answer" included, and its null odds."""

    rows: tuple[tuple[Any, ...], ...]  # the candidates, best first, as plain tuples: they take far less memory
    null_odds: float  # score of "no answer" minus the score of the best span; log-odds if calibrated by features
    windows: int = 1  # how many were read for it

    @functools.cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """The candidates, best first."""
        return tuple(map(Candidate._make, self.rows))

    @property
    def best_span(self) -> Candidate:
        """The best candidate that is an answer."""
        return next((Candidate._make(row) for row in self.rows if row[0]), EMPTY)

    @property
    def null(self) -> Candidate:
        """The candidate "no answer"."""
        return next((Candidate._make(row) for row in self.rows if not row[0]), EMPTY)

    def n_best(self) -> list[dict[str, Any]]:
        """Return the entry of the official n-best file, with exact offsets added."""
        return [
            {"text": text, "probability": probability, "score": score, "start": begin, "end": end}
            for text, begin, end, score, probability, *_ in self.rows
        ]

    def chosen(self, threshold: float) -> Candidate:
        """Return the best answer, or "no answer" if the null odds exceed the threshold."""
        return self.null if self.null_odds > threshold else self.best_span

    def text(self, threshold: float) -> str:
        """Return the text of the best answer, or "" if the null odds exceed the threshold."""
        return self.chosen(threshold).text


EMPTY = Candidate("", 0, 0, NO_SPAN)
ScoredSpan = tuple[str, int, int, float, int]  # text, begin and end character, score, number of the context


def rank(spans: Sequence[ScoredSpan], null: float, windows: int = 1) -> Prediction:
    """Return the n-best list of `spans` (best first) and "no answer", with the probability of each among them."""
    best = spans[0][3] if spans else NO_SPAN
    place = bisect.bisect_left(spans, -null, key=lambda span: -span[3])
    texts, begins, ends, scores, contexts = zip(*spans[:place], ("", 0, 0, null, 0), *spans[place:], strict=True)
    weights = [math.exp(score - scores[0]) for score in scores]
    total = sum(weights)
    probabilities = [weight / total for weight in weights]
    rows = tuple(zip(texts, begins, ends, scores, probabilities, contexts, strict=True))
    return Prediction(rows, null_odds=null - best, windows=windows)


def decision(null_odds: float) -> Prediction:
    """Return the prediction of a model that only decides whether there is an answer."""
    probability = 1 / (1 + math.exp(-max(-500.0, min(500.0, null_odds))))
    return Prediction((Candidate("", 0, 0, null_odds, probability),), null_odds=null_odds)


def rank_together(
    predictions: Sequence[Prediction], n_best: int, *, contexts: Sequence[int] | None = None
) -> Prediction:
    """Return one prediction for a question, from the predictions made separately on each of its contexts.

    `contexts` are the numbers of these contexts, if not all of them were read.
    """
    numbers = range(len(predictions)) if contexts is None else contexts
    if list(numbers) == [0]:
        return predictions[0]
    spans = [
        (text, begin, end, score, context)
        for context, prediction in zip(numbers, predictions, strict=True)
        for text, begin, end, score, *_ in prediction.rows
        if text
    ]
    spans.sort(key=lambda span: -span[3])  # stable: among equal scores the earlier context leads
    return _rank_best(spans, predictions, n_best)


def rank_passages(predictions: Sequence[Prediction], places: Sequence[tuple[int, int]], n_best: int) -> Prediction:
    """Return one prediction for a question, from those of passages; each place is a context and a begin in it.

    As among the windows of a context, a text counts once, at the place where it scores best.
    """
    return _rank_best(_spans_of_passages(predictions, places, [0.0] * len(places)), predictions, n_best)


def rank_found_passages(
    predictions: Sequence[Prediction], places: Sequence[tuple[int, int]], found: Sequence[float], n_best: int
) -> Prediction:
    """Return one prediction for a question, from those of passages that a search found among many.

    Scores of different passages are not comparable as they are. Here an answer counts by its lead over "no answer" in
    its own passage, minus `RANK_WEIGHT` for each point by which the search found its passage less likely than the best
    one (`found`). "No answer" has the score 0. It needs no penalty for the number of windows, since passages further
    down need a larger lead.
    """
    best = max(found)
    shifts = [
        RANK_WEIGHT * (score - best) - prediction.null.score
        for prediction, score in zip(predictions, found, strict=True)
    ]
    return rank(_spans_of_passages(predictions, places, shifts)[:n_best], 0.0)


def _spans_of_passages(
    predictions: Sequence[Prediction], places: Sequence[tuple[int, int]], shifts: Sequence[float]
) -> list[ScoredSpan]:
    """Return the answers of all passages, best first, each text of a context once; a shift is added to the scores."""
    best: dict[tuple[int, str], ScoredSpan] = {}
    for prediction, (context, begin), shift in zip(predictions, places, shifts, strict=True):
        for candidate in prediction.candidates:
            key, score = (context, candidate.text), candidate.score + shift
            if candidate.text and (key not in best or best[key][3] < score):
                span = (begin + candidate.begin_char, begin + candidate.end_char)
                best[key] = (candidate.text, *span, score, context)
    return sorted(best.values(), key=lambda span: (-span[3], span[4], span[1], span[2]))


def _rank_best(spans: Sequence[ScoredSpan], predictions: Sequence[Prediction], n_best: int) -> Prediction:
    null = min(prediction.null.score for prediction in predictions)
    return rank(spans[:n_best], null, sum(prediction.windows for prediction in predictions))
