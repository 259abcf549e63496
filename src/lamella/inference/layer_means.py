"""The mean weight of every layer that a head reads, by output and kind of token, summed up batch by batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lamella.data.windows.features import Features
from lamella.data.windows.padding import Padded

if TYPE_CHECKING:
    from torch import Tensor

    from lamella.encoder.encoder import HiddenStates
    from lamella.heads.head import Head

KINDS = ("special", "question", "context", "answer")  # context: without the answer
PAD = -1


class LayerMeans:
    """Sums the layer weights of a head over the tokens of windows."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.sums: NDArray[np.float64] | None = None  # [O, K, L]; None before the first batch
        self.counts = np.zeros(len(KINDS), np.int64)

    def add(self, features: Features, padded: Padded, hidden: HiddenStates) -> None:
        """Add a batch, given the hidden layers of its windows."""
        weights = self.head.layer_weights(hidden.only(self.head.layers))
        if weights is None:
            return
        kinds = token_kinds(features, padded)[:, : weights.shape[-1]]  # a classifier reads the first token alone
        sums = sums_by_kind(weights, kinds)
        self.sums = sums if self.sums is None else self.sums + sums
        self.counts += np.bincount(kinds[kinds != PAD], minlength=len(KINDS))

    def by_kind(self) -> dict[str, dict[str, list[float]]]:
        """Return the mean weights of the layers, by output and kind of token; kinds without a token are left out."""
        assert self.sums is not None
        means = self.sums / np.maximum(self.counts, 1)[:, None]  # [O, K, L]
        return {
            output: {kind: means[number, place].tolist() for place, kind in enumerate(KINDS) if self.counts[place]}
            for number, output in enumerate(self.head.task.names_of_outputs())
        }

    def over_all_tokens(self) -> dict[str, list[float]]:
        """Return the mean weights of the layers over all tokens, by output."""
        assert self.sums is not None
        means = self.sums.sum(axis=1) / max(1, self.counts.sum())  # [O, L]
        return {output: means[number].tolist() for number, output in enumerate(self.head.task.names_of_outputs())}


def token_kinds(features: Features, padded: Padded) -> NDArray[np.int64]:
    """Return the kind of every token [B, T]: its index in KINDS, or PAD."""
    positions = np.arange(padded.mask.shape[1])
    begin = features.context_begin[padded.windows, None]
    template = features.template
    kinds = np.where(padded.mask, KINDS.index("special"), PAD)
    kinds[(positions >= len(template.prefix)) & (positions < begin - len(template.middle))] = KINDS.index("question")
    kinds[padded.is_context] = KINDS.index("context")
    answer = (positions >= padded.start[:, None]) & (positions <= padded.end[:, None])
    kinds[padded.is_context & answer] = KINDS.index("answer")
    return kinds


def sums_by_kind(weights: Tensor, kinds: NDArray[np.int64]) -> NDArray[np.float64]:
    """Sum weights [O, L, B, T] over the tokens of each kind: [O, K, L]; on the device of the weights."""
    import torch

    is_kind = torch.from_numpy(np.stack([kinds == kind for kind in range(len(KINDS))]))  # [K, B, T]
    is_kind = is_kind.to(weights.device, torch.float64)
    sums: NDArray[np.float64] = torch.einsum("olbt,kbt->okl", weights.double(), is_kind).cpu().numpy()
    return sums
