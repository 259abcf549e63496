"""Engines: compute the logits of windows that may belong to several readers.

A server puts the windows of all its requests into one queue. An engine computes what is taken from it at once, so it
receives windows without their padding, each with what its reader adds to the encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lamella.data.windows.padding import PAD_TO_MULTIPLE_OF, Padded
from lamella.models.onnx_sessions import Cores

CPU_MEMORY, GPU_MEMORY = 48 << 20, 1 << 30  # usual bytes for the tensors of readers on shared encoders


@dataclass(frozen=True, eq=False)
class Row:
    """A window without padding, and what its reader adds to the encoder (None if the engine has a single reader)."""

    delta: Any
    input_ids: NDArray[np.int64]  # [T]
    token_types: NDArray[np.int64]  # [T]
    is_context: NDArray[np.bool_]  # [T]


@dataclass(frozen=True)
class Pace:
    """How questions that wait should reach an engine."""

    lists: int  # lists of questions for a reader that are answered at once
    windows: int | None  # of a list that are computed at once, or one per core; None: as many as a batch may have
    patience: float = 0.0  # seconds worth waiting for more windows


# In fp32 a window takes as long in a large batch as in a small one, and other questions would wait for a large one.
# While one list is computed, the other is cut or decoded.
SMALL_BATCHES = Pace(lists=2, windows=4)
# In half precision, torch on a CPU takes less time per window in larger batches.
LARGER_BATCHES = Pace(lists=1, windows=16)
ON_GPU = Pace(lists=2, windows=None, patience=0.003)


class Engine(Protocol):
    """Computes the logits of windows."""

    @property
    def pace(self) -> Pace:
        """How questions should reach it."""

    def overlap(self, windows: int) -> int:
        """Return how many windows of a batch of this size may be left when the next batch begins."""

    def run(self, rows: Sequence[Row]) -> Iterable[NDArray[np.float32]]:
        """Return the logits [2, T] of each window, in order; an iterator returns each when it is computed."""


class PaddedModel(Protocol):
    """A model that takes windows padded to one length."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def windows(self) -> Any: ...

    def logits(self, padded: Padded) -> NDArray[np.float32]: ...


@runtime_checkable
class WindowModel(Protocol):
    """A model that computes windows one by one."""

    @property
    def cores(self) -> Cores: ...

    def window_logits(self, padded: Padded) -> Iterator[NDArray[np.float32]]: ...


def pace_of(device: str, precision: str) -> Pace:
    """Return the pace of torch on this device."""
    if device != "cpu":
        return ON_GPU
    return SMALL_BATCHES if precision == "fp32" else LARGER_BATCHES


class OwnEngine:
    """Runs the windows of one model, which shares its encoder with no other: they are padded and go through it."""

    def __init__(self, model: PaddedModel) -> None:
        self.model = model
        place = (str(getattr(model, part, default)) for part, default in (("device", "cpu"), ("precision", "fp32")))
        self.pace = SMALL_BATCHES if isinstance(model, WindowModel) else pace_of(*place)

    def overlap(self, windows: int) -> int:
        """Return how many windows may be left when the next batch begins."""
        return self.model.cores.overlap(windows) if isinstance(self.model, WindowModel) else 0

    def run(self, rows: Sequence[Row]) -> Iterator[NDArray[np.float32]]:
        """Yield the logits [2, T] of each window."""
        longest = self.model.windows.max_seq_length
        padded = pad_rows(rows, self.model.tokenizer.pad_token_id or 0, longest)
        if isinstance(self.model, WindowModel):
            yield from self.model.window_logits(padded)
            return
        logits = self.model.logits(padded)
        for number, row in enumerate(rows):
            yield logits[:, number, : len(row.input_ids)]


class SharingModel:
    """A model whose windows an engine computes together with those of other models."""

    run: Callable[[Sequence[Row]], Iterable[NDArray[np.float32]]]
    gives_text: bool

    def rows(self, padded: Padded) -> list[Row]:
        """Return the windows of a padded batch, each without its padding."""
        return split_rows(padded, self)

    def logits(self, padded: Padded) -> NDArray[np.float32]:
        """Return the logits of a padded batch, [2, B, T] or [2, B, 1]; 0 at the padding."""
        return join_logits(list(self.run(self.rows(padded))), padded.mask.shape[1] if self.gives_text else 1)


def split_rows(padded: Padded, delta: Any = None) -> list[Row]:
    """Return the windows of a padded batch, without their padding."""
    return [
        Row(
            delta,
            padded.input_ids[number, :length],
            padded.token_types[number, :length],
            padded.is_context[number, :length],
        )
        for number, length in enumerate(padded.mask.sum(1).tolist())
    ]


def join_logits(logits: Sequence[NDArray[np.float32]], width: int) -> NDArray[np.float32]:
    """Return the logits of windows as a padded batch has them: [2, B, T], 0 at the padding."""
    joined = np.zeros((2, len(logits), width), np.float32)
    for number, row in enumerate(logits):
        joined[:, number, : row.shape[1]] = row
    return joined


def pad_rows(rows: Sequence[Row], pad_id: int, longest: int) -> Padded:
    """Pad windows to one length, at most `longest` unless a window itself is longer; labels are not known."""
    lengths = np.array([len(row.input_ids) for row in rows])
    most = int(lengths.max())
    width = max(most, min(-(-most // PAD_TO_MULTIPLE_OF) * PAD_TO_MULTIPLE_OF, longest))
    mask = np.arange(width) < lengths[:, None]  # [B, T]

    def fill(name: str, value: int, dtype: Any) -> NDArray[Any]:
        array = np.full(mask.shape, value, dtype)
        array[mask] = np.concatenate([getattr(row, name) for row in rows])
        return array

    return Padded(
        input_ids=fill("input_ids", pad_id, np.int64),
        mask=mask,
        token_types=fill("token_types", 0, np.int64),
        is_context=fill("is_context", 0, np.bool_),
        max_context=mask,
        start=np.zeros(len(rows), np.int64),
        end=np.zeros(len(rows), np.int64),
        windows=np.arange(len(rows)),
        cls=0,
    )
