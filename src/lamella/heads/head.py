"""A head: mixer stages, then the task's output.

A stage maps `x[S, C, B, T, W]` to the same, given the hidden layers and the task's output vectors `q[O, W]`. C are
channels, at first the chosen layers; S are streams, 1 until a stage splits them into one for each output of the task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lamella import registry
from lamella.encoder.encoder import HiddenStates


@dataclass(frozen=True)
class StageShape:
    """The part of a stage's shape that is known when it is built: S streams, C channels, W wide."""

    streams: int
    channels: int
    width: int


class Head(nn.Module):
    """Mixer stages and a task, built from their specifications."""

    def __init__(
        self, depth: int, hidden_size: int, *, mixer: Sequence[Mapping[str, Any]], task: Mapping[str, Any]
    ) -> None:
        super().__init__()
        first = registry.part("mixer", registry.split(mixer[0])[0]).make
        self.layers: tuple[int, ...] = first.layers(depth)  # type: ignore[attr-defined]
        shape = StageShape(1, len(self.layers), hidden_size)
        self.stages = nn.ModuleList()
        for spec in mixer:
            stage = registry.build("mixer", spec, shape)
            shape = stage.out_shape
            self.stages.append(stage)
        self.task = registry.build("task", task, shape.channels * shape.width)

    def forward(self, hidden: HiddenStates) -> Tensor:
        """The task's logits, one row for each of its outputs."""
        x = torch.stack([layer.float() for layer in hidden.layers])[None]  # [1, C, B, T, W]
        for stage in self.stages:
            x = stage(x, hidden, self.task.q)  # [S, C, B, T, W]
        x = x.permute(0, 2, 3, 1, 4).flatten(3)  # [S, B, T, C·W]
        logits: Tensor = self.task(x)  # [O, B, T]
        return logits
