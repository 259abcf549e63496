"""Round a graph to int8: the matrix products of the encoder and its word embeddings."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.errors import ModelError
from lamella.graph.builder import MICROSOFT, Graph
from lamella.graph.embeddings import WORDS
from lamella.graph.onnx_file import Node

BLOCK = 128  # numbers that share a scale, at most: smaller blocks are slower, larger ones less accurate
SMALLEST_BLOCK = 16  # of onnxruntime
INT8_PRODUCTS = 4  # the accuracy level at which onnxruntime rounds the other factor of a product to int8 as well
LARGEST = 127
ZERO = 128  # the level of 0 in unsigned bytes
LEAST = 1e-20  # the smallest scale, of a token whose numbers are all 0


def round_to_int8(graph: Graph, products: Collection[str], *, by_token: bool = False) -> Graph:
    """Return the same graph with the named matrix products and the word embeddings in int8.

    Weights are rounded now, with a scale for every column and every `BLOCK` inputs. onnxruntime rounds the other factor
    of a product when it runs, with a scale for every token and every `BLOCK` numbers: this is more accurate than one
    scale per run, and no window depends on the others in its batch.

    With `by_token`, a column and a token have one scale each. This is less accurate, and faster on an x86 CPU with
    instructions for products of unsigned and signed bytes (see `has_int8_products` in `environment`). On x86 without
    them, sums would overflow.
    """
    for name, tensor in graph.tensors.items():
        if not np.isfinite(tensor).all():  # rounded products may hide it, where fp32 fails
            raise ModelError(f"{name}: expected finite weights, got infinite ones or NaN; the model is damaged.")
    rounded = Graph()
    rounded.inputs, rounded.tensors = graph.inputs, dict(graph.tensors)
    for node in graph.nodes:
        if node.name in products and by_token:
            rounded.nodes.extend(_multiply_by_token(rounded, node))
        elif node.name in products:
            rounded.nodes.append(_round_product(rounded, node))
        elif node.kind == "Gather" and node.inputs[0] == WORDS:
            rounded.nodes.extend(_round_lookup(rounded, node))
        else:
            rounded.nodes.append(node)
    used = {name for node in rounded.nodes for name in node.inputs}
    rounded.tensors = {name: tensor for name, tensor in rounded.tensors.items() if name in used}
    return rounded


def _round_product(graph: Graph, node: Node) -> Node:
    x, weights = node.inputs
    size, columns = graph.tensors[weights].shape
    levels, scales = f"{weights}.levels", f"{weights}.scales"
    if levels not in graph.tensors:  # layers may share their weights
        graph.tensors[levels], graph.tensors[scales] = _round_weights(graph.tensors[weights])
    block = graph.tensors[levels].shape[2]
    options = {"K": size, "N": columns, "bits": 8, "block_size": block, "accuracy_level": INT8_PRODUCTS}
    return Node(node.name, "MatMulNBits", [x, levels, scales], node.outputs, options, MICROSOFT)


def _multiply_by_token(graph: Graph, node: Node) -> Iterator[Node]:
    """Yield the nodes of a product with one scale for every column and every token."""
    x, weights = node.inputs
    levels, scales = f"{weights}.levels", f"{weights}.scales"
    if levels not in graph.tensors:
        by_column, of_columns = _round_rows(graph.tensors[weights].T)
        graph.tensors[levels] = np.ascontiguousarray(by_column.T.astype(np.int8))
        graph.tensors[scales] = of_columns[:, 0]
    last, zero = graph.constant(np.array([-1]), "int8.last"), graph.constant(np.uint8(ZERO), "int8.zero")
    numbers = {"step": 1 / LARGEST, "least": LEAST, "one": 1}
    step, least, one = (graph.constant(np.float32(number), f"int8.{name}") for name, number in numbers.items())
    parts = ("magnitudes", "largest", "scale.exact", "scale", "scale.shape", "zeros", "levels")
    magnitudes, largest, exact, scale, shape, zeros, rounded = (f"{x}.{part}" for part in parts)
    if all(done.name != rounded for done in graph.nodes):  # several products may have the same input
        yield Node(magnitudes, "Abs", [x], [magnitudes])
        yield Node(largest, "ReduceMax", [magnitudes, last], [largest])
        yield Node(exact, "Mul", [largest, step], [exact])
        yield Node(scale, "Max", [exact, least], [scale])
        yield Node(shape, "Shape", [scale], [shape])
        yield Node(zeros, "Expand", [zero, shape], [zeros])
        options = {"axis": -1, "block_size": len(graph.tensors[levels])}
        yield Node(rounded, "QuantizeLinear", [x, scale, zeros], [rounded], options)
    product = f"{node.name}.product"
    factors = [rounded, levels, one, scales, zero]
    yield Node(product, "MatMulIntegerToFloat", factors, [product], domain=MICROSOFT)
    yield Node(node.name, "Mul", [product, scale], node.outputs)


def _round_weights(matrix: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Round a matrix [in, out]; return its levels, [out, blocks, block], and their scales, [out, blocks]."""
    size, columns = matrix.shape
    block = min(BLOCK, max(SMALLEST_BLOCK, 1 << (size - 1).bit_length()))  # a power of two
    blocks = -(-size // block)
    padded = np.zeros((columns, blocks * block), np.float32)
    padded[:, :size] = matrix.T
    levels, scales = _round_rows(padded.reshape(columns, blocks, block))
    return (levels + ZERO).astype(np.uint8), scales[..., 0]


def _round_lookup(graph: Graph, node: Node) -> Iterator[Node]:
    """Yield the nodes that look words up in an int8 table with one scale per word."""
    table, ids = node.inputs
    levels, scales = _round_rows(graph.tensors[table])
    graph.tensors[f"{table}.levels"], graph.tensors[f"{table}.scales"] = levels.astype(np.int8), scales
    parts = [f"{node.name}.{part}" for part in ("levels", "numbers", "scales")]
    yield Node(parts[0], "Gather", [f"{table}.levels", ids], [parts[0]])
    yield Node(parts[1], "Cast", [parts[0]], [parts[1]], {"to": 1})  # fp32
    yield Node(parts[2], "Gather", [f"{table}.scales", ids], [parts[2]])
    yield Node(node.name, "Mul", parts[1:], node.outputs)


def _round_rows(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Round values to whole numbers from -127 to 127; return these, and the scale of each row of the last axis."""
    scales = (np.abs(values).max(-1, keepdims=True) / LARGEST).astype(np.float32)
    return np.rint(values / np.where(scales > 0, scales, 1)), scales
