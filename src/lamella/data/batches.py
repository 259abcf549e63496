"""Which windows go together, and how they become tensors.

Windows of like length share a batch, so little of it is padding: SQuAD windows average 170 tokens, and padding them all
to 384 wastes more than half of every step. The order depends on the seed and the epoch alone, so that a run can go on
in the middle of an epoch, and two runs of one seed see the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamella.data.features import Features
from lamella.data.padding import PAD_TO_MULTIPLE_OF, Indices, Padded, pad

Count = float | Tensor  # a tensor, [], where a step is recorded: see training/cuda_graphs.py
BUCKET_BATCHES = 32  # batches sorted by length together: more wastes less padding but mixes the data less


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on another device, without waiting for it.

    A GPU fetches by itself what lies in pinned memory. Of what does not, CUDA takes more than 64 kB only when the GPU
    has done all that it was given before, and then it has nothing to do until the host has launched the next step.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class Batch:
    """Some windows as tensors, padded to the longest of them."""

    input_ids: Tensor  # [B, T]
    mask: Tensor  # [B, T] true on real tokens
    token_types: Tensor  # [B, T]
    is_context: Tensor  # [B, T] true where an answer may lie
    start: Tensor  # [B] labels
    end: Tensor  # [B]
    windows: Indices  # which windows of the features these are

    @classmethod
    def of(cls, padded: Padded) -> Batch:
        """The arrays as tensors, which share their memory."""
        names = [field.name for field in fields(cls) if field.name != "windows"]
        tensors: dict[str, Any] = {name: torch.from_numpy(getattr(padded, name)) for name in names}
        return cls(**tensors, windows=padded.windows)

    @property
    def has_answer(self) -> Tensor:
        """[B] whether the answer lies in the window."""
        return self.is_context.gather(1, self.start[:, None])[:, 0]

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        moved: dict[str, Any] = {
            field.name: send(value, device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class Totals:
    """What all batches of an optimiser step hold together, in every process: what the means of a loss divide by."""

    answerable: Count  # windows with the answer
    unanswerable: Count
    tokens: Count  # real ones

    @property
    def windows(self) -> Count:
        return self.answerable + self.unanswerable

    def kinds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """How many windows have the answer and how many do not, as tensors. A number is filled in, not sent there:
        sending waits for all that the device has still to do.
        """
        answerable, unanswerable = (
            count if isinstance(count, Tensor) else torch.full((), count, device=device, dtype=torch.float32)
            for count in (self.answerable, self.unanswerable)
        )
        return answerable, unanswerable

    @classmethod
    def of(cls, batches: Iterable[Batch]) -> Totals:
        """Counted where the batches lie: on the CPU this waits for nothing."""
        answerable, windows, tokens = 0.0, 0.0, 0.0
        for one in batches:
            answerable += int(one.has_answer.sum())
            windows += len(one.mask)
            tokens += int(one.mask.sum())
        return cls(answerable, windows - answerable, tokens)


@dataclass(frozen=True)
class Group:
    """The batches of one optimiser step, all of one stratum."""

    stratum: int
    batches: Sequence[Indices]


class BucketOrder:
    """A reproducible order of batches: shuffled as a whole, of like length within a batch.

    Windows may be split into strata, and then no optimiser step mixes two of them: whoever learns from the first strata
    only takes or leaves whole steps, so that learners of less and of more data can go through one pass together.
    """

    def __init__(
        self,
        lengths: Indices,
        batch_size: int,
        *,
        seed: int = 0,
        accumulate: int = 1,
        strata: NDArray[np.integer[Any]] | None = None,  # of every window, counted from 0; -1 leaves one out
    ) -> None:
        self.lengths, self.batch_size, self.seed, self.accumulate = lengths, batch_size, seed, accumulate
        strata = np.zeros(len(lengths), np.int64) if strata is None else strata
        self.members = [np.flatnonzero(strata == number) for number in range(int(strata.max(initial=0)) + 1)]

    def groups_in(self, stratum: int) -> int:
        """Optimiser steps an epoch that one stratum makes."""
        batches = math.ceil(len(self.members[stratum]) / self.batch_size)
        return math.ceil(batches / self.accumulate)

    def __len__(self) -> int:
        """Optimiser steps an epoch."""
        return sum(self.groups_in(stratum) for stratum in range(len(self.members)))

    def epoch(self, epoch: int, *, skip: int = 0) -> Iterator[Group]:
        """The optimiser steps of one epoch, without the first `skip` of them."""
        groups = [
            Group(stratum, batches[at : at + self.accumulate])
            for stratum in range(len(self.members))
            for batches in [self._batches(stratum, epoch)]
            for at in range(0, len(batches), self.accumulate)
        ]
        if len(self.members) > 1:
            rng = np.random.default_rng([self.seed, epoch, len(self.members), 1])
            groups = [groups[place] for place in rng.permutation(len(groups))]
        yield from groups[skip:]

    def _batches(self, stratum: int, epoch: int) -> list[Indices]:
        rng = np.random.default_rng([self.seed, epoch, *([stratum] if stratum else [])])
        order = rng.permutation(self.members[stratum])
        pool = self.batch_size * BUCKET_BATCHES
        batches: list[Indices] = []
        for begin in range(0, len(order), pool):
            bucket = order[begin : begin + pool]
            bucket = bucket[np.argsort(self.lengths[bucket], kind="stable")]
            batches += [bucket[at : at + self.batch_size] for at in range(0, len(bucket), self.batch_size)]
        return [batches[place] for place in rng.permutation(len(batches))]


def collate(features: Features, windows: Indices, *, multiple_of: int = PAD_TO_MULTIPLE_OF) -> Batch:
    """Make a padded batch of some windows."""
    return Batch.of(pad(features, windows, multiple_of=multiple_of))
