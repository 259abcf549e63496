"""Build a graph node by node: names, constants, inputs, and the operations that several parts need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lamella.graph.onnx_file import Attribute, Node, Value, encode_graph

MICROSOFT = "com.microsoft"  # the domain of onnxruntime's own operations
INPUT_TYPES = {"input_ids": "int64", "attention_mask": "int64", "token_type_ids": "int64", "is_context": "bool"}
BATCH, TOKENS = "batch", "tokens"  # the sizes that vary

Size = int | str  # a fixed size, or the name of a value that holds one
Output = tuple[str, Sequence[int | str]]  # a value and its shape


class Graph:
    """A graph in the making. Values are known by their names; every method that adds nodes returns one."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.tensors: dict[str, NDArray[Any]] = {}
        self.inputs: dict[str, Value] = {}
        self._sizes: dict[str, str] = {}

    def op(self, kind: str, *inputs: str, domain: str = "", **attributes: Attribute) -> str:
        """Add an operation and return its output."""
        name = f"{kind}_{len(self.nodes)}"
        self.nodes.append(Node(name, kind, inputs, [name], attributes, domain))
        return name

    def input(self, name: str) -> str:
        """Return an input, [B, T]; the graph has those that are asked for."""
        if name not in self.inputs:
            self.inputs[name] = Value(name, INPUT_TYPES[name], [BATCH, TOKENS])
        return name

    def constant(self, values: ArrayLike, name: str | None = None) -> str:
        """Add a tensor; one with a name is stored once, however often it is asked for."""
        tensor = np.asarray(values)
        if tensor.dtype == np.float64:
            tensor = tensor.astype(np.float32)
        key = name or f"constant_{len(self.tensors)}"
        self.tensors.setdefault(key, tensor)
        return key

    def size(self, which: str) -> str:
        """Return the current size of the batch or of the windows, [1]."""
        if which not in self._sizes:
            axis = (BATCH, TOKENS).index(which)
            self._sizes[which] = self.op("Shape", self.input("input_ids"), start=axis, end=axis + 1)
        return self._sizes[which]

    def reshape(self, x: str, sizes: Sequence[Size]) -> str:
        """Reshape; `BATCH` and `TOKENS` stand for the current sizes, and -1 for what is left."""
        if all(isinstance(size, int) for size in sizes):
            return self.op("Reshape", x, self.constant(np.array(sizes, np.int64)))
        parts = [self.size(size) if isinstance(size, str) else self.constant(np.array([size])) for size in sizes]
        return self.op("Reshape", x, self.op("Concat", *parts, axis=0))

    def transpose(self, x: str, *axes: int) -> str:
        return self.op("Transpose", x, perm=axes)

    def slice(self, x: str, begin: int, end: int | str, axis: int) -> str:
        """Return the part of `x` from `begin` to `end`, a number or a value."""
        stop = end if isinstance(end, str) else self.constant(np.array([end]))
        return self.op("Slice", x, self.constant(np.array([begin])), stop, self.constant(np.array([axis])))

    def product(self, x: str, matrix: NDArray[Any], name: str | None = None) -> str:
        """Return x · matrix, for a matrix [in, out]; torch stores the weights of a linear layer as [out, in]."""
        return self.op("MatMul", x, self.constant(matrix, name))

    def encode(self, outputs: Mapping[str, Output], *, data_file: Path | None = None) -> bytes:
        """Return the graph as an ONNX file; `outputs` are values with their shapes, by the names that they get there.

        See encode_graph for `data_file`.
        """
        nodes = [*self.nodes, *(Node(name, "Identity", [value], [name]) for name, (value, _) in outputs.items())]
        order = {name: place for place, name in enumerate(INPUT_TYPES)}
        inputs = sorted(self.inputs.values(), key=lambda value: order.get(value.name, len(order)))  # stable
        ends = [Value(name, "float32", shape) for name, (_, shape) in outputs.items()]
        return encode_graph(nodes, inputs, ends, self.tensors, data_file=data_file)
