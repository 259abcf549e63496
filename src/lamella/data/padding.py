"""Windows padded to one length, as arrays: what every kind of model is given. Nothing here needs torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lamella.data.features import Features
from lamella.errors import UsageError

Indices = NDArray[np.int64]
PAD_TO_MULTIPLE_OF = 8  # what tensor cores and vector units like


@dataclass(frozen=True)
class Padded:
    """Some windows, padded to the longest of them."""

    input_ids: NDArray[np.int64]  # [B, T]
    mask: NDArray[np.bool_]  # [B, T] true on real tokens
    token_types: NDArray[np.int64]  # [B, T]
    is_context: NDArray[np.bool_]  # [B, T] true where an answer may lie
    max_context: NDArray[np.bool_]  # [B, T] true where no other window shows more text around the token
    start: NDArray[np.int64]  # [B] labels
    end: NDArray[np.int64]  # [B]
    windows: Indices  # [B] which windows of the features these are
    cls: int  # the position whose logits mean "no answer"


def pad(features: Features, windows: Indices, *, multiple_of: int = PAD_TO_MULTIPLE_OF) -> Padded:
    """Put some windows beside one another."""
    lengths = features.rows[windows + 1] - features.rows[windows]
    width = math.ceil(int(lengths.max()) / multiple_of) * multiple_of
    width = min(width, features.max_seq_length)  # an encoder may have no positions beyond it
    places = np.arange(width)
    mask = places < lengths[:, None]  # [B, T]
    begin, end = features.context_begin[windows, None], features.context_end[windows, None]
    input_ids = np.full(mask.shape, features.template.pad_id, np.int64)
    input_ids[mask] = np.concatenate([features.input_ids[features.rows[w] : features.rows[w + 1]] for w in windows])
    max_context = np.zeros(mask.shape, np.bool_)
    max_context[mask] = np.concatenate([features.max_context[features.rows[w] : features.rows[w + 1]] for w in windows])
    return Padded(
        input_ids=input_ids,
        mask=mask,
        token_types=np.where(mask & (places >= begin), features.template.context_type, 0),
        is_context=(places >= begin) & (places < end),
        max_context=max_context,
        start=features.start[windows].astype(np.int64),
        end=features.end[windows].astype(np.int64),
        windows=windows,
        cls=features.template.cls,
    )


def refuse_longer_windows(padded: Padded, positions: int | None) -> None:
    """Windows that an encoder has no positions for, where it is known how many it has."""
    tokens = padded.mask.shape[1]
    if positions is not None and tokens > positions:
        raise UsageError(f"windows of {tokens} tokens: expected at most {positions}, all the positions of the encoder.")


def longest_first(lengths: Indices, batch_size: int) -> Iterator[Indices]:
    """Every window once, the longest batch first: what does not fit into memory shows at once."""
    order = np.argsort(-lengths, kind="stable")
    for begin in range(0, len(order), batch_size):
        yield order[begin : begin + batch_size]
