"""Packing: the tokens of a batch in one row, without the padding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Where the tokens of a padded batch are."""

    shape: tuple[int, int]  # B, T
    lengths: list[int]  # of the windows
    places: Tensor | None  # [tokens], in the batch as one row; None if there is no padding
    positions: Tensor  # [1, tokens], in their windows

    def pack(self, x: Tensor) -> Tensor:
        """Return the tokens of [B, T, …] as [1, tokens, …]."""
        row = x.flatten(0, 1)
        return (row if self.places is None else row[self.places])[None]

    def unpack(self, x: Tensor) -> Tensor:
        """Return [1, tokens, …] as [B, T, …], with zeros as padding."""
        B, T = self.shape
        row = x[0] if self.places is None else x.new_zeros(B * T, *x.shape[2:]).index_copy(0, self.places, x[0])
        return row.view(B, T, *x.shape[2:])


def pack(mask: Tensor) -> Packing:
    """Return the packing of a batch by its mask [B, T]; on a GPU, this would wait until it is idle."""
    places = mask.flatten().nonzero()[:, 0]
    full = len(places) == mask.numel()
    return Packing(
        shape=(mask.shape[0], mask.shape[1]),
        lengths=mask.sum(1).tolist(),
        places=None if full else places,
        positions=(places % mask.shape[1])[None],
    )
