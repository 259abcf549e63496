"""Mixers that make one layer out of the chosen ones."""

from __future__ import annotations

from torch import Tensor, nn

from lamella.encoder.encoder import HiddenStates
from lamella.heads.head import StageShape
from lamella.registry import register


@register("mixer", "last")
class Last(nn.Module):
    """The last of the chosen layers, as every plain fine-tuned reader has it: x_L."""

    def __init__(self, shape: StageShape) -> None:
        super().__init__()
        self.out_shape = StageShape(shape.streams, 1, shape.width)

    @staticmethod
    def layers(depth: int) -> tuple[int, ...]:
        return (depth,)

    def forward(self, x: Tensor, hidden: HiddenStates, q: Tensor) -> Tensor:
        return x[:, -1:]  # [S, 1, B, T, W]
