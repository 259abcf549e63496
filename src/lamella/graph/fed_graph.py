"""Graphs that are fed with the tensors of a reader in each run, so that many readers share one graph."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lamella.graph.builder import Graph
from lamella.graph.onnx_file import Value

Feeds = dict[str, NDArray[np.float32]]


class FedGraph(Graph):
    """A graph in which tensors of numbers are inputs, except those with a name in `kept`.

    The builders of a graph derive its tensors from those of the reader. Here, they are collected in `feeds`, under
    names that depend on the structure alone: readers with the same nodes and shapes can share the graph, each with its
    own feeds. A size of 0 stands for one that varies between readers, such as a rank.
    """

    def __init__(self, kept: Container[str] = ()) -> None:
        super().__init__()
        self.kept = kept
        self.feeds: Feeds = {}

    def constant(self, values: ArrayLike, name: str | None = None) -> str:
        """Add a tensor as an input; whole numbers and single numbers are part of the structure."""
        tensor: NDArray[Any] = np.asarray(values)
        if name in self.kept or tensor.dtype.kind != "f" or not tensor.ndim:
            return super().constant(tensor, name)
        key = name or f"fed_{len(self.feeds)}"
        if key not in self.feeds:
            self.feeds[key] = np.ascontiguousarray(tensor, np.float32)
            shape = [size or f"{key}:{axis}" for axis, size in enumerate(tensor.shape)]
            self.inputs[key] = Value(key, "float32", shape)
        return key

    def value(self, name: str, shape: list[int | str]) -> str:
        """Add an input that is computed elsewhere, such as a layer of an encoder."""
        self.inputs[name] = Value(name, "float32", shape)
        return name
