"""The graph of an encoder: embeddings, transformer layers with their adapters, and the pooler.

All families with a graph have the same layer and differ in the names of its tensors:

    a = LayerNorm(x + adapters(dense(attention(x)))),  x' = LayerNorm(a + adapters(ffn(a)))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count, takewhile

import numpy as np

from lamella.graph.builder import MICROSOFT, Graph
from lamella.graph.embeddings import embed, position_bias
from lamella.graph.encoder_config import EncoderConfig
from lamella.graph.operations import TANH_GELUS, activate, linear, normalise
from lamella.graph.support import NoGraphError
from lamella.graph.tensor_files import Tensors

# Names within a layer: the LayerNorm after the attention, and the one after the feed-forward part.
NORMS = {
    "albert": ("attention.LayerNorm", "full_layer_layer_norm"),
    "distilbert": ("sa_layer_norm", "output_layer_norm"),
    "mpnet": ("attention.LayerNorm", "output.LayerNorm"),
}
BERT_NORMS = ("attention.output.LayerNorm", "output.LayerNorm")
POOLERS = {"albert": "pooler"}  # a linear layer; the others have it inside of a module
POOLED = "pooled"  # the name of the pooled output of a graph that is an encoder alone


@dataclass(frozen=True)
class EncoderGraph:
    """The values of an encoder in a graph: the requested layers by number, each [B, T, H], and the pooled output."""

    layers: dict[int, str]
    pooled: str | None  # [B, H]
    products: list[str]  # the names of its matrix products, which int8 rounds


def add_encoder(
    graph: Graph, config: EncoderConfig, tensors: Tensors, layers: Iterable[int], *, pooled: bool = False
) -> EncoderGraph:
    """Add an encoder up to the highest layer that is requested; layer 0 is the output of the embeddings."""
    requested = set(layers)
    first = len(graph.nodes)
    mask = graph.op("Cast", graph.input("attention_mask"), to=6)  # int32
    x = embed(graph, config, tensors)
    bias = position_bias(graph, config, tensors)
    values = {0: x}
    highest = config.depth if pooled else max(requested, default=0)
    for number in range(1, highest + 1):
        values[number] = x = _add_layer(graph, config, tensors, config.layer_path(number), x, mask, bias)
    output = _add_pooler(graph, config, tensors, x) if pooled else None
    products = [node.name for node in graph.nodes[first:] if node.kind == "MatMul"]
    return EncoderGraph({number: values[number] for number in requested}, output, products)


def _add_layer(
    graph: Graph, config: EncoderConfig, tensors: Tensors, path: str, x: str, mask: str, bias: str | None
) -> str:
    family = config.family
    names = {target: f"{path}.{place}" for target, place in family.projections.items()}
    attention_norm, ffn_norm = (f"{path}.{norm}" for norm in NORMS.get(config.model_type, BERT_NORMS))
    attended = linear(graph, tensors, names["attention_output"], _attend(graph, config, tensors, names, x, mask, bias))
    attended = _adapt(graph, tensors, f"{path}.{family.attention_site}", attended)
    a = normalise(graph, tensors, attention_norm, graph.op("Add", attended, x), config.layer_norm_eps)
    inner = activate(graph, config.hidden_act, linear(graph, tensors, names["ffn_input"], a))
    outer = linear(graph, tensors, names["ffn_output"], inner)
    outer = _adapt(graph, tensors, f"{path}.{family.ffn_site}", outer)
    return normalise(graph, tensors, ffn_norm, graph.op("Add", outer, a), config.layer_norm_eps)


def _attend(
    graph: Graph, config: EncoderConfig, tensors: Tensors, names: dict[str, str], x: str, mask: str, bias: str | None
) -> str:
    """Add the attention as one node, which also adds the biases of the three projections."""
    targets = [names[target] for target in ("query", "key", "value")]
    projected = [linear(graph, tensors, name, x, bias=False) for name in targets]
    biases = graph.constant(np.concatenate([tensors[f"{name}.bias"] for name in targets]), f"{targets[0]}.biases")
    size = config.hidden_size // config.num_attention_heads
    more = [] if bias is None else [bias]
    return graph.op(
        "MultiHeadAttention",
        *projected,
        biases,
        mask,
        *more,
        domain=MICROSOFT,
        num_heads=config.num_attention_heads,
        scale=float(size**-0.5),
    )


def _adapt(graph: Graph, tensors: Tensors, site: str, x: str) -> str:
    """Add the adapters behind a module, in the order in which they were trained."""
    for name in adapter_names(tensors, site):
        down = activate(graph, TANH_GELUS[0], linear(graph, tensors, f"{name}.down", x))
        x = graph.op("Add", x, linear(graph, tensors, f"{name}.up", down))
    return x


def adapter_names(tensors: Tensors, site: str) -> list[str]:
    """Return the paths of the adapters behind a module: `adapter`, `adapter_2`, …"""
    numbered = (f"{site}.adapter" if number == 1 else f"{site}.adapter_{number}" for number in count(1))
    return list(takewhile(lambda path: f"{path}.down.weight" in tensors, numbered))


def _add_pooler(graph: Graph, config: EncoderConfig, tensors: Tensors, x: str) -> str:
    if not config.family.optional_pooler:
        raise NoGraphError(f"encoders of type {config.model_type} have no pooled output")
    first = graph.op("Gather", x, graph.constant(np.array(0)), axis=1)  # [B, H]
    return graph.op("Tanh", linear(graph, tensors, pooler_path(config), first))


def pooler_path(config: EncoderConfig) -> str:
    """Return the path of the pooler's linear layer."""
    return POOLERS.get(config.model_type, "pooler.dense")


def layer_output(number: int) -> str:
    """Return the name of a layer among the outputs of a graph that is an encoder alone."""
    return f"layer_{number}"
