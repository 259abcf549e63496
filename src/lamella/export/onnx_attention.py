"""Attention as a single node of an ONNX graph, which onnxruntime computes fast."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

FUSED = "lamella_onnx"  # name under which transformers finds this attention


@functools.cache
def register_onnx_attention() -> None:
    """Make this attention known to transformers under the name `FUSED`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(FUSED, _attend)
    AttentionMaskInterface.register(FUSED, _mask)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Return onnxruntime's own attention node; it exists only in a graph and cannot be computed here."""
    B, N, T, D = query.shape
    key, value = (x.repeat_interleave(N // x.shape[1], dim=1) if x.shape[1] < N else x for x in (key, value))
    inputs = [tensor.transpose(1, 2).reshape(B, T, N * D) for tensor in (query, key, value)]
    far = [] if sliding_window is None else [_hide_distant(query, sliding_window)]
    attended = torch.onnx.ops.symbolic(
        "com.microsoft::MultiHeadAttention",
        [*inputs, None, mask.int(), *far],
        {"num_heads": N, "scale": scaling},
        dtype=query.dtype,
        shape=(B, T, N * D),
        version=1,
    )
    return attended.reshape(B, T, N, D), None


def _hide_distant(query: Tensor, beyond: int) -> Tensor:
    """Return what is added to the scores in local attention, where tokens see only those at a distance below this."""
    positions = torch.arange(query.shape[2])
    distant = (positions[:, None] - positions).abs() >= beyond
    return torch.zeros(distant.shape).masked_fill(distant, torch.finfo(torch.float32).min)[None, None]  # [1, 1, T, T]


def _mask(*arguments: Any, attention_mask: Tensor, **more: Any) -> Tensor:
    """Return the mask over tokens [B, T] that `_attend` needs, not one over pairs of tokens."""
    return attention_mask
