"""MPNet's attention with PyTorch's kernels.

transformers computes it step by step in arrays of [B, N, T, T], which takes a CPU up to six times as long in bf16,
and three times in fp32. It builds the same relative positions for every window of a batch, in some releases on the CPU,
and sends a number to the GPU for its mask. Both would make a GPU wait, and a CUDA graph cannot record either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder, MPNetModel, MPNetSelfAttention

from lamella.encoder.device import dtype_of_products
from lamella.encoder.fast_attention import attend_with_dropout, drops_by_window, find_lengths


def use_kernels(model: nn.Module) -> None:
    """Replace the attention of a model in place; its weights stay the same objects."""
    for module in model.modules():
        if type(module) is MPNetSelfAttention:
            module.__class__ = FastMPNetSelfAttention
        elif type(module) is MPNetEncoder:
            module.__class__ = FastMPNetEncoder
        elif type(module) is MPNetModel:
            module.__class__ = FastMPNetModel


def is_fast(x: Tensor) -> bool:
    """Return whether there is a fast attention for this device; a graph for export keeps the steps of transformers."""
    return x.device.type == "cuda" or (x.device.type == "cpu" and not torch.compiler.is_compiling())


class FastMPNetSelfAttention(MPNetSelfAttention):
    """The attention of its parent, computed by a kernel; on a CPU with dropout, window by window."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **more: Any,
    ) -> tuple[Tensor, ...]:
        if not is_fast(hidden_states) or output_attentions or position_bias is None:
            output: tuple[Tensor, ...] = super().forward(  # type: ignore[no-untyped-call]
                hidden_states, attention_mask, position_bias, output_attentions, **more
            )
            return output
        split = (*hidden_states.shape[:2], self.num_attention_heads, self.attention_head_size)
        rounded = hidden_states.to(dtype_of_products(hidden_states))  # once, instead of in each of the three
        query, key, value = (linear(rounded).view(split).transpose(1, 2) for linear in (self.q, self.k, self.v))
        dropped = self.dropout.p if self.training else 0.0
        by_window = drops_by_window(query, dropped) and len(position_bias) == 1  # else it hides padding, too
        lengths = find_lengths(attention_mask, query) if by_window else None
        if lengths is not None:
            scale = self.attention_head_size**-0.5
            attended = attend_with_dropout(query, key, value, position_bias.to(query.dtype), lengths, scale, dropped)
            return (self.o(attended.flatten(2)),)
        bias = position_bias if attention_mask is None else position_bias + attention_mask
        attended = scaled_dot_product_attention(query, key, value, bias.to(query.dtype), dropout_p=dropped)
        return (self.o(attended.transpose(1, 2).flatten(2)),)


class FastMPNetEncoder(MPNetEncoder):
    """The encoder of its parent; relative positions and mask become one bias, computed once for all layers."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        return_dict: bool = False,
        **more: Any,
    ) -> Any:
        if not is_fast(hidden_states) or output_attentions:
            return super().forward(
                hidden_states, attention_mask, output_attentions, output_hidden_states, return_dict, **more
            )
        bias = self._relative_positions(hidden_states)  # [1, N, T, T]
        first: Any = self.layer[0]
        dropped = first.attention.attn.dropout.p if self.training else 0.0
        if attention_mask is not None and not drops_by_window(bias, dropped):
            bias, attention_mask = bias + attention_mask, None  # [B, N, T, T]
        # In the type of the products, or every layer would round it again. Contiguous, or PyTorch finds no kernel for
        # it and silently computes step by step.
        bias = bias.to(dtype_of_products(hidden_states)).contiguous()
        states: list[Any] = [hidden_states]
        for layer in self.layer:
            hidden_states = layer(hidden_states, attention_mask, bias)[0]
            if output_hidden_states:
                states.append(hidden_states)
        last: Any = hidden_states
        output = BaseModelOutput(last_hidden_state=last, hidden_states=tuple(states) if output_hidden_states else None)
        return output if return_dict else output.to_tuple()

    def _relative_positions(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        distances = positions[None] - positions[:, None]  # [T, T]
        buckets = self.relative_position_bucket(distances)  # type: ignore[no-untyped-call]
        bias: Tensor = self.relative_attention_bias(buckets)  # [T, T, N]
        return bias.permute(2, 0, 1)[None]


class FastMPNetModel(MPNetModel):  # type: ignore[no-untyped-call]
    """The model of its parent; it gets the mask as the additive bias that it would build from it."""

    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **more: Any) -> Any:
        if attention_mask is not None and attention_mask.ndim == 2 and is_fast(attention_mask):
            bias = torch.zeros(attention_mask.shape, device=attention_mask.device)
            bias = bias.masked_fill_(attention_mask == 0, torch.finfo(torch.float32).min)
            attention_mask = bias[:, None, None]  # [B, 1, 1, T]
        return super().forward(input_ids, attention_mask, **more)
