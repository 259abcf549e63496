"""MPNet's attention by PyTorch's kernels on a GPU; transformers computes it step by step, in arrays of [B, N, T, T]."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.mpnet.modeling_mpnet import MPNetSelfAttention


def use_kernels(model: nn.Module) -> None:
    """Change the attention of a model; its weights stay where they are."""
    for module in model.modules():
        if type(module) is MPNetSelfAttention:
            module.__class__ = FastMPNetSelfAttention


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
        if hidden_states.device.type != "cuda" or output_attentions or position_bias is None:
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
