"""DeBERTa's attention with relative positions computed once per batch, and nothing read back from a GPU.

A score is the sum of three products: query · key, query · position and position · key, where the position depends only
on the distance between the two tokens. transformers looks the position up for every pair of tokens, window and head.
Here the products with all distances are computed, and the scores are a view of them (see `_by_distance`): nothing is
looked up, and no gradient is scattered back.

transformers also keeps every hidden layer until the end, and copies numbers from the host to a GPU, which a CUDA graph
cannot record.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DebertaV2Encoder,
    DebertaV2Model,
    DisentangledSelfAttention,
)

MASKED = -3e4  # added to the scores of padding; representable in every precision


def use_distances(model: nn.Module) -> None:
    """Replace the attention of a model in place; its weights stay the same objects."""
    for module in list(model.modules()):
        if type(module) is DisentangledSelfAttention:
            module.__class__ = FastSelfAttention
            module.register_buffer("kept", None, persistent=False)
        elif type(module) is DebertaV2Model:
            module.__class__ = FastDebertaModel
        elif type(module) is DebertaV2Encoder:
            module.__class__ = FastDebertaEncoder
            if module.relative_attention:
                module.register_buffer("rows", _rows_by_distance(model.config), persistent=False)


@torch.no_grad()
def keep_positions(model: nn.Module) -> None:
    """Project the positions once for all batches, in a model for inference only: its weights must not change again.

    For a single window, projecting them takes a third of the time.
    """
    for encoder in model.modules():
        if isinstance(encoder, FastDebertaEncoder) and encoder.relative_attention:
            positions = encoder.get_rel_embedding()  # type: ignore[no-untyped-call]
            for attention in encoder.modules():
                if isinstance(attention, FastSelfAttention):
                    attention.kept = attention.project(positions)


def _rows_by_distance(config: Any) -> Tensor:
    """Return the rows of the position table for the distances P, P - 1, … 1 - P of two tokens at i and j, with i - j.

    The first list is for the position of j as query i sees it, the second for the position of i as key j sees it. They
    mirror each other, except at the ends of the table.
    """
    longest, buckets = config.max_position_embeddings, getattr(config, "position_buckets", -1)
    reach = config.max_relative_positions if config.max_relative_positions > 0 else longest
    distances = torch.arange(longest - 1, -longest - 1, -1)
    if buckets > 0:
        distances, reach = _bucket(distances, buckets // 2, reach), buckets
    return torch.stack([distances + reach, reach - distances]).clamp(0, 2 * reach - 1)  # [2, 2P]


def _bucket(distances: Tensor, near: int, reach: int) -> Tensor:
    """Return the bucket of each distance: one for each up to `near`, then logarithmic up to `reach`."""
    far = distances.abs().clamp(min=near)
    steps = torch.log(far / near) / torch.log(torch.tensor((reach - 1) / near)) * (near - 1)
    return torch.where(far > near, distances.sign() * (steps.ceil() + near).long(), distances)


class FastDebertaModel(DebertaV2Model):  # type: ignore[no-untyped-call]
    """The model of its parent; it keeps the hidden layers only if they are requested."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **more: Any,
    ) -> Any:
        tokens: Any = input_ids if inputs_embeds is None else inputs_embeds
        if attention_mask is None:
            attention_mask = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
        embedded = self.embeddings(input_ids, token_type_ids, position_ids, attention_mask, inputs_embeds)
        keep = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return self.encoder(embedded, attention_mask, output_hidden_states=keep, return_dict=return_dict is not False)


class FastDebertaEncoder(DebertaV2Encoder):
    """The encoder of its parent; all layers share the mask and the rows of the position table."""

    rows: Tensor  # [2, 2P]

    def get_attention_mask(self, attention_mask: Tensor) -> Tensor:
        """Return which tokens are padding. What padding itself attends to does not matter."""
        return attention_mask == 0  # [B, T]

    def get_rel_pos(self, hidden_states: Tensor, query_states: Any = None, relative_pos: Any = None) -> Tensor | None:
        """Return the rows of the position table for all distances in a window."""
        if not self.relative_attention:
            return None
        T, longest = hidden_states.shape[1], self.rows.shape[1] // 2
        return self.rows[:, longest - T : longest + T]  # [2, 2T]


