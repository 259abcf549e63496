"""Merge the spans of windows into one prediction per question.

A question takes the smallest "no answer" score of its windows, as the official SQuAD 2.0 code does: every window that
misses the answer is right to report "not here".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from lamella.config import DecodingOptions
from lamella.data.examples import Example
from lamella.data.windows.features import Features
from lamella.garbage import paused_garbage_collection
from lamella.inference.abstention import calibrated
from lamella.inference.decode import WindowSpans
from lamella.inference.prediction import Prediction, ScoredSpan, decision, rank

WINDOWS_KEPT = 64  # windows per question before they are reduced to the n best spans


class WindowMerger:
    """Collects the spans of windows, in any order, and merges them into a prediction per question.

    It holds only a few times `n_best_size` spans per question, so memory does not grow with the length of a context.
    """

    def __init__(self, options: DecodingOptions, *, gives_text: bool = True) -> None:
        self.options, self.gives_text = options, gives_text
        # With the independent method a window chooses between one span and nothing, and the surest window decides.
        self._merge_nulls = max if options.method == "independent" else min
        self._spans: dict[str, list[_Spans]] = {}  # per question: the spans of each window, best first
        self._nulls: dict[str, float] = {}
        self._windows: dict[str, int] = {}  # how many were added

    def add(self, features: Features, spans: WindowSpans) -> None:
        """Add the spans of some windows of `features`."""
        counts = (spans.score > -math.inf).sum(axis=1).tolist()
        shifts = features.first_token[spans.windows] - features.context_begin[spans.windows]
        first, last = spans.start + shifts[:, None], spans.end + shifts[:, None]
        numbers = features.example[spans.windows].tolist()
        for row, (number, count, null) in enumerate(zip(numbers, counts, spans.null.tolist(), strict=True)):
            example, offsets = features.examples[number], features.offsets[number]
            self._nulls[example.id] = self._merge_nulls(self._nulls.get(example.id, null), null)
            self._windows[example.id] = self._windows.get(example.id, 0) + 1
            places = offsets[first[row, :count], 0], offsets[last[row, :count], 1]
            windows = self._spans.setdefault(example.id, [])
            windows.append((spans.score[row, :count], *places))
            if len(windows) == WINDOWS_KEPT:
                best = _best_texts(windows, example.context.text, self.options.n_best_size)
                self._spans[example.id] = [_as_arrays(best)]

    def predictions(self, examples: Iterable[Example]) -> dict[str, Prediction]:
        """Return the predictions of the questions seen so far, in the order of `examples`."""
        predict = self._predict_spans if self.gives_text else self._predict_answerability
        with paused_garbage_collection():
            return {example.id: predict(example) for example in examples if example.id in self._nulls}

    def _predict_spans(self, example: Example) -> Prediction:
        best = _best_texts(self._spans[example.id], example.context.text, self.options.n_best_size)
        prediction = rank(best, self._nulls[example.id], self._windows[example.id])
        return calibrated(prediction, self.options)

    def _predict_answerability(self, example: Example) -> Prediction:
        return decision(self._nulls[example.id])


_Spans = tuple[NDArray[np.float64], NDArray[np.int32], NDArray[np.int32]]  # scores, begin and end characters


def _best_texts(windows: Sequence[_Spans], context: str, n_best: int) -> list[ScoredSpan]:
    """Return the n best texts, best first, each at the place where it scores best; empty texts are left out."""
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


def _as_arrays(spans: Sequence[ScoredSpan]) -> _Spans:
    """Pack spans into arrays, which take less memory."""
    _, begins, ends, scores, _ = zip(*spans, strict=True) if spans else ((),) * 5
    return np.array(scores, np.float64), np.array(begins, np.int32), np.array(ends, np.int32)
