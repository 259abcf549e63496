"""The graphs of convolutional mixers: along the hidden axis, over the tokens, or both."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.graph.builder import BATCH
from lamella.graph.operations import activate, linear
from lamella.graph.streams import StageInputs, Streams, hide_pads, repeat_windows
from lamella.graph.tensor_files import Tensors

NORM_EPSILON = 1e-3  # of the batch normalisation in Xception


def conv_grid(inputs: StageInputs, x: Streams) -> Streams:
    """Add two convolutions over tokens and hidden units, the second as wide as the output of the first."""
    graph, tensors, options = inputs.graph, inputs.tensors, inputs.options
    kernel = tensors["conv.weight"]  # [filters, C, tokens, hidden units]
    dilation = options.get("dilation", 1)
    rows, columns = _edges(kernel.shape[2] - 1), _edges((kernel.shape[3] - 1) * dilation)
    windows = graph.transpose(hide_pads(inputs, x.value, "BT."), 0, 2, 1, 3, 4)  # [S, B, C, T, W]
    image = graph.reshape(windows, [-1, x.channels, inputs.tokens, x.width])
    features = graph.op(
        "Conv",
        image,
        graph.constant(kernel),
        graph.constant(tensors["conv.bias"]),
        strides=[1, options["stride"]],
        dilations=[1, dilation],
        pads=[rows[0], columns[0], rows[1], columns[1]],
    )  # [S · B, filters, T, W / stride]
    tokens = graph.transpose(activate(graph, "relu", features), 0, 2, 1, 3)
    flat = graph.reshape(tokens, [0, 0, tensors["read.weight"].shape[1]])
    maps = activate(graph, "relu", linear(graph, tensors, "read", flat))  # [S · B, T, maps]
    return _as_channels(inputs, maps, x.streams, tensors["read.weight"].shape[0])


def inception(inputs: StageInputs, x: Streams) -> Streams:
    """Add modules of parallel convolutions over 1, 3 and 5 tokens and over a maximum of 3."""
    graph = inputs.graph
    mask = repeat_windows(inputs, inputs.mask(), x.streams)  # [S · B, T]
    windows = graph.transpose(x.value, 0, 2, 1, 4, 3)  # [S, B, C, W, T]
    text = graph.reshape(windows, [-1, x.channels * x.width, inputs.tokens])
    text = hide_pads(inputs, text, "B.T", mask=mask)
    for number in range(inputs.options["modules"]):
        text = _inception_module(inputs, inputs.tensors.under(f"blocks.{number}."), text, mask)
    channels = 4 * inputs.options["filters"]
    return _as_channels(inputs, graph.transpose(text, 0, 2, 1), x.streams, channels)


def _inception_module(inputs: StageInputs, tensors: Tensors, text: str, mask: str) -> str:
    """Return the four branches, [N, 4 · filters, T], zero at the pads."""
    graph = inputs.graph

    def conv(name: str, x: str) -> str:
        kernel = tensors[f"{name}.weight"]
        weights = graph.constant(kernel), graph.constant(tensors[f"{name}.bias"])
        return graph.op("Conv", x, *weights, pads=_edges(kernel.shape[2] - 1))

    def narrow(name: str) -> str:
        return hide_pads(inputs, activate(graph, "relu", conv(name, text)), "B.T", mask=mask)

    padded = graph.op("Pad", text, graph.constant(np.array([0, 0, 1, 0, 0, 1])))  # zeros beyond the ends
    # With an axis more, as onnxruntime would fuse the two nodes into one that ignores the zeros.
    row = graph.op("Unsqueeze", padded, graph.constant(np.array([2])))
    largest = graph.op("MaxPool", row, kernel_shape=[1, 3], strides=[1, 1])
    largest = graph.op("Squeeze", largest, graph.constant(np.array([2])))
    branches = [
        conv("one", text),
        conv("three", narrow("to_three")),
        conv("five", narrow("to_five")),
        conv("pooled", largest),
    ]
    joined = activate(graph, "relu", graph.op("Concat", *branches, axis=1))
    return hide_pads(inputs, joined, "B.T", mask=mask)


def xception(inputs: StageInputs, x: Streams) -> Streams:
    """Add separable convolutions along the hidden axis of every token, and their mean over the remaining width."""
    graph, tensors = inputs.graph, inputs.tensors
    tokens = graph.reshape(graph.transpose(x.value, 0, 2, 3, 1, 4), [-1, x.channels, x.width])  # [S · B · T, C, W]
    tokens = _normed(inputs, "first", tokens, strides=[3])
    tokens = activate(graph, "relu", _normed(inputs, "second", activate(graph, "relu", tokens)))
    for number in range(_count(tensors, "blocks")):
        tokens = _xception_block(inputs, f"blocks.{number}", tokens)
    for number in range(_count(tensors, "last")):
        tokens = activate(graph, "relu", _separable(inputs, f"last.{number}", tokens))
    mean = graph.op("ReduceMean", tokens, graph.constant(np.array([2])), keepdims=0)  # [S · B · T, channels]
    last = f"last.{_count(tensors, 'last') - 1}" if _count(tensors, "last") else "blocks.0.shortcut"
    return _as_channels(inputs, mean, x.streams, len(tensors[f"{last}.weight"]))


def _xception_block(inputs: StageInputs, path: str, x: str) -> str:
    graph, convolved = inputs.graph, x
    for number in range(_count(inputs.tensors, f"{path}.layers")):
        convolved = _separable(inputs, f"{path}.layers.{number}", activate(graph, "relu", convolved))
    if f"{path}.shortcut.weight" not in inputs.tensors:
        return graph.op("Add", x, convolved)
    pooled = graph.op("AveragePool", convolved, kernel_shape=[3], strides=[2], pads=[1, 1], count_include_pad=0)
    return graph.op("Add", _normed(inputs, f"{path}.shortcut", x, strides=[2]), pooled)


def _separable(inputs: StageInputs, path: str, x: str) -> str:
    """Add a convolution of 3 units within each channel, then one across the channels, normalised."""
    within = inputs.tensors[f"{path}.conv.0.weight"]
    x = inputs.graph.op("Conv", x, inputs.graph.constant(within), group=len(within), pads=[1, 1])
    return _normed(inputs, path, x, conv=1)


def _normed(inputs: StageInputs, path: str, x: str, *, conv: int = 0, strides: list[int] | None = None) -> str:
    """Add a convolution with its batch normalisation, which is merged into its weights."""
    graph, tensors = inputs.graph, inputs.tensors.under(f"{path}.")
    scale = tensors["weight"] / np.sqrt(tensors["running_var"] + np.float32(NORM_EPSILON))
    bias = tensors["bias"] - tensors["running_mean"] * scale
    kernel: NDArray[Any] = tensors[f"conv.{conv}.weight"] * scale[:, None, None]
    return graph.op("Conv", x, graph.constant(kernel), graph.constant(bias), strides=strides or [1])


def _count(tensors: Tensors, path: str) -> int:
    """Return the number of modules in a list."""
    return len({name.removeprefix(f"{path}.").split(".")[0] for name in tensors if name.startswith(f"{path}.")})


def _as_channels(inputs: StageInputs, values: str, streams: int, channels: int) -> Streams:
    """Return numbers [S · B, T, C], or [S · B · T, C], as C channels of width 1."""
    split = inputs.graph.reshape(values, [streams, BATCH, inputs.tokens, channels, 1])
    return Streams(inputs.graph.transpose(split, 0, 3, 1, 2, 4), streams, channels, 1)


def _edges(total: int) -> tuple[int, int]:
    """Return the numbers of zeros before and after a sequence that keep its length under a convolution."""
    return total // 2, total - total // 2
