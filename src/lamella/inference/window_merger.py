"""Merge the spans of windows into one prediction per question.

A question takes the smallest "no answer" score of its windows, as the official SQuAD 2.0 code does: every window that
misses the answer is right to report "not here".

With `decoding.merge = "leads"`, the score of a span also falls by what the "no answer" score of its own window is above
the smallest, and by `RANK_WEIGHT` for each point by which its window shares fewer words with the question than the best
window does (BM25). The answers of a text that fits into one window stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from lamella.data.examples import Example
from lamella.data.question_words import content_words
from lamella.data.windows.features import Features
from lamella.decoding_options import DecodingOptions
from lamella.documents.passages import PartRanking, PassageCache
from lamella.garbage import paused_garbage_collection
from lamella.inference.abstention import calibrated
from lamella.inference.decode import WindowSpans
from lamella.inference.prediction import RANK_WEIGHT, Prediction, ScoredSpan, decision, rank

WINDOWS_KEPT = 64  # windows per question before they are reduced to the n best spans


class WindowMerger:
    """Collects the spans of windows, in any order, and merges them into a prediction per question.

    It holds only a few times `n_best_size` spans per question, so memory does not grow with the length of a context.
    """

    def __init__(
        self, options: DecodingOptions, *, gives_text: bool = True, passages: PassageCache | None = None
    ) -> None:
        self.options, self.gives_text = options, gives_text
        # With the independent method a window chooses between one span and nothing, and the surest window decides.
        self._merge_nulls = max if options.method == "independent" else min
        self._spans: dict[str, list[_Spans]] = {}  # per question: the spans of each window, best first
        self._nulls: dict[str, float] = {}
        self._windows: dict[str, int] = {}  # how many were added
        self._leads: dict[str, _Leads] = {}  # of texts with several windows, if they compete by their leads
        self._passages = passages or PassageCache()

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
            scores = spans.score[row, :count]
            if self.options.merge == "leads" and (part := _part_of_text(features, int(spans.windows[row]))):
                scores = scores - null + self._leads_of(example).add_window(*part)
            windows = self._spans.setdefault(example.id, [])
            windows.append((scores, *places))
            if len(windows) == WINDOWS_KEPT:
                best = _best_texts(windows, example.context.text, self.options.n_best_size)
                self._spans[example.id] = [_as_arrays(best)]

    def predictions(self, examples: Iterable[Example]) -> dict[str, Prediction]:
        """Return the predictions of the questions seen so far, in the order of `examples`."""
        predict = self._predict_spans if self.gives_text else self._predict_answerability
        with paused_garbage_collection():
            return {example.id: predict(example) for example in examples if example.id in self._nulls}

    def _leads_of(self, example: Example) -> _Leads:
        if example.id not in self._leads:
            index = self._passages.get((example.context.text,))
            self._leads[example.id] = _Leads(PartRanking(index, content_words(example.question)))
        return self._leads[example.id]

    def _predict_spans(self, example: Example) -> Prediction:
        best = _best_texts(self._spans[example.id], example.context.text, self.options.n_best_size)
        null = self._nulls[example.id]
        if (leads := self._leads.get(example.id)) is not None:
            shift = null - leads.most
            best = [(text, begin, end, lead + shift, context) for text, begin, end, lead, context in best]
        prediction = rank(best, null, self._windows[example.id])
        return calibrated(prediction, self.options)

    def _predict_answerability(self, example: Example) -> Prediction:
        return decision(self._nulls[example.id])


class _Leads:
    """What is added to the leads of the spans of a question's windows, for the words that they share with it."""

    def __init__(self, ranking: PartRanking) -> None:
        self._ranking, self.most = ranking, 0.0

    def add_window(self, begin: int, end: int) -> float:
        """Return what is added in a window with these characters, and remember the most."""
        added = RANK_WEIGHT * self._ranking.score(begin, end)
        self.most = max(self.most, added)
        return added


def _part_of_text(features: Features, window: int) -> tuple[int, int] | None:
    """Return begin and end of the characters of a window; None if it is the only window of its text."""
    first, last = int(features.context_begin[window]), int(features.context_end[window]) - 1
    tokens = len(features.offsets[features.example[window]])
    if last < first or (features.part == 1.0 and last - first + 1 == tokens):
        return None
    return features.characters(window, first, last)


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
