"""A mixer that projects every layer to a small width (BERTVision's adapter pooler)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import gelu

from lamella.encoder.encoder import HiddenStates
from lamella.heads.head import Stage, StageShape
from lamella.registry import register


@register("mixer", "compress")
class Compress(Stage):
    """Project every layer from width W to `size`: x_i = gelu(A h_i + b). The layers stay separate channels.

    `shared` uses one A for all layers (Ha + a parameters); otherwise each layer has its own (L times as many). Weights
    start from N(0, 0.001) truncated at two standard deviations, biases at 0; gelu is the tanh approximation. There is
    no up-projection, residual or norm. The head's `skip` adds BERTVision's concatenated last layer.
    """

    def __init__(self, shape: StageShape, *, size: Annotated[int, Field(ge=1)] = 64, shared: bool = True) -> None:
        super().__init__()
        kernels = 1 if shared else shape.channels
        self.A = nn.Parameter(torch.empty(kernels, shape.width, size))
        self.b = nn.Parameter(torch.zeros(kernels, size))
        nn.init.trunc_normal_(self.A, std=1e-3, a=-2e-3, b=2e-3)
        self.out_shape = replace(shape, width=size)

    def forward(self, x: Tensor, hidden: HiddenStates, q: Tensor) -> Tensor:
        S, C, B, T, W = x.shape
        flat = x.reshape(S, C, B * T, W) @ self.A + self.b[:, None]  # [S, C, B·T, size]
        return gelu(flat, approximate="tanh").reshape(S, C, B, T, -1)
