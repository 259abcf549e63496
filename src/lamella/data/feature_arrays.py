"""Windows as plain arrays, the form that they are stored in: the offsets of a text once, however many ask about it.

What is not an array (the examples, the template, a few numbers) is for whoever stores them to keep or to make anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.data.examples import Example
from lamella.data.features import Features, PairTemplate

COLUMNS = ("input_ids", "rows", "example", "context_begin", "context_end", "first_token", "start", "end", "max_context")
OFFSETS, OFFSET_ROWS = "offsets", "offset_rows"  # those of text t are offsets[offset_rows[t]:offset_rows[t + 1]]
NAMES = (*COLUMNS, OFFSETS, OFFSET_ROWS)


def to_arrays(features: Features) -> dict[str, NDArray[Any]]:
    """The arrays of some windows, by name."""
    places = text_places(features.examples)
    offsets = dict(zip(places, features.offsets, strict=True))
    tokens = [offsets[place] for place in range(len(offsets))]
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
    """The windows that `to_arrays` was given; raises KeyError, IndexError or ValueError where arrays are missing."""
    rows = arrays[OFFSET_ROWS]
    of_text = np.split(arrays[OFFSETS], rows[1:-1])
    columns: dict[str, Any] = {name: arrays[name] for name in COLUMNS}
    return Features(
        examples=list(examples),
        template=template,
        offsets=[of_text[place] for place in text_places(examples)],
        max_seq_length=max_seq_length,
        lost_answers=lost_answers,
        **columns,
    )


def text_places(examples: Sequence[Example]) -> list[int]:
    """For each example which of the distinct texts is its context; texts count in the order in which they come."""
    places: dict[str, int] = {}
    return [places.setdefault(example.context.text, len(places)) for example in examples]
