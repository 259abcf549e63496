"""Batches: which windows share one, and their tensors.

Windows of similar length share a batch, so that little of it is padding: SQuAD windows average 170 tokens, and padding
all of them to 384 would waste more than half of every step. The order depends only on the seed and the epoch, so that a
run can resume in the middle of an epoch, and two runs with the same seed see the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamella.data.windows.features import Features
from lamella.data.windows.padding import PAD_TO_MULTIPLE_OF, Indices, Padded, pad

Count = float | Tensor  # a tensor of shape [] in a recorded step: see training/fitting/cuda_graphs.py
ENCODER_INPUTS = ("input_ids", "mask", "token_types", "is_context")
BUCKET_BATCHES = 32  # batches sorted by length together: more means less padding, but less mixing of the data


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device without blocking.

    A GPU copies from pinned memory on its own. From other memory, CUDA copies more than 64 kB only after the GPU has
    finished all earlier work; the GPU then idles until the host has launched the next step.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class Batch:
    """Windows as tensors, padded to the longest."""

    input_ids: Tensor  # [B, T]
    mask: Tensor  # [B, T] true on real tokens
    token_types: Tensor  # [B, T]
    is_context: Tensor  # [B, T] true on tokens of the context
    start: Tensor  # [B] labels
    end: Tensor  # [B]
    windows: Indices  # indices of the windows in the features

    @classmethod
    def of(cls, padded: Padded) -> Batch:
        """Make a batch of tensors that share the memory of the arrays."""
        names = [field.name for field in fields(cls) if field.name != "windows"]
        tensors: dict[str, Any] = {name: torch.from_numpy(getattr(padded, name)) for name in names}
        return cls(**tensors, windows=padded.windows)

    @classmethod
    def of_inputs(cls, inputs: Mapping[str, Tensor]) -> Batch:
        """Make a batch of the inputs of an encoder; its labels are not known."""
        unknown = torch.zeros(len(inputs["mask"]), dtype=torch.long, device=inputs["mask"].device)
        named: dict[str, Any] = {name: inputs[name] for name in ENCODER_INPUTS}
        return cls(**named, start=unknown, end=unknown, windows=np.arange(len(unknown)))

    @property
    def has_answer(self) -> Tensor:
        """Whether each window contains the answer, [B]."""
        return self.is_context.gather(1, self.start[:, None])[:, 0]

    def to(self, device: torch.device) -> Batch:
        """Return the batch on another device."""
        moved: dict[str, Any] = {
            field.name: send(value, device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class Totals:
    """Counts over all batches of an optimiser step, in all processes: the denominators of the mean losses."""

    answerable: Count  # windows that contain the answer
    unanswerable: Count
    tokens: Count  # without padding

    @property
    def windows(self) -> Count:
        return self.answerable + self.unanswerable

    def windows_with_and_without_answer(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the numbers of windows with and without the answer as tensors.

        A number is filled in on the device; copying it there would wait for all pending work of the device.
        """
        answerable, unanswerable = (
            count if isinstance(count, Tensor) else torch.full((), count, device=device, dtype=torch.float32)
            for count in (self.answerable, self.unanswerable)
        )
        return answerable, unanswerable

    @classmethod
    def of(cls, batches: Iterable[Batch]) -> Totals:
        """Count over batches, on the device where they are; on the CPU this does not block."""
        answerable, windows, tokens = 0.0, 0.0, 0.0
        for batch in batches:
            answerable += int(batch.has_answer.sum())
            windows += len(batch.mask)
            tokens += int(batch.mask.sum())
        return cls(answerable, windows - answerable, tokens)


@dataclass(frozen=True)
class Group:
    """The batches of one optimiser step, all from the same stratum."""

    stratum: int
    batches: Sequence[Indices]


class BucketOrder:
    """A reproducible order of batches: shuffled overall, with windows of similar length in each batch.

    Windows may be split into strata. No optimiser step mixes two strata, so a learner that uses only the first strata
    uses or skips whole steps, and learners with less and with more data can share one pass.
    """

    def __init__(
        self,
        lengths: Indices,
        batch_size: int,
        *,
        seed: int = 0,
        accumulate: int = 1,
        strata: NDArray[np.integer[Any]] | None = None,  # stratum of each window, from 0; -1 excludes the window
        counts: NDArray[np.integer[Any]] | None = None,  # how often an epoch takes each window; by default once
    ) -> None:
        self.lengths, self.batch_size, self.seed, self.accumulate = lengths, batch_size, seed, accumulate
        strata = np.zeros(len(lengths), np.int64) if strata is None else strata
        self.members = [np.flatnonzero(strata == number) for number in range(int(strata.max(initial=0)) + 1)]
        if counts is not None:
            self.members = [np.repeat(members, counts[members]) for members in self.members]

    def groups_in(self, stratum: int) -> int:
        """Return the optimiser steps per epoch of one stratum."""
        batches = math.ceil(len(self.members[stratum]) / self.batch_size)
        return math.ceil(batches / self.accumulate)

    def __len__(self) -> int:
        """Return the optimiser steps per epoch."""
        return sum(self.groups_in(stratum) for stratum in range(len(self.members)))

    def epoch(self, epoch: int, *, skip: int = 0) -> Iterator[Group]:
        """Yield the optimiser steps of one epoch, without the first `skip`."""
        groups = [
            Group(stratum, batches[at : at + self.accumulate])
            for stratum in range(len(self.members))
            for batches in [self._batches(stratum, epoch)]
            for at in range(0, len(batches), self.accumulate)
        ]
        if len(self.members) > 1:
            rng = np.random.default_rng([self.seed, epoch, len(self.members), 1])
            groups = [groups[index] for index in rng.permutation(len(groups))]
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
        return [batches[index] for index in rng.permutation(len(batches))]


def collate(features: Features, windows: Indices, *, multiple_of: int = PAD_TO_MULTIPLE_OF) -> Batch:
    """Make a padded batch of windows."""
    return Batch.of(pad(features, windows, multiple_of=multiple_of))
