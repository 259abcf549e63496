"""Where windows begin and end among the tokens of a context, and which of them shows most around a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from lamella.data.windows.tokens import Integers

Stride = Literal["overlap", "step"]


def window_spans(tokens: int, room: int, stride: int, stride_is: Stride = "overlap") -> list[tuple[int, int]]:
    """Cut `tokens` context tokens into spans of at most `room`.

    10 tokens, room 6, overlap 2: (0, 6) (4, 10). If a long question leaves less room than the overlap, the overlap
    shrinks to half the room, for that question only. A context without tokens has one empty span.
    """
    step = window_step(room, stride, stride_is)
    spans = [(0, min(room, tokens))]
    while spans[-1][1] < tokens:
        begin = spans[-1][0] + step
        spans.append((begin, min(begin + room, tokens)))
    return spans


def window_step(room: int, stride: int, stride_is: Stride = "overlap") -> int:
    """Return the tokens from the begin of a span to the begin of the next."""
    if stride_is == "overlap":
        return room - stride if stride < room else max(1, room - room // 2)
    return max(1, min(stride, room))


def max_context_owner(spans: Sequence[tuple[int, int]], tokens: int) -> Integers:
    """Return for each context token the window with the most context on both of its sides (the first of equals)."""
    owner = np.zeros(tokens, np.int32)
    if len(spans) == 1:
        return owner
    best = np.full(tokens, -1.0)
    for number, (first, last) in enumerate(spans):
        positions = np.arange(last - first)
        score = np.minimum(positions, positions[::-1]) + 0.01 * (last - first)
        better = score > best[first:last]
        best[first:last][better] = score[better]
        owner[first:last][better] = number
    return owner
