"""Convert windows to plain arrays for storage, and back; the offsets of each context are stored once.

The rest (the examples, the template, a few numbers) must be stored or rebuilt by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.data.examples import Example
from lamella.data.windows.features import Features, PairTemplate

COLUMNS = ("input_ids", "rows", "example", "context_begin", "context_end", "first_token", "start", "end", "max_context")
OFFSETS, OFFSET_ROWS = "offsets", "offset_rows"  # context c has offsets[offset_rows[c]:offset_rows[c + 1]]
NAMES = (*COLUMNS, OFFSETS, OFFSET_ROWS)


def to_arrays(features: Features) -> dict[str, NDArray[Any]]:
    """Return the arrays of windows by name."""
    indices = context_indices(features.examples)
    offsets = dict(zip(indices, features.offsets, strict=True))
    tokens = [offsets[index] for index in range(len(offsets))]
    arrays = {name: getattr(features, name) for name in COLUMNS} | {
        OFFSETS: np.concatenate([np.empty((0, 2), np.int32), *tokens]),
        OFFSET_ROWS: np.cumsum([0, *map(len, tokens)], dtype=np.int64),
    }
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def from_arrays(
    arrays: Mapping[str, NDArray[Any]],
    examples: Sequence[Example],
    *,
    template: PairTemplate,
    max_seq_length: int,
    lost_answers: int,
) -> Features:
    """Rebuild the windows from arrays; raise KeyError, IndexError or ValueError if arrays are missing."""
    rows = arrays[OFFSET_ROWS]
    per_context = np.split(arrays[OFFSETS], rows[1:-1])
    columns: dict[str, Any] = {name: arrays[name] for name in COLUMNS}
    return Features(
        examples=list(examples),
        template=template,
        offsets=[per_context[index] for index in context_indices(examples)],
        max_seq_length=max_seq_length,
        lost_answers=lost_answers,
        **columns,
    )


def context_indices(examples: Sequence[Example]) -> list[int]:
    """Return for each example the index of its context among the distinct texts, in order of appearance."""
    indices: dict[str, int] = {}
    return [indices.setdefault(example.context.text, len(indices)) for example in examples]
