"""From start and end logits to the best spans of a window, and from windows to the answers of a question.

The score of a span is s_i + e_j with i <= j < i + max_answer_length, both in the context. That of "no answer" is
s_cls + e_cls; a question seen through several windows takes the smallest of them, as the official SQuAD 2.0 code does:
every window that misses the answer is right to say "not here".

Arrays come in and plain objects go out; nothing here needs torch, so whatever made the logits is decoded alike.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamella.config import DecodingOptions
from lamella.data.examples import Example
from lamella.data.features import Features
from lamella.data.padding import Padded
from lamella.errors import ModelError

WINDOWS_KEPT = 64  # of one question, before the best of them are taken together
NO_SPAN = -1e4  # the score of the best span where a context has no token to make one of


@dataclass(frozen=True)
class WindowSpans:
    """The best spans of some windows, best first; a score of -inf fills up where there are fewer.

    A model that only tells whether the answer is there gives no spans, K = 0, and its odds of "not here" as `null`.
    """

    windows: NDArray[np.int64]  # [B]
    start: NDArray[np.int64]  # [B, K]
    end: NDArray[np.int64]  # [B, K]
    score: NDArray[np.float64]  # [B, K]
    null: NDArray[np.float64]  # [B]


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
Answer = tuple[str, int, int, float, int]  # a candidate to be: text, begin and end, score, number of the context


def decode(
    logits: NDArray[Any], padded: Padded, options: DecodingOptions, *, normalised: bool | None = None
) -> WindowSpans:
    """The best spans of every window, from its start and end logits [2, B, T].

    Scores are `normalised` to logarithms of probabilities, of the start times of the end, where windows are to be
    compared as probabilities; as they are, they can be compared within a question only. Unless told, they are for the
    independent method, whose windows compete.
    """
    logits = choosable(logits, padded)
    if normalised or (normalised is None and options.method == "independent"):
        logits = logits - log_of_sum(logits)
    if options.method == "independent":
        return _independent(logits, padded, options)
    null = logits[:, :, padded.cls].sum(0)
    start, end = np.where(padded.is_context, logits, -np.inf)  # [B, T] each
    if options.max_context_only:
        start = np.where(padded.max_context, start, -np.inf)
    return WindowSpans(padded.windows, *_joint(start, end, options), null)


def choosable(logits: NDArray[Any], padded: Padded) -> NDArray[np.float64]:
    """The logits [2, B, T] of the tokens that may be chosen, the context's and [CLS]; -inf at all others."""
    logits = np.asarray(logits, np.float64)
    in_context = (logits[:, padded.is_context] < math.inf).all()  # which not a number is not
    _refuse_unless_finite(np.isfinite(logits[:, :, padded.cls]).all() and in_context)
    allowed = padded.is_context.copy()
    allowed[:, padded.cls] = True
    return np.where(allowed, logits, -np.inf)


