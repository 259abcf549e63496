"""The graph of a head behind a shared encoder: its tensors are inputs, so that heads of one structure share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lamella.graph.builder import BATCH, TOKENS
from lamella.graph.encoder_config import EncoderConfig
from lamella.graph.encoder_graph import POOLED, EncoderGraph, layer_output
from lamella.graph.fed_graph import FedGraph, Feeds
from lamella.graph.head_graph import add_head, plan_head
from lamella.graph.support import NoGraphError
from lamella.graph.tensor_files import Tensors


@dataclass(frozen=True)
class SharedHead:
    """The graph of a head and its own tensors."""

    graph: bytes  # equal for heads of one structure
    feeds: Feeds
    layers: tuple[str, ...]  # the outputs of the encoder that it reads
    highest: int  # the highest layer among them


def build_shared_head(config: EncoderConfig, spec: Mapping[str, Any], tensors: Tensors, longest: int) -> SharedHead:
    """Build the graph of a head from its options and tensors; `longest` is the number of tokens of a window."""
    plan = plan_head(spec, config.depth)
    graph = FedGraph()
    hidden = config.hidden_size
    layers = {number: graph.value(layer_output(number), [BATCH, TOKENS, hidden]) for number in sorted(plan.layers)}
    pooled = graph.value(POOLED, [BATCH, hidden]) if plan.pooled else None
    read = tuple(graph.inputs)
    try:
        logits = add_head(graph, plan, EncoderGraph(layers, pooled, []), tensors, hidden_size=hidden, longest=longest)
    except KeyError as error:  # an option; a missing tensor has its own message
        raise NoGraphError(f"the model does not record the option {error}") from None
    except ValueError as error:  # arrays whose shapes do not fit
        raise NoGraphError(f"its tensors do not fit its configuration ({error})") from None
    encoded = graph.encode({"logits": (logits, [2, BATCH, 1 if plan.at_cls else TOKENS])})
    return SharedHead(encoded, graph.feeds, read, config.depth if plan.pooled else max(plan.layers, default=0))
