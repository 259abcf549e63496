"""The graphs of mixers that weigh the layers, attend over them or project them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lamella.graph.builder import BATCH, Graph
from lamella.graph.operations import EXACT_GELUS, TANH_GELUS, activate, linear, normalise
from lamella.graph.streams import StageInputs, Streams

Weights = NDArray[np.float32]


def fixed_weights(inputs: StageInputs, channels: int) -> Weights | None:
    """Return the weight of each channel, [S, C], if the mixer has weights that are the same for all tokens."""
    name = inputs.options["name"]
    if name == "last":
        return np.eye(channels, dtype=np.float32)[-1:]
    if name == "average":
        return np.full((1, channels), 1 / channels, np.float32)
    if name == "first_last":
        ends = np.eye(channels, dtype=np.float32)
        return np.asarray((ends[:1] + ends[-1:]) / 2, np.float32)
    if name == "scalar_mix":
        w, gamma = inputs.tensors["w"], inputs.tensors["gamma"]
        if inputs.options["normalise"] == "softmax":
            w = np.exp(w - w.max(1, keepdims=True))
            w = w / w.sum(1, keepdims=True)
        return np.asarray(gamma[:, None] * w, np.float32)
    return None


def weigh(inputs: StageInputs, x: Streams) -> Streams:
    """Add Σ_i w_i h_i with fixed weights, one channel."""
    graph, weights = inputs.graph, fixed_weights(inputs, x.channels)
    assert weights is not None
    weighed = graph.op("Mul", x.value, graph.constant(weights[:, :, None, None, None]))
    total = graph.op("ReduceSum", weighed, graph.constant(np.array([1])), keepdims=1)
    return Streams(total, max(x.streams, len(weights)), 1, x.width)


def weigh_logits(inputs: StageInputs, layers: Sequence[str]) -> str | None:
    """Return q · Σ_i w_i h_i as [B, T, O], without the sum over wide vectors, if the stage is such a sum.

    With fixed weights, the weights are merged into q. Otherwise the logit is Σ_i softmax(z)_i (q · h_i).
    """
    graph, q = inputs.graph, inputs.q
    weights = fixed_weights(inputs, len(layers))
    if weights is not None:
        weighed = weights[:, :, None] * q[:, None]  # [O, C, W]
        parts = [graph.product(h, weighed[:, i].T) for i, h in enumerate(layers)]
        return parts[0] if len(parts) == 1 else graph.op("Sum", *parts)
    if inputs.options["name"] == "dot":
        z = scores = _project(graph, layers, q)
    elif inputs.options["name"] == "multiplicative":
        z = _project(graph, layers, q)
        scores = _project(graph, layers, (q[:, None] @ inputs.tensors["W"])[:, 0])
    else:
        return None
    weights_of_tokens = graph.op("Softmax", scores, axis=0)  # [C, B, T, O]
    return graph.op("ReduceSum", graph.op("Mul", weights_of_tokens, z), graph.constant(np.array([0])), keepdims=0)


def _project(graph: Graph, layers: Sequence[str], vectors: NDArray[np.float32]) -> str:
    """Return v_o · h_i for every layer and output, [C, B, T, O]."""
    axis = graph.constant(np.array([0]))
    matrix = graph.constant(np.ascontiguousarray(vectors.T))
    products = [graph.op("Unsqueeze", graph.op("MatMul", h, matrix), axis) for h in layers]
    return graph.op("Concat", *products, axis=0)


def compress(inputs: StageInputs, x: Streams) -> Streams:
    """Add gelu(A h_i + b), with one A for all channels or one for each."""
    graph, a, b = inputs.graph, inputs.tensors["A"], inputs.tensors["b"]
    product = graph.product(x.value, a[:, None, :, :] if len(a) > 1 else a[0])  # [S, C, B, T, size]
    shifted = graph.op("Add", product, graph.constant(b[:, None, None, :] if len(b) > 1 else b[0]))
    return Streams(activate(graph, TANH_GELUS[0], shifted), x.streams, x.channels, a.shape[2])


def encoder_block(inputs: StageInputs, x: Streams) -> Streams:
    """Add a transformer block whose queries are the task's vectors and whose keys are the layers of a token."""
    graph, tensors, q = inputs.graph, inputs.tensors, inputs.q
    width, outputs = x.width, inputs.outputs
    heads = inputs.options["heads"] or next(n for n in range(max(1, width // 64), 0, -1) if width % n == 0)
    layers = graph.op("Squeeze", x.value, graph.constant(np.array([0])))  # [C, B, T, W]
    query = (q @ tensors["query.weight"].T + tensors["query.bias"]).reshape(outputs, heads, -1)  # [O, N, D]
    key, value = (
        graph.reshape(linear(graph, tensors, name, layers), [x.channels, BATCH, inputs.tokens, heads, width // heads])
        for name in ("key", "value")
    )  # [C, B, T, N, D]
    scaled = graph.constant((query / np.sqrt(query.shape[2]))[:, None, None, None])  # [O, 1, 1, 1, N, D]
    products = graph.op("Mul", graph.op("Unsqueeze", key, graph.constant(np.array([0]))), scaled)
    scores = graph.op("ReduceSum", products, graph.constant(np.array([-1])), keepdims=1)  # [O, C, B, T, N, 1]
    weights = graph.op("Softmax", scores, axis=1)
    attended = graph.op("ReduceSum", graph.op("Mul", weights, value), graph.constant(np.array([1])), keepdims=0)
    attended = graph.reshape(attended, [outputs, BATCH, inputs.tokens, width])
    residual = graph.op("Add", linear(graph, tensors, "output", attended), graph.constant(q[:, None, None]))
    a = normalise(graph, tensors, "attention_norm", residual, 1e-5)
    inner = activate(graph, EXACT_GELUS[0], linear(graph, tensors, "inner", a))
    mixed = normalise(graph, tensors, "norm", graph.op("Add", a, linear(graph, tensors, "outer", inner)), 1e-5)
    return Streams(graph.op("Unsqueeze", mixed, graph.constant(np.array([1]))), outputs, 1, width)
