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
