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
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **more: Any
) -> tuple[Tensor, None]:
    """Return onnxruntime's own attention node; it exists only in a graph and cannot be computed here."""
    B, N, T, D = query.shape
    inputs = [tensor.transpose(1, 2).reshape(B, T, N * D) for tensor in (query, key, value)]
    attended = torch.onnx.ops.symbolic(
        "com.microsoft::MultiHeadAttention",
        [*inputs, None, mask.int()],
        {"num_heads": N, "scale": scaling},
        dtype=query.dtype,
        shape=(B, T, N * D),
        version=1,
    )
    return attended.reshape(B, T, N, D), None


def _mask(*arguments: Any, attention_mask: Tensor, **more: Any) -> Tensor:
    """Return the mask over tokens [B, T] that `_attend` needs, not one over pairs of tokens."""
    return attention_mask
