"""Mixers that sum the layers with fixed or learned weights, the same for every token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lamella.heads.head import LayerWeights, StageShape
from lamella.registry import register


class FixedWeights(LayerWeights):
    """A mixer with constant weights."""

    def __init__(self, shape: StageShape) -> None:
        super().__init__()
        self.register_buffer("w", self.shares(shape.channels)[None, :, None, None], persistent=False)  # [1, C, 1, 1]
        self.out_shape = replace(shape, channels=1)

    @staticmethod
    def shares(channels: int) -> Tensor:
        """Return the weight of each channel."""
        raise NotImplementedError

    def weigh(self, project: Callable[[Tensor], Tensor], q: Tensor) -> Tensor:
        return self.get_buffer("w")


@register("mixer", "last")
class Last(FixedWeights):
    """Last selected layer, as in a plain fine-tuned reader: x = h_L."""

    @staticmethod
    def reads(layers: tuple[int, ...]) -> tuple[int, ...]:
        return layers[-1:]

    @staticmethod
    def shares(channels: int) -> Tensor:
        return torch.tensor([0.0] * (channels - 1) + [1.0])


@register("mixer", "average")
class Average(FixedWeights):
    """Mean of the selected layers (BERTVision's AP): x = Σ_i h_i / C."""

    @staticmethod
    def shares(channels: int) -> Tensor:
        return torch.full((channels,), 1 / channels)


@register("mixer", "first_last")
class FirstLast(FixedWeights):
    """Mean of the first and the last selected layer: x = (h_1 + h_L) / 2."""

    @staticmethod
    def reads(layers: tuple[int, ...]) -> tuple[int, ...]:
        return (layers[0], layers[-1]) if len(layers) > 1 else layers

    @staticmethod
    def shares(channels: int) -> Tensor:
        weights = torch.zeros(channels)
        weights[0] += 0.5
        weights[-1] += 0.5  # a single layer gets both halves
        return weights


@register("mixer", "scalar_mix")
class ScalarMix(LayerWeights):
    """Learned weights, the same for all tokens: x = γ · Σ_i w_i h_i (PCE's weighted sum, BERTVision's LP).

    With `shared = false` every output (start and end) has its own γ and w: 2(L + 1) parameters, as in the PCE paper.
    `shared = true` with `normalise = "softmax"` is BERTVision's learned pooling: L + 1 parameters.

    The PCE paper's equation has no softmax and gives no initial values. Ours start as the mean of the layers in both
    forms (w = 1/L, or softmax of zeros) with γ = 1. BERTVision starts w from N(0, 0.05), which is nearly the same.
    Neither paper decays w, and weight decay does not apply to it here: it would pull towards 0, or towards the mean.
    """

    undecayed = ("w",)

    def __init__(
        self, shape: StageShape, *, shared: bool = False, normalise: Literal["none", "softmax"] = "none"
    ) -> None:
        super().__init__()
        streams = shape.streams if shared else shape.outputs
        self.normalise = normalise
        start = 0.0 if normalise == "softmax" else 1 / shape.channels
        self.w = nn.Parameter(torch.full((streams, shape.channels), start))
        self.gamma = nn.Parameter(torch.ones(streams))
        self.out_shape = replace(shape, streams=streams, channels=1)

    def weigh(self, project: Callable[[Tensor], Tensor], q: Tensor) -> Tensor:
        weights = self.learned_layer_weights({"w": self.w, "gamma": self.gamma}, normalise=self.normalise)
        return weights[..., None, None]  # [S, C, 1, 1]

    @staticmethod
    def learned_layer_weights(tensors: Mapping[str, Tensor], **options: Any) -> Tensor:
        """Return the weights as they apply: γ · w, or γ · softmax(w)."""
        w = tensors["w"].softmax(1) if options.get("normalise") == "softmax" else tensors["w"]
        return tensors["gamma"][:, None] * w  # [S, C]
