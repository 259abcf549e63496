"""Windows padded to one length, as arrays: the input of every kind of model, without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from lamella.data.windows.features import Features
from lamella.errors import UsageError

Indices = NDArray[np.int64]
PAD_TO_MULTIPLE_OF = 8  # suits tensor cores and vector units
BATCH_COST = 256  # what one more batch costs on a CPU, in tokens: measured with MiniLM and e5-small in bf16


@dataclass(frozen=True)
class Padded:
    """Windows padded to the longest."""

    input_ids: NDArray[np.int64]  # [B, T]
    mask: NDArray[np.bool_]  # [B, T] true on real tokens
    token_types: NDArray[np.int64]  # [B, T]
    is_context: NDArray[np.bool_]  # [B, T] true on tokens of the context
    max_context: NDArray[np.bool_]  # [B, T] true if no other window shows more text around the token
    start: NDArray[np.int64]  # [B] labels
    end: NDArray[np.int64]  # [B]
    windows: Indices  # [B] indices of the windows in the features
    cls: int  # the position whose logits mean "no answer"

    def only(self, rows: Indices) -> Padded:
        """Return some of the windows, padded to the longest of them."""
        width = math.ceil(int(self.mask[rows].sum(1).max()) / PAD_TO_MULTIPLE_OF) * PAD_TO_MULTIPLE_OF
        arrays = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "cls"}
        chosen = {name: array[rows, :width] if array.ndim == 2 else array[rows] for name, array in arrays.items()}
        return Padded(**chosen, cls=self.cls)


def pad(features: Features, windows: Indices, *, multiple_of: int = PAD_TO_MULTIPLE_OF) -> Padded:
    """Pad windows to a common length."""
    lengths = features.rows[windows + 1] - features.rows[windows]
    width = math.ceil(int(lengths.max()) / multiple_of) * multiple_of
    width = min(width, features.max_seq_length)  # an encoder may have no more positions
    positions = np.arange(width)
    mask = positions < lengths[:, None]  # [B, T]
    begin, end = features.context_begin[windows, None], features.context_end[windows, None]
    input_ids = np.full(mask.shape, features.template.pad_id, np.int64)
    input_ids[mask] = np.concatenate([features.input_ids[features.rows[w] : features.rows[w + 1]] for w in windows])
    max_context = np.zeros(mask.shape, np.bool_)
    max_context[mask] = np.concatenate([features.max_context[features.rows[w] : features.rows[w + 1]] for w in windows])
    return Padded(
        input_ids=input_ids,
        mask=mask,
        token_types=np.where(mask & (positions >= begin), features.template.context_type, 0),
        is_context=(positions >= begin) & (positions < end),
        max_context=max_context,
        start=features.start[windows].astype(np.int64),
        end=features.end[windows].astype(np.int64),
        windows=windows,
        cls=features.template.cls,
    )


def check_window_length(tokens: int, positions: int | None) -> None:
    """Refuse windows that are longer than the positions of the encoder, if their number is known."""
    if positions is not None and tokens > positions:
        raise UsageError(
            f"windows of {tokens} tokens: expected at most {positions}, the number of positions of the encoder; "
            "lower windows.max_seq_length."
        )


def divide_by_length(lengths: Indices, batch_cost: int = BATCH_COST) -> list[Indices]:
    """Divide windows into batches of similar length, so that padding and batches together cost least.

    Each batch costs as much as `batch_cost` tokens. The longest windows come first.
    """
    if lengths.max() * len(lengths) - lengths.sum() <= batch_cost:
        return [np.arange(len(lengths))]
    order = np.argsort(-lengths, kind="stable")
    sizes = lengths[order]
    best, begins = np.zeros(len(order) + 1, np.int64), np.zeros(len(order) + 1, np.int64)
    for end in range(1, len(order) + 1):  # the least cost of the first windows, and where their last batch begins
        costs = best[:end] + batch_cost + sizes[:end] * np.arange(end, 0, -1)
        begins[end] = costs.argmin()
        best[end] = costs[begins[end]]
    batches, end = [], len(order)
    while end > 0:
        batches.append(order[begins[end] : end])
        end = begins[end]
    return batches[::-1]


def compute_by_length(padded: Padded, compute: Callable[[Padded], NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return logits [O, B, T] or [O, B, 1], computed for windows of similar length at a time; 0 at other padding."""
    batches = divide_by_length(padded.mask.sum(1))
    if len(batches) == 1:
        return compute(padded)
    parts = [compute(padded.only(rows)) for rows in batches]
    outputs, _, width = parts[0].shape
    logits = np.zeros((outputs, len(padded.mask), padded.mask.shape[1] if width > 1 else 1), np.float32)
    for rows, part in zip(batches, parts, strict=True):
        logits[:, rows, : part.shape[2]] = part
    return logits


def longest_first(lengths: Indices, batch_size: int) -> Iterator[Indices]:
    """Yield batches of all windows, longest first, so that a batch that does not fit into memory fails at once."""
    order = np.argsort(-lengths, kind="stable")
    for begin in range(0, len(order), batch_size):
        yield order[begin : begin + batch_size]
