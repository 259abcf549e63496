"""MPNet's attention by PyTorch's kernels on a GPU.

transformers computes it step by step in arrays of [B, N, T, T], and its relative positions for every window of a batch
alike, in some releases on the CPU: a GPU would wait for them, and a recorded step cannot have them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder, MPNetSelfAttention


def use_kernels(model: nn.Module) -> None:
    """Change the attention of a model; its weights stay where they are."""
    for module in model.modules():
        if type(module) is MPNetSelfAttention:
            module.__class__ = FastMPNetSelfAttention
        elif type(module) is MPNetEncoder:
            module.__class__ = FastMPNetEncoder


def on_gpu(x: Tensor) -> bool:
    """Whether the kernels are to be used."""
    return x.device.type == "cuda"


class FastMPNetSelfAttention(MPNetSelfAttention):
    """As its parent; the relative positions and the mask are one bias to a kernel."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **more: Any,
    ) -> tuple[Tensor, ...]:
        if not on_gpu(hidden_states) or output_attentions or position_bias is None:
            found: tuple[Tensor, ...] = super().forward(  # type: ignore[no-untyped-call]
                hidden_states, attention_mask, position_bias, output_attentions, **more
            )
            return found
        split = (*hidden_states.shape[:2], self.num_attention_heads, self.attention_head_size)
        query, key, value = (made(hidden_states).view(split).transpose(1, 2) for made in (self.q, self.k, self.v))
        bias = position_bias if attention_mask is None else position_bias + attention_mask  # [B, N, T, T]
        dropped = self.dropout.p if self.training else 0.0
        attended = scaled_dot_product_attention(query, key, value, bias.to(query.dtype), dropout_p=dropped)
        return (self.o(attended.transpose(1, 2).flatten(2)),)


class FastMPNetEncoder(MPNetEncoder):
    """As its parent; the relative positions are made where they are wanted, once for all windows."""

    def compute_position_bias(self, x: Tensor, position_ids: Tensor | None = None, num_buckets: int = 32) -> Tensor:
        if not on_gpu(x) or position_ids is not None:
            found: Tensor = super().compute_position_bias(x, position_ids, num_buckets)  # type: ignore[no-untyped-call]
            return found
        places = torch.arange(x.shape[1], device=x.device)
        apart = places[None] - places[:, None]  # [T, T]
        buckets = self.relative_position_bucket(apart, num_buckets)  # type: ignore[no-untyped-call]
        bias: Tensor = self.relative_attention_bias(buckets)  # [T, T, N]
        return bias.permute(2, 0, 1)[None]  # [1, N, T, T]
