"""The values that pass between the stages of a head, and what a stage knows besides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lamella.graph.builder import Graph, Size
from lamella.graph.tensor_files import Tensors


@dataclass(frozen=True)
class Streams:
    """A value [S, C, B, T, W] with its fixed sizes: S streams, C channels, width W."""

    value: str
    streams: int
    channels: int
    width: int


class Mask(Protocol):
    """Adds the mask of the tokens to a graph, [B, T]: of all real tokens, or of those outside of the context."""

    def __call__(self, *, question: bool = False) -> str: ...


@dataclass(frozen=True)
class StageInputs:
    """Everything that a stage can read besides the output of the stage before it."""

    graph: Graph
    tensors: Tensors  # of this stage
    options: Mapping[str, Any]
    mask: Mask
    tokens: Size  # T: 1 if the task reads [CLS] alone
    longest: int  # the largest T
    q: NDArray[np.float32]  # the task's vectors, [O, W]

    @property
    def outputs(self) -> int:
        return len(self.q)


Mixer = Callable[[StageInputs, Streams], Streams]


def hide_pads(inputs: StageInputs, value: str, axes: str, *, mask: str | None = None) -> str:
    """Set a value to zero at the pads, or outside of another mask [B, T].

    `axes` spells the last axes of the value: `B` windows, `T` tokens, `.` any other.
    """
    graph = inputs.graph
    keep = inputs.mask() if mask is None else mask
    others = [place - len(axes) for place, axis in enumerate(axes) if axis == "."]
    if others:
        keep = graph.op("Unsqueeze", keep, graph.constant(np.array(others)))
    return graph.op("Where", keep, value, graph.constant(np.float32(0)))


def repeat_windows(inputs: StageInputs, value: str, streams: int) -> str:
    """Repeat a value [B, …] for every stream, [S · B, …]."""
    return value if streams == 1 else inputs.graph.op("Concat", *[value] * streams, axis=0)
