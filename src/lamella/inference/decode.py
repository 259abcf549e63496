"""Decode start and end logits into the best spans of every window.

The score of a span is s_i + e_j with i <= j < i + max_answer_length, both tokens in the context. The score of "no
answer" is s_cls + e_cls.

Everything here works on numpy arrays, so the logits of torch and onnxruntime are decoded alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.data.windows.padding import Padded
from lamella.decoding_options import DecodingOptions
from lamella.errors import ModelError


@dataclass(frozen=True)
class WindowSpans:
    """The K best spans of some windows, best first; a window with fewer spans is filled up with scores of -inf.

    A model that only decides whether there is an answer has no spans (K = 0), and its odds of "not here" as `null`.
    """

    windows: NDArray[np.int64]  # [B]
    start: NDArray[np.int64]  # [B, K]
    end: NDArray[np.int64]  # [B, K]
    score: NDArray[np.float64]  # [B, K]
    null: NDArray[np.float64]  # [B]


def decode(
    logits: NDArray[Any], padded: Padded, options: DecodingOptions, *, normalised: bool | None = None
) -> WindowSpans:
    """Return the best spans of every window, from its start and end logits [2, B, T].

    `normalised` turns scores into log-probabilities (start times end), so that windows compare as probabilities. Raw
    scores compare only within a question. The default is True for the independent method, whose windows compete, and
    False otherwise.
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
    """Return the logits [2, B, T] with -inf at every token that is neither in the context nor [CLS]."""
    logits = np.asarray(logits, np.float64)
    in_context = (logits[:, padded.is_context] < math.inf).all()  # False for nan as well
    _check_finite(np.isfinite(logits[:, :, padded.cls]).all() and in_context)
    allowed = padded.is_context.copy()
    allowed[:, padded.cls] = True
    return np.where(allowed, logits, -np.inf)


def log_sum_exp(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log Σ_t exp(logits_t), [2, B, 1], without overflow; logits minus this are log-probabilities."""
    largest = logits.max(axis=2, keepdims=True)
    total: NDArray[np.float64] = largest + np.log(np.exp(logits - largest).sum(axis=2, keepdims=True))
    return total


def decode_answerability(logits: NDArray[Any], padded: Padded) -> WindowSpans:
    """Return the odds of "not here", from each window's logits [2, B, 1] of "here" and "not here"."""
    logits = np.asarray(logits, np.float64)
    _check_finite(np.isfinite(logits).all())
    spans, scores = np.empty((len(padded.windows), 0), np.int64), np.empty((len(padded.windows), 0))
    return WindowSpans(padded.windows, spans, spans, scores, (logits[1] - logits[0])[:, 0])


def _check_finite(all_finite: bool | np.bool_) -> None:
    if not all_finite:
        raise ModelError(
            "the model's logits: expected finite numbers, got infinity or nan; its training diverged (lower the "
            "learning rate) or the precision is too low (use fp32)."
        )


def _joint(
    start: NDArray[np.float64], end: NDArray[np.float64], options: DecodingOptions
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Return the n best (i, j) by s_i + e_j, exactly, without trying every pair; the earlier start, then the shorter
    span wins a tie.

    If K other starts can each make a span at least as good as the best span from i, no span from i is needed. So the K
    best starts suffice, each with every end it may have. A start among the K that only ties with i lies before it, and
    its span is ranked first.
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
    chosen = _largest(scores, options.n_best_size)  # in order of position, like starts and ends
    chosen = chosen[rows, np.argsort(-scores[rows, chosen], axis=1, kind="stable")]
    first = starts[rows, chosen // length]
    return first, first + chosen % length, scores[rows, chosen]


def _largest(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Return the positions of the largest values in each row, left to right; the leftmost win a tie at the cut."""
    B, T = values.shape
    if count >= T:
        return np.broadcast_to(np.arange(T), values.shape)
    smallest = np.partition(values, -count, axis=1)[:, -count, None]  # among the values taken
    taken = values >= smallest
    if np.count_nonzero(taken) > B * count:  # some rows have ties beyond the cut
        equal = values == smallest
        room = count - (taken & ~equal).sum(axis=1, keepdims=True)
        taken &= ~equal | (equal.cumsum(axis=1) <= room)
    places: NDArray[np.int64] = np.flatnonzero(taken).reshape(B, count) - T * np.arange(B)[:, None]
    return places


def _independent(logits: NDArray[np.float64], padded: Padded, options: DecodingOptions) -> WindowSpans:
    """Decode as BERTVision does: pair the best start with the best end, the second best of both, and so on.

    A pair that is not a span (its end is before its start, or either is [CLS]) means "no answer". If the first pair of
    a window is one, its score is the window's score of "no answer".
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