class FastSelfAttention(DisentangledSelfAttention):
    """The attention of its parent. The N heads (of width D) come first, so that no product has to copy its input."""

    kept: Tensor | None  # [0 to 2, 1, A, N * D], see keep_positions

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        split = (*hidden_states.shape[:2], self.num_attention_heads, self.attention_head_size)
        query, key, value = (
            linear(hidden_states).view(split).permute(2, 0, 1, 3)  # [N, B, T, D]
            for linear in (self.query_proj, self.key_proj, self.value_proj)
        )
        bias = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill_(attention_mask, MASKED)[None, :, None]
        if relative_pos is not None and rel_embeddings is not None:
            tables = self.project(self.pos_dropout(rel_embeddings)) if self.kept is None else self.kept
            if "c2p" in self.pos_att_type:
                bias = bias + _by_distance(query, _look_up(relative_pos[0], tables[0]))
            if "p2c" in self.pos_att_type:
                bias = bias + _by_distance(key, _look_up(relative_pos[1], tables[-1])).mT
        attended = self._attend(query, key, value, bias)  # [N, B, T, D]
        return attended.permute(1, 2, 0, 3).flatten(2), None

    def project(self, positions: Tensor) -> Tensor:
        """Return the positions [A, N * D] as keys (for c2p) and as queries (for p2c).

        If windows differ in their projections (`lamella.encoder.row_modules`), there is a table for each of them.
        """
        projections = []
        if "c2p" in self.pos_att_type:
            projections.append(self.key_proj if self.share_att_key else self.pos_key_proj)
        if "p2c" in self.pos_att_type:
            projections.append(self.query_proj if self.share_att_key else self.pos_query_proj)
        # With a batch dimension, as for tokens: otherwise they become another kind of node in an ONNX graph, for which
        # onnxruntime's quantiser transposes the weights in place, although the tokens use them too.
        positions = positions if positions.dim() == 3 else positions[None]
        tables = [linear(positions) * self._scale for linear in projections]
        rows = max((len(table) for table in tables), default=1)
        tables = [table.expand(rows, -1, -1) for table in tables]
        return torch.stack(tables) if tables else positions[None, :0]  # [0 to 2, 1 or B, A, N * D]

    @property
    def _scale(self) -> float:
        products = 1 + ("c2p" in self.pos_att_type) + ("p2c" in self.pos_att_type)
        return 1 / math.sqrt(self.attention_head_size * products)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        dropped = self.dropout.p if self.training else 0.0
        if dropped == 0 or query.device.type != "cpu":
            return scaled_dot_product_attention(query, key, value, bias, dropout_p=dropped, scale=self._scale)
        scores = torch.matmul(query * self._scale, key.mT) + bias  # [N, B, T, T]
        return torch.matmul(self.dropout(scores.softmax(-1)), value)  # its dropout is faster than the kernel's


def _look_up(rows: Tensor, tables: Tensor) -> Tensor:
    """Return rows [2T] of a table [1, A, N * D] as [2T, N * D], or of a table for each window as [B, 2T, N * D]."""
    return embedding(rows, tables[0]) if len(tables) == 1 else tables[:, rows]


def _by_distance(x: Tensor, positions: Tensor) -> Tensor:
    """Return the products of each token a with the position of each token b: a view of those with all distances.

    The products P [T, 2T] of a token a have its distances in descending order, so the product for b is in column
    b - a + T - 1. In memory it is element a · 2T + b - a + T - 1 = T - 1 + a · (2T - 1) + b: with T - 1 elements
    skipped and rows of 2T - 1, it is in row a and column b.
    """
    N, B, T, D = x.shape
    if positions.dim() == 3:  # a table for each window
        own = positions.view(B, -1, N, D).permute(2, 0, 3, 1)  # [N, B, D, 2T]
        products = torch.matmul(x, own).view(N, B, T * 2 * T)
    else:
        heads = positions.view(-1, N, D).permute(1, 2, 0)  # [N, D, 2T]
        products = torch.bmm(x.reshape(N, B * T, D), heads).view(N, B, T * 2 * T)
    return products[..., T - 1 : -1].view(N, B, T, 2 * T - 1)[..., :T]
