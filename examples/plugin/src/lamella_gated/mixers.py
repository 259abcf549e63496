"""A mixer that weighs the layers of each token by a learned gate."""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from lamella.heads.head import LayerWeights, StageShape
from lamella.registry import register


@register("mixer", "gated")
class Gated(LayerWeights):
    """A learned gate over the layers of each token: w_i = softmax_i(g · h_i / t), x = Σ_i w_i h_i.

    `temperature` is t: the higher it is, the more even the weights are.
    """

    weighs_per_token = True  # `lamella analyse` then shows the mean weight of each layer

    def __init__(self, shape: StageShape, *, temperature: Annotated[float, Field(gt=0)] = 1.0) -> None:
        super().__init__()
        self.temperature = temperature
        self.gate = nn.Parameter(torch.empty(1, shape.width).normal_(std=0.02))  # [1, W]
        self.out_shape = replace(shape, channels=1)

    def weigh(self, project: Callable[[Tensor], Tensor], q: Tensor) -> Tensor:
        return (project(self.gate) / self.temperature).softmax(1)  # [1, C, B, T]
