"""The graph of the mixer whose convolution filters are computed from the text that they are applied to."""

from __future__ import annotations

import numpy as np

from lamella.graph.builder import BATCH, Graph
from lamella.graph.operations import activate, linear
from lamella.graph.streams import StageInputs, Streams, hide_pads, repeat_windows

SMOOTHING = 8  # tokens over whose maximum every feature map is smoothed first


def context_cnn(inputs: StageInputs, x: Streams) -> Streams:
    """Add a convolution of every window with its own filters: see `lamella.heads.context_cnn`."""
    graph, options, outputs = inputs.graph, inputs.options, inputs.outputs
    width = x.channels * x.width
    real = repeat_windows(inputs, inputs.mask(), x.streams)  # [S · B, T]
    windows = graph.transpose(x.value, 0, 2, 3, 1, 4)  # [S, B, T, C, W]
    text = graph.reshape(windows, [-1, inputs.tokens, width])
    if options["size"]:
        text, width = linear(graph, inputs.tensors, "narrow", text), options["size"]
    text = hide_pads(inputs, text, "BT.", mask=real)  # [S · B, T, width]
    source = real
    if options["filters_from"] == "question":
        source = repeat_windows(inputs, inputs.mask(question=True), x.streams)
    filters, length = _add_filters(inputs, text, source, width)
    responses = _convolve(inputs, text, filters, length, outputs * options["filters"])  # [S · B, T, n]
    split = graph.reshape(responses, [x.streams, BATCH, inputs.tokens, outputs, options["filters"]])
    if x.streams == 1:  # [1, B, T, O, filters]
        mixed = graph.transpose(split, 3, 0, 1, 2, 4)
    else:  # every output reads its own stream
        own = [
            graph.slice(graph.slice(split, output, output + 1, 0), output, output + 1, 3) for output in range(outputs)
        ]
        mixed = graph.transpose(graph.op("Concat", *own, axis=0), 0, 3, 1, 2, 4)
    return Streams(mixed, outputs, 1, options["filters"])  # [O, 1, B, T, filters]


def _add_filters(inputs: StageInputs, text: str, source: str, width: int) -> tuple[str, int]:
    """Return the filters as a matrix for every window, [S · B or 1, width, length · n], and their length."""
    graph, tensors, options = inputs.graph, inputs.tensors, inputs.options
    count = inputs.outputs * options["filters"]
    segment, step = options["segment"], options["step"]
    length = max(0, inputs.longest - segment) // step + 1
    if options["context"] == "none":
        bank = tensors["bank"]  # [length, width, n]
        return graph.constant(bank.transpose(1, 0, 2).reshape(1, width, length * count)), length
    kernel = tensors["conv.weight"]
    maps = hide_pads(inputs, graph.transpose(text, 0, 2, 1), "B.T", mask=source)  # [S · B, width, T]
    weights = graph.constant(kernel), graph.constant(tensors["conv.bias"])
    maps = activate(graph, "relu", graph.op("Conv", maps, *weights, pads=_edges(kernel.shape[2])))
    maps = hide_pads(inputs, maps, "B.T", mask=source)
    if options["context"] == "vector":
        length = options["kernel"]
        context = graph.op("ReduceMax", maps, graph.constant(np.array([2])), keepdims=0)
        split = graph.reshape(linear(graph, tensors, "spell_out", context), [-1, length, width, count])
        return graph.reshape(graph.transpose(split, 0, 2, 1, 3), [0, 0, length * count]), length
    maps = graph.op("MaxPool", _pad_tokens(graph, maps, *_edges(SMOOTHING)), kernel_shape=[SMOOTHING], strides=[1])
    maps = hide_pads(inputs, maps, "B.T", mask=source)
    end = (length - 1) * step + segment

    def pool(values: str) -> str:
        # No value is below 0, so that zeros can fill the segments beyond the end.
        filled = graph.slice(_pad_tokens(graph, values, 0, end), 0, end, axis=2)
        return graph.op("MaxPool", filled, kernel_shape=[segment], strides=[step])

    present = graph.op("Unsqueeze", graph.op("Cast", source, to=1), graph.constant(np.array([1])))  # fp32
    found = graph.op("Greater", pool(present), graph.constant(np.float32(0)))  # [S · B, 1, length]
    filters = graph.op("Add", pool(maps), graph.constant(tensors["bias"][:, None]))  # [S · B, n · width, length]
    filters = graph.op("Where", found, filters, graph.constant(np.float32(0)))
    split = graph.reshape(filters, [-1, count, width, length])
    return graph.reshape(graph.transpose(split, 0, 2, 3, 1), [0, 0, length * count]), length


def _convolve(inputs: StageInputs, text: str, filters: str, length: int, count: int) -> str:
    """Convolve every window with its filters: one product for all positions, then shift and add."""
    graph = inputs.graph
    products = graph.reshape(graph.op("MatMul", text, filters), [-1, inputs.tokens, length, count])
    before, after = _edges(length)
    padded = graph.op("Pad", products, graph.constant(np.array([0, before, 0, 0, 0, after, 0, 0])))
    shifted = []
    for position in range(length):
        at = graph.op("Gather", padded, graph.constant(np.array(position)), axis=2)  # [S · B, T + length - 1, n]
        if inputs.tokens == 1:
            end: int | str = position + 1
        else:
            end = graph.op("Add", graph.size(str(inputs.tokens)), graph.constant(np.array([position])))
        shifted.append(graph.slice(at, position, end, axis=1))
    return shifted[0] if len(shifted) == 1 else graph.op("Sum", *shifted)


def _pad_tokens(graph: Graph, values: str, before: int, after: int) -> str:
    """Add zeros before and after the tokens of values [N, C, T]."""
    return graph.op("Pad", values, graph.constant(np.array([0, 0, before, 0, 0, after])))


def _edges(length: int) -> tuple[int, int]:
    """Return the numbers of zeros before and after a sequence that keep its length under a kernel of `length`."""
    return (length - 1) // 2, length // 2
