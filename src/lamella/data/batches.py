"""Which windows go together, and how they become tensors.

Windows of like length share a batch, so little of it is padding: SQuAD windows average 170 tokens, and padding them all
to 384 wastes more than half of every step. The order depends on the seed and the epoch alone, so that a run can go on
in the middle of an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamella.data.features import Features

Indices = NDArray[np.int64]
PAD_TO_MULTIPLE_OF = 8  # what tensor cores and vector units like
BUCKET_BATCHES = 32  # batches sorted by length together: more wastes less padding but mixes the data less


@dataclass(frozen=True)
class Batch:
    """Some windows as tensors, padded to the longest of them."""

    input_ids: Tensor  # [B, T]
    mask: Tensor  # [B, T] true on real tokens
    token_types: Tensor  # [B, T]
    is_context: Tensor  # [B, T] true where an answer may lie
    max_context: Tensor  # [B, T] true where no other window shows more text around the token
    start: Tensor  # [B] labels
    end: Tensor  # [B]
    windows: Indices  # which windows of the features these are

    @property
    def has_answer(self) -> Tensor:
        """[B] whether the answer lies in the window."""
        return self.is_context.gather(1, self.start[:, None])[:, 0]

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)


class BucketOrder:
    """A reproducible order of batches: shuffled as a whole, of like length within a batch."""

    def __init__(self, lengths: Indices, batch_size: int, *, seed: int = 0) -> None:
        self.lengths = lengths
        self.batch_size = batch_size
        self.seed = seed

    def __len__(self) -> int:
        """Batches an epoch."""
        return math.ceil(len(self.lengths) / self.batch_size)

    def epoch(self, epoch: int, *, skip: int = 0) -> Iterator[Indices]:
        """The batches of one epoch, without the first `skip` of them."""
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(len(self.lengths))
        pool = self.batch_size * BUCKET_BATCHES
        batches: list[Indices] = []
        for begin in range(0, len(order), pool):
            bucket = order[begin : begin + pool]
            bucket = bucket[np.argsort(self.lengths[bucket], kind="stable")]
            batches += [bucket[at : at + self.batch_size] for at in range(0, len(bucket), self.batch_size)]
        for place in rng.permutation(len(batches))[skip:]:
            yield batches[place]


def longest_first(lengths: Indices, batch_size: int) -> Iterator[Indices]:
    """Every window once, the longest batch first: what does not fit into memory shows at once."""
    order = np.argsort(-lengths, kind="stable")
    for begin in range(0, len(order), batch_size):
        yield order[begin : begin + batch_size]


def collate(features: Features, windows: Indices) -> Batch:
    """Make a padded batch of some windows."""
    lengths = features.rows[windows + 1] - features.rows[windows]
    width = math.ceil(int(lengths.max()) / PAD_TO_MULTIPLE_OF) * PAD_TO_MULTIPLE_OF
    width = min(width, features.max_seq_length)  # an encoder may have no positions beyond it
    places = np.arange(width)
    mask = places < lengths[:, None]  # [B, T]
    begin, end = features.context_begin[windows, None], features.context_end[windows, None]
    input_ids = np.full(mask.shape, features.template.pad_id, np.int64)
    input_ids[mask] = np.concatenate([features.input_ids[features.rows[w] : features.rows[w + 1]] for w in windows])
    max_context = np.zeros(mask.shape, np.bool_)
    max_context[mask] = np.concatenate([features.max_context[features.rows[w] : features.rows[w + 1]] for w in windows])
    token_types = np.where(mask & (places >= begin), features.template.context_type, 0)
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        mask=torch.from_numpy(mask),
        token_types=torch.from_numpy(token_types),
        is_context=torch.from_numpy((places >= begin) & (places < end)),
        max_context=torch.from_numpy(max_context),
        start=torch.from_numpy(features.start[windows].astype(np.int64)),
        end=torch.from_numpy(features.end[windows].astype(np.int64)),
        windows=windows,
    )
