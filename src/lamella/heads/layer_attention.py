"""Mixers with attention over the layers: every token weighs its layers by the task's vectors (the PCE paper)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import gelu

from lamella.encoder.dropout import FastDropout
from lamella.encoder.encoder import HiddenStates
from lamella.errors import ConfigError
from lamella.heads.head import LayerWeights, Stage, StageShape
from lamella.registry import register


@register("mixer", "dot")
class Dot(LayerWeights):
    """Attention of the task's vector over the layers: w_i = softmax_i(q · h_i), x = Σ_i w_i h_i. No parameters.

    q is the vector of the output (start or end), so the logit is Σ_i softmax(z)_i z_i with z_i = q · h_i. Unscaled, as
    in the paper.
    """

    reads_q = True
    weighs_per_token = True

    def __init__(self, shape: StageShape) -> None:
        super().__init__()
        self.out_shape = replace(shape, streams=shape.outputs, channels=1)

    def weigh(self, project: Callable[[Tensor], Tensor], q: Tensor) -> Tensor:
        return project(q).softmax(1)


@register("mixer", "multiplicative")
class Multiplicative(LayerWeights):
    """Attention with a learned matrix: w_i = softmax_i(qᵀ W h_i), x = Σ_i w_i h_i; H² parameters.

    The paper leaves open whether start and end share W: `shared` decides. W starts from N(0, 0.02) like BERT's own
    matrices, so that x is nearly the mean of the layers.
    """

    reads_q = True
    weighs_per_token = True

    def __init__(self, shape: StageShape, *, shared: bool = True) -> None:
        super().__init__()
        matrices = 1 if shared else shape.outputs
        self.W = nn.Parameter(torch.empty(matrices, shape.width, shape.width).normal_(std=0.02))
        self.out_shape = replace(shape, streams=shape.outputs, channels=1)

    def weigh(self, project: Callable[[Tensor], Tensor], q: Tensor) -> Tensor:
        return project((q[:, None] @ self.W)[:, 0]).softmax(1)


@register("mixer", "encoder_block")
class EncoderBlock(Stage):
    """Transformer block whose query is the task's vector and whose keys and values are the layers of one token.

    x = LN(a + FFN(a)), a = LN(q + Attention(q, h_1..L, h_1..L)); one block for all outputs, as large as one of BERT's.
    The paper does not give the number of heads, the dropout, the source of the residual or the sharing. Ours: one head
    per 64 dimensions (or the next smaller number that divides the width), `dropout`, the query, one block for all.
    """

    reads_q = True
    weighs_per_token = True

    def __init__(
        self,
        shape: StageShape,
        *,
        heads: Annotated[int, Field(ge=1)] | None = None,
        dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1,
    ) -> None:
        super().__init__()
        width = shape.width
        self.heads = heads or next(count for count in range(max(1, width // 64), 0, -1) if width % count == 0)
        if width % self.heads:
            raise ConfigError("learner.mixer", [f"encoder_block.heads: expected a divisor of {width}, got {heads}."])
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.attention_norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = FastDropout(dropout)
        self.out_shape = replace(shape, streams=shape.outputs, channels=1)

    def forward(self, x: Tensor, hidden: HiddenStates, q: Tensor) -> Tensor:
        attended = self._attend(x[0], q)  # [O, B, T, W]
        a = self.attention_norm(q[:, None, None] + self.dropout(self.output(attended)))
        mixed: Tensor = self.norm(a + self.dropout(self.outer(gelu(self.inner(a)))))
        return mixed[:, None]  # [O, 1, B, T, W]

    def layer_weights(self, hidden: HiddenStates, q: Tensor) -> Tensor:
        """Return the mean over the attention heads."""
        return self._weigh(torch.stack([layer.float() for layer in hidden.layers]), q).mean(-1)

    def _attend(self, layers: Tensor, q: Tensor) -> Tensor:
        """Return the attention of O queries over the C layers of each token; every token is its own sequence."""
        value = self.value(layers).unflatten(-1, (self.heads, -1))  # [C, B, T, N, D]
        weights = self.dropout(self._weigh(layers, q))
        return torch.einsum("ocbtn,cbtnd->obtnd", weights, value).flatten(-2)

    def _weigh(self, layers: Tensor, q: Tensor) -> Tensor:
        """Return the weights of the layers in each of the N attention heads, [O, C, B, T, N]."""
        size = q.shape[1] // self.heads
        query = self.query(q).unflatten(-1, (self.heads, size))  # [O, N, D]
        key = self.key(layers).unflatten(-1, (self.heads, size))  # [C, B, T, N, D]
        scores: Tensor = torch.einsum("ond,cbtnd->ocbtn", query, key) / size**0.5
        return scores.softmax(1)  # over the layers
