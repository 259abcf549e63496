"""The graph of a base encoder that many readers share: whatever a reader changes in it is fed as an input.

A reader may feed its LoRA, its IA³ or its adapters, and beside them biases, LayerNorms and token types; where it has
none, it feeds those of the encoder, LoRA of rank 0, factors of 1 or adapters of size 0. These are three graphs, so that
no reader pays for the nodes of another kind; and a reader of lower layers has a graph without the higher ones, as
onnxruntime always runs all nodes. Weight matrices and embeddings belong to the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamella.encoder.families import reads_token_types
from lamella.graph.builder import BATCH, TOKENS, Output
from lamella.graph.embeddings import TYPES
from lamella.graph.encoder_config import EncoderConfig
from lamella.graph.encoder_graph import POOLED, add_encoder, layer_output, pooler_path
from lamella.graph.fed_graph import FedGraph, Feeds
from lamella.graph.onnx_file import Value
from lamella.graph.operations import INPUT_FACTOR, LORA_A, LORA_B, OUTPUT_FACTOR
from lamella.graph.support import NoGraphError
from lamella.graph.tensor_files import Tensors
from lamella.graph.trained_names import ADAPTER_PARTS
from lamella.graph.tuned_tensors import ADAPTER, Change, separate_changes


class Kind(NamedTuple):
    """What readers must have in common to share a graph: the kind of their change, and the highest layer they read."""

    change: Literal["low_rank", "factors", "adapters"]
    highest: int


@dataclass(frozen=True)
class SharedGraph:
    """The graph of an encoder, ready to be written; its outputs are all layers, and the pooled output if it has one."""

    graph: FedGraph
    outputs: Mapping[str, Output]

    @property
    def size(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.graph.tensors.values())

    def encode(self, *, data_file: Path | None = None) -> bytes:
        """Return the bytes of an ONNX file; with `data_file`, large tensors are written there."""
        return self.graph.encode(self.outputs, data_file=data_file)


class FedEncoder:
    """A base encoder as its readers see it: the graphs that they share, and what each of them feeds.

    `tensors` may lack the values of those that belong to the graphs, except to build one.
    """

    def __init__(self, config: EncoderConfig, tensors: Tensors) -> None:
        self.config, self.tensors = config, tensors
        self._kept = {name for name, tensor in tensors.items() if is_kept(config, name, tensor.shape)}
        self._inputs: dict[Kind, Mapping[str, Value]] = {}

    def build(self, kind: Kind, tensors: Tensors | None = None) -> SharedGraph:
        """Build the graph for all readers of a kind, or with the tensors of one of them."""
        config = self.config
        graph = FedGraph(self._kept)
        has_pooler = config.family.optional_pooler and f"{pooler_path(config)}.weight" in self.tensors
        pooled = has_pooler and kind.highest == config.depth
        complete = _complete(config, self.tensors if tensors is None else tensors, kind.change)
        encoder = add_encoder(graph, config, complete, range(kind.highest + 1), pooled=pooled)
        shape: list[int | str] = [BATCH, TOKENS, config.hidden_size]
        outputs: dict[str, Output] = {layer_output(number): (value, shape) for number, value in encoder.layers.items()}
        if encoder.pooled is not None:
            outputs[POOLED] = encoder.pooled, [BATCH, config.hidden_size]
        return SharedGraph(graph, outputs)

    def feed(
        self, delta: Tensors, tunings: Sequence[Mapping[str, Any]], *, highest: int | None = None
    ) -> tuple[Kind, Feeds]:
        """Return the kind of a reader and what it feeds; raise NoGraphError if it cannot share the encoder.

        `highest` is the highest layer that its head reads.
        """
        if len(tunings) > 1:
            raise NoGraphError("its encoder was tuned more than once")
        tuned, changes = separate_changes(self.tensors, delta, tunings, self.config)
        for name in delta:
            if name in self._kept:
                raise NoGraphError(f"its tuning {tunings[0]['name']} changes whole weight matrices, such as {name}")
        has_adapters = any(ADAPTER.fullmatch(name) for name in delta)
        kind = Kind("adapters" if has_adapters else "low_rank", self.config.depth if highest is None else highest)
        for path, change in changes.items():
            if change.factor is None:
                tuned |= _low_rank(self.tensors, path, change)
                continue
            kind = kind._replace(change="factors")
            tuned[f"{path}.{INPUT_FACTOR if change.scales_inputs else OUTPUT_FACTOR}"] = change.factor
            if not change.scales_inputs:
                tuned[f"{path}.bias"] = tuned[f"{path}.bias"] * change.factor
        if kind not in self._inputs:
            self._inputs[kind] = self.build(kind).graph.inputs
        feeds = self.build(kind, tuned).graph.feeds
        _check_shapes(feeds, self._inputs[kind])
        return kind, feeds


def is_kept(config: EncoderConfig, name: str, shape: Sequence[int]) -> bool:
    """Return whether a tensor of an encoder belongs to its graph, so that no reader can feed another one."""
    return len(shape) > 1 and not (name.endswith(TYPES) and reads_token_types(config))


def _low_rank(tensors: Tensors, path: str, change: Change) -> dict[str, NDArray[Any]]:
    """Return the factors of LoRA, with its scale in the second."""
    if change.lengths is not None:
        raise NoGraphError("DoRA rescales whole weight matrices")
    a, b = change.low_rank()
    outputs, inputs = tensors[f"{path}.weight"].shape
    if a.shape[1:] != (inputs,) or b.shape != (outputs, len(a)):
        raise NoGraphError(f"the LoRA of {path} has the shapes {a.shape} and {b.shape}")
    return {f"{path}.{LORA_A}": a, f"{path}.{LORA_B}": b}


def _complete(config: EncoderConfig, tensors: Tensors, change: str) -> Tensors:
    """Add what a reader with this kind of change has in every layer, without an effect where it is missing."""
    added = Tensors()
    family, hidden = config.family, config.hidden_size
    for layer in config.layer_paths:
        for target in family.projections if change != "adapters" else ():
            path = f"{layer}.{family.projections[target]}"
            outputs, inputs = tensors[f"{path}.weight"].shape
            if change == "low_rank":
                added[f"{path}.{LORA_A}"] = np.empty((0, inputs), np.float32)
                added[f"{path}.{LORA_B}"] = np.empty((outputs, 0), np.float32)
            elif target == "ffn_output":
                added[f"{path}.{INPUT_FACTOR}"] = np.ones(inputs, np.float32)
            else:
                added[f"{path}.{OUTPUT_FACTOR}"] = np.ones(outputs, np.float32)
        for site in (family.attention_site, family.ffn_site) if change == "adapters" else ():
            shapes = (0, hidden), (0,), (hidden, 0), (hidden,)
            for part, shape in zip(ADAPTER_PARTS, shapes, strict=True):
                added[f"{layer}.{site}.adapter.{part}"] = np.zeros(shape, np.float32)
    return Tensors(added | tensors)


def _check_shapes(feeds: Feeds, inputs: Mapping[str, Value]) -> None:
    """Refuse tensors that do not fit the inputs of a graph, whose sizes are fixed or vary."""
    for name, tensor in feeds.items():
        expected = inputs[name].shape if name in inputs else ()
        if len(expected) != tensor.ndim or any(
            isinstance(size, int) and size != found for size, found in zip(expected, tensor.shape, strict=True)
        ):
            raise NoGraphError(f"{name} has the shape {tensor.shape} instead of {tuple(expected)}")
