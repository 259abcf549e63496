"""Merge the spans of windows into one prediction per question."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from lamella.config import DecodingOptions
from lamella.data.examples import Example
from lamella.data.features import Features
from lamella.inference.decode import WindowSpans
from lamella.inference.prediction import Candidate, Prediction, ScoredSpan, rank

WINDOWS_KEPT = 64  # of one question, before the best of them are taken together


class WindowMerger:
    """Gathers the spans of windows, however they come, into the prediction of every question.

    Of a question it keeps a few times as many spans as are wanted, so that memory does not grow with the context.
    """

    def __init__(self, options: DecodingOptions, *, gives_text: bool = True) -> None:
        self.options, self.gives_text = options, gives_text
        # Of windows that each choose between one span and nothing, the surest decides; else see the top of this file.
        self._null_of_two = max if options.method == "independent" else min
        self._spans: dict[str, list[_Spans]] = {}  # for every window, best first
        self._nulls: dict[str, float] = {}

    def add(self, features: Features, found: WindowSpans) -> None:
        """Take in what was found in some windows."""
        counts = (found.score > -math.inf).sum(axis=1).tolist()
        shifts = features.first_token[found.windows] - features.context_begin[found.windows]
        first, last = found.start + shifts[:, None], found.end + shifts[:, None]
        numbers = features.example[found.windows].tolist()
        for row, (number, count, null) in enumerate(zip(numbers, counts, found.null.tolist(), strict=True)):
            example, offsets = features.examples[number], features.offsets[number]
            self._nulls[example.id] = self._null_of_two(self._nulls.get(example.id, null), null)
            places = offsets[first[row, :count], 0], offsets[last[row, :count], 1]
            windows = self._spans.setdefault(example.id, [])
            windows.append((found.score[row, :count], *places))
            if len(windows) == WINDOWS_KEPT:
                best = _best_of(windows, example.context.text, self.options.n_best_size)
                self._spans[example.id] = [_as_arrays(best)]

    def predictions(self, examples: Iterable[Example]) -> dict[str, Prediction]:
        """The prediction of every question that has been seen, in the order given."""
        make = self._of_spans if self.gives_text else self._of_odds
        return {example.id: make(example) for example in examples if example.id in self._nulls}

    def _of_spans(self, example: Example) -> Prediction:
        best = _best_of(self._spans[example.id], example.context.text, self.options.n_best_size)
        return rank(best, self._nulls[example.id])

    def _of_odds(self, example: Example) -> Prediction:
        odds = self._nulls[example.id]
        return Prediction((Candidate("", 0, 0, odds, _logistic(odds)),), null_odds=odds)


_Spans = tuple[NDArray[np.float64], NDArray[np.int32], NDArray[np.int32]]  # scores, begins and ends in characters


def _best_of(windows: Sequence[_Spans], context: str, n_best: int) -> list[ScoredSpan]:
    """The n best texts of some windows, best first, each where it scores best; an empty one is no answer."""
    scores, begins, ends = windows[0]
    if len(windows) > 1:
        scores, begins, ends = (np.concatenate(columns) for columns in zip(*windows, strict=True))
        order = np.lexsort((ends, begins, -scores))
        scores, begins, ends = scores[order], begins[order], ends[order]
    best: dict[str, ScoredSpan] = {}
    for score, begin, end in zip(scores.tolist(), begins.tolist(), ends.tolist(), strict=True):
        text = context[begin:end]
        if text and text not in best:
            best[text] = (text, begin, end, score, 0)
            if len(best) == n_best:
                break
    return list(best.values())


def _as_arrays(answers: Sequence[ScoredSpan]) -> _Spans:
    """The same in the form that many of them are kept in."""
    _, begins, ends, scores, _ = zip(*answers, strict=True) if answers else ((),) * 5
    return np.array(scores, np.float64), np.array(begins, np.int32), np.array(ends, np.int32)


def _logistic(value: float) -> float:
    return 1 / (1 + math.exp(-max(-500.0, min(500.0, value))))
