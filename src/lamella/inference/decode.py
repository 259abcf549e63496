"""From start and end logits to the best spans of a window, and from windows to the answers of a question.

The score of a span is s_i + e_j with i <= j < i + max_answer_length, both in the context. That of "no answer" is
s_cls + e_cls; a question seen through several windows takes the smallest of them, as the official SQuAD 2.0 code does:
every window that misses the answer is right to say "not here".

Arrays come in and plain objects go out; nothing here needs torch, so whatever made the logits is decoded alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.config import DecodingOptions
from lamella.data.padding import Padded
from lamella.errors import ModelError


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


def decode(
    logits: NDArray[Any], padded: Padded, options: DecodingOptions, *, normalised: bool | None = None
) -> WindowSpans:
    """The best spans of every window, from its start and end logits [2, B, T].

    Scores are `normalised` to logarithms of probabilities, of the start times of the end, where windows are to be
    compared as probabilities; as they are, they can be compared within a question only. Unless told, they are for the
    independent method, whose windows compete.
    """
    logits = mask_logits(logits, padded)
    if normalised or (normalised is None and options.method == "independent"):
        logits = logits - log_sum_exp(logits)
    if options.method == "independent":
        return _independent(logits, padded, options)
    null = logits[:, :, padded.cls].sum(0)
    start, end = np.where(padded.is_context, logits, -np.inf)  # [B, T] each
    if options.max_context_only:
        start = np.where(padded.max_context, start, -np.inf)
    return WindowSpans(padded.windows, *_joint(start, end, options), null)


def mask_logits(logits: NDArray[Any], padded: Padded) -> NDArray[np.float64]:
    """The logits [2, B, T] of the tokens that may be chosen, the context's and [CLS]; -inf at all others."""
    logits = np.asarray(logits, np.float64)
    in_context = (logits[:, padded.is_context] < math.inf).all()  # which not a number is not
    _refuse_unless_finite(np.isfinite(logits[:, :, padded.cls]).all() and in_context)
    allowed = padded.is_context.copy()
    allowed[:, padded.cls] = True
    return np.where(allowed, logits, -np.inf)


def log_sum_exp(logits: NDArray[np.float64]) -> NDArray[np.float64]:
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
