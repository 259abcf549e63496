"""The graphs of embeddings, and MPNet's bias of the attention by distance."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lamella.encoder.families import reads_token_types
from lamella.graph.builder import TOKENS, Graph
from lamella.graph.encoder_config import EncoderConfig
from lamella.graph.operations import linear, normalise
from lamella.graph.tensor_files import Tensors

WORDS, POSITIONS, TYPES = (f"embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type"))
DISTANCES = "encoder.relative_attention_bias.weight"  # of MPNet
BUCKETS, FARTHEST = 32, 128  # of MPNet's distances
PROJECTIONS = {"albert": "encoder.embedding_hidden_mapping_in", "electra": "embeddings_project"}


def embed(graph: Graph, config: EncoderConfig, tensors: Tensors) -> str:
    """Add the embeddings: words, positions and token types, normalised; wider encoders project them."""
    words = graph.op("Gather", graph.constant(tensors[WORDS], WORDS), graph.input("input_ids"))
    table = tensors[POSITIONS]
    if TYPES in tensors and not reads_token_types(config):
        table = table + tensors[TYPES][0]  # every token has the first type
    positions = graph.constant(table, POSITIONS)
    x = graph.op("Add", words, _embed_positions(graph, config, positions))
    if reads_token_types(config):
        types = graph.constant(tensors[TYPES], TYPES)
        x = graph.op("Add", x, graph.op("Gather", types, graph.input("token_type_ids")))
    x = normalise(graph, tensors, "embeddings.LayerNorm", x, config.layer_norm_eps)
    projection = PROJECTIONS.get(config.model_type, "")
    return linear(graph, tensors, projection, x) if f"{projection}.weight" in tensors else x


def _embed_positions(graph: Graph, config: EncoderConfig, positions: str) -> str:
    """Return the embeddings of the positions; in some families, they are counted from behind the padding's number."""
    if not config.family.unused_positions:
        return graph.slice(positions, 0, graph.size(TOKENS), axis=0)  # [T, H]
    padding = 1 if config.model_type == "mpnet" else config.pad_token_id
    pad = graph.constant(np.array(padding))
    real = graph.op("Cast", graph.op("Not", graph.op("Equal", graph.input("input_ids"), pad)), to=7)  # int64
    count = graph.op("Mul", graph.op("CumSum", real, graph.constant(np.array(1))), real)
    return graph.op("Gather", positions, graph.op("Add", count, pad))  # [B, T, H]


def position_bias(graph: Graph, config: EncoderConfig, tensors: Tensors) -> str | None:
    """Add what MPNet adds to the scores of its attention, [1, N, T, T]: a number for each head and distance."""
    if config.model_type != "mpnet":
        return None
    longest = config.max_position_embeddings
    distances = np.arange(1 - longest, longest)  # of the key from the query
    table = tensors[DISTANCES][distance_buckets(distances)]  # [2 · longest - 1, N]
    tokens = graph.op("Squeeze", graph.size(TOKENS))
    places = graph.op("Range", graph.constant(np.array(0)), tokens, graph.constant(np.array(1)))  # [T]
    queries = graph.op("Unsqueeze", places, graph.constant(np.array([1])))  # [T, 1]
    chosen = graph.op("Add", graph.op("Sub", places, queries), graph.constant(np.array(longest - 1)))  # [T, T]
    bias = graph.op("Gather", graph.constant(table, DISTANCES), chosen)  # [T, T, N]
    return graph.op("Unsqueeze", graph.transpose(bias, 2, 0, 1), graph.constant(np.array([0])))


def distance_buckets(distances: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bucket of each distance: half of them for each direction, the nearer half of these exact.

    The logarithm is computed in fp32, as by transformers: a double could fall on the other side of a border.
    """
    half = BUCKETS // 2
    exact = half // 2
    away = np.abs(distances)
    share = np.log(np.maximum(away, 1).astype(np.float32) / np.float32(exact)) / np.float32(math.log(FARTHEST / exact))
    far = np.minimum(exact + (share * np.float32(half - exact)).astype(np.int64), half - 1)
    return np.where(distances > 0, half, 0) + np.where(away < exact, away, far)
