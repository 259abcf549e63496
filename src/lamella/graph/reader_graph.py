"""The whole graph of a reader: its encoder as it was tuned, and its head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lamella.graph.builder import BATCH, TOKENS, Graph, Output
from lamella.graph.encoder_config import EncoderConfig
from lamella.graph.encoder_graph import add_encoder
from lamella.graph.head_graph import add_head, plan_head
from lamella.graph.int8 import round_to_int8
from lamella.graph.support import NoGraphError
from lamella.graph.tensor_files import Tensors


@dataclass(frozen=True)
class ReaderGraph:
    """The graph of a reader, ready to be written."""

    graph: Graph
    logits: str
    at_cls: bool  # whether the logits are of the first token only
    products: list[str]  # the names of the encoder's matrix products, which int8 rounds

    @property
    def size(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.graph.tensors.values())

    def in_int8(self, *, by_token: bool = False) -> ReaderGraph:
        """Return the graph with the encoder's matrix products and word embeddings rounded to int8."""
        return replace(self, graph=round_to_int8(self.graph, frozenset(self.products), by_token=by_token))

    def encode(self, *, data_file: Path | None = None) -> bytes:
        """Return the bytes of an ONNX file; with `data_file`, large tensors are written there."""
        logits: Output = (self.logits, [2, BATCH, 1 if self.at_cls else TOKENS])
        return self.graph.encode({"logits": logits}, data_file=data_file)


def build_reader(
    config: EncoderConfig, encoder: Tensors, head: Mapping[str, Any], head_tensors: Tensors, longest: int
) -> ReaderGraph:
    """Build the graph of a reader.

    `encoder` are the tensors of the encoder as it was tuned, `head` the options of the head as a saved model has them,
    and `longest` is the number of tokens of the longest window.
    """
    plan = plan_head(head, config.depth)
    graph = Graph()
    try:
        layers = add_encoder(graph, config, encoder, plan.layers, pooled=plan.pooled)
        logits = add_head(graph, plan, layers, head_tensors, hidden_size=config.hidden_size, longest=longest)
    except KeyError as error:  # an option; a missing tensor has its own message
        raise NoGraphError(f"the model does not record the option {error}") from None
    except ValueError as error:  # arrays whose shapes do not fit
        raise NoGraphError(f"its tensors do not fit its configuration ({error})") from None
    return ReaderGraph(graph, logits, plan.at_cls, layers.products)