def log_of_sum(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """log Σ_t exp(logits_t), [2, B, 1], without overflow: what makes logits log-probabilities when it is taken off."""
    largest = logits.max(axis=2, keepdims=True)
    total: NDArray[np.float64] = largest + np.log(np.exp(logits - largest).sum(axis=2, keepdims=True))
    return total


def decode_answerability(logits: NDArray[Any], padded: Padded) -> WindowSpans:
    """The odds of "not here", from each window's logits [2, B, 1] of "here" and "not here"."""
    logits = np.asarray(logits, np.float64)
    _refuse_unless_finite(np.isfinite(logits).all())
    spans, scores = np.empty((len(padded.windows), 0), np.int64), np.empty((len(padded.windows), 0))
    return WindowSpans(padded.windows, spans, spans, scores, (logits[1] - logits[0])[:, 0])


class Merger:
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


def rank(answers: Sequence[Answer], null: float) -> Prediction:
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


def _refuse_unless_finite(are_finite: bool | np.bool_) -> None:
    if not are_finite:
        raise ModelError(
            "the model's logits: expected finite numbers. Got infinite ones or nan; its training diverged (lower the "
            "learning rate), or its precision is too narrow (use fp32)."
        )


def _joint(
    start: NDArray[np.float64], end: NDArray[np.float64], options: DecodingOptions
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """The n best (i, j) by s_i + e_j: exactly, without trying all. Of equals the earlier start, then the shorter.

    If K starts can each make a span at least as good as the best that start i can make, no span from i is needed: so
    the K best starts are enough, with every end that each may have. Where one of the K only equals the best of start i,
    it is the earlier, and its span goes before.
    """
    B, T = start.shape
    length = min(options.max_answer_length, T)
    padded = np.full((B, T + length - 1), -np.inf)
    padded[:, :T] = end
    best_end, width = padded, 1  # best_end[i] is the largest of `width` ends from i on
    while width < length:
        step = min(width, length - width)
        best_end = np.maximum(best_end[:, :-step], best_end[:, step:])
        width += step
    starts = _largest(start + best_end, options.n_best_size)  # [B, K]
    rows = np.arange(B)[:, None]
    ends = np.lib.stride_tricks.sliding_window_view(padded, length, axis=1)[rows, starts]  # [B, K, D]
    scores = (start[rows, starts][:, :, None] + ends).reshape(B, -1)  # [B, K * D]
    chosen = _largest(scores, options.n_best_size)  # in the order of their places, as starts and ends are
    chosen = chosen[rows, np.argsort(-scores[rows, chosen], axis=1, kind="stable")]
    first = starts[rows, chosen // length]
    return first, first + chosen % length, scores[rows, chosen]


def _largest(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Where the largest of each row stand, from left to right; of equals at the cut, the leftmost are among them."""
    B, T = values.shape
    if count >= T:
        return np.broadcast_to(np.arange(T), values.shape)
    smallest = np.partition(values, -count, axis=1)[:, -count, None]  # of those that are taken
    taken = values >= smallest
    if np.count_nonzero(taken) > B * count:  # some rows have equals beyond the cut
        equal = values == smallest
        room = count - (taken & ~equal).sum(axis=1, keepdims=True)
        taken &= ~equal | (equal.cumsum(axis=1) <= room)
    places: NDArray[np.int64] = np.flatnonzero(taken).reshape(B, count) - T * np.arange(B)[:, None]
    return places


def _independent(logits: NDArray[np.float64], padded: Padded, options: DecodingOptions) -> WindowSpans:
    """BERTVision's way: the best start and the best end, each by itself; then the second best of both, and so on.

    A pair that is no span (its end lies before its start, or one of the two at [CLS]) means "no answer"; where the
    first pair of a window does, its score is that of "no answer" there.
    """
    order = np.argsort(-logits, axis=2, kind="stable")[:, :, : options.n_best_size]  # [2, B, K]
    start, end = order
    score = np.take_along_axis(logits, order, axis=2).sum(0)  # [B, K]
    is_span = (start <= end) & (start != padded.cls) & (end != padded.cls) & (score > -np.inf)
    null = np.where(is_span[:, 0], logits[:, :, padded.cls].sum(0), score[:, 0])
    rows = np.arange(len(score))[:, None]
    spans_first = np.argsort(~is_span, axis=1, kind="stable")
    start, end, score = (array[rows, spans_first] for array in (start, end, np.where(is_span, score, -np.inf)))
    return WindowSpans(padded.windows, start, end, score, null)


_Spans = tuple[NDArray[np.float64], NDArray[np.int32], NDArray[np.int32]]  # scores, begins and ends in characters


def _best_of(windows: Sequence[_Spans], context: str, n_best: int) -> list[Answer]:
    """The n best texts of some windows, best first, each where it scores best; an empty one is no answer."""
    scores, begins, ends = windows[0]
    if len(windows) > 1:
        scores, begins, ends = (np.concatenate(columns) for columns in zip(*windows, strict=True))
        order = np.lexsort((ends, begins, -scores))
        scores, begins, ends = scores[order], begins[order], ends[order]
    best: dict[str, Answer] = {}
    for score, begin, end in zip(scores.tolist(), begins.tolist(), ends.tolist(), strict=True):
        text = context[begin:end]
        if text and text not in best:
            best[text] = (text, begin, end, score, 0)
            if len(best) == n_best:
                break
    return list(best.values())


def _as_arrays(answers: Sequence[Answer]) -> _Spans:
    """The same in the form that many of them are kept in."""
    _, begins, ends, scores, _ = zip(*answers, strict=True) if answers else ((),) * 5
    return np.array(scores, np.float64), np.array(begins, np.int32), np.array(ends, np.int32)


def _logistic(value: float) -> float:
    return 1 / (1 + math.exp(-max(-500.0, min(500.0, value))))
