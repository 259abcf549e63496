"""MPNet's attention by PyTorch's kernels on a GPU.

transformers computes it step by step in arrays of [B, N, T, T]. Its relative positions it makes for every window of a
batch alike, in some releases on the CPU, and for its mask it sends a number to the GPU: a GPU would have to wait, and a
recorded step can have neither.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder, MPNetModel, MPNetSelfAttention


def use_kernels(model: nn.Module) -> None:
    """Change the attention of a model; its weights stay where they are."""
    for module in model.modules():
        if type(module) is MPNetSelfAttention:
            module.__class__ = FastMPNetSelfAttention
        elif type(module) is MPNetEncoder:
            module.__class__ = FastMPNetEncoder
        elif type(module) is MPNetModel:
            module.__class__ = FastMPNetModel


def on_gpu(x: Tensor) -> bool:
    """Whether the kernels are to be used."""
    return x.device.type == "cuda"


def _dtype_of_products(x: Tensor) -> torch.dtype:
    """What a product with x is computed in: x's own, or what autocast makes of it."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class FastMPNetSelfAttention(MPNetSelfAttention):
    """As its parent, with a kernel; the relative positions and the mask are one bias to it."""

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
        rounded = hidden_states.to(_dtype_of_products(hidden_states))  # once: else each of the three would do it
        query, key, value = (made(rounded).view(split).transpose(1, 2) for made in (self.q, self.k, self.v))
        bias = position_bias if attention_mask is None else position_bias + attention_mask
        dropped = self.dropout.p if self.training else 0.0
        attended = scaled_dot_product_attention(query, key, value, bias.to(query.dtype), dropout_p=dropped)
        return (self.o(attended.transpose(1, 2).flatten(2)),)


class FastMPNetEncoder(MPNetEncoder):
    """As its parent; what all layers have in common, the bias, is made once for all of them, and on the GPU."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        return_dict: bool = False,
        **more: Any,
    ) -> Any:
        if not on_gpu(hidden_states) or output_attentions or output_hidden_states:
            return super().forward(
                hidden_states, attention_mask, output_attentions, output_hidden_states, return_dict, **more
            )
        bias = self._relative_positions(hidden_states)  # [1, N, T, T]
        if attention_mask is not None:
            bias = bias + attention_mask  # [B, N, T, T]
        # Rounded as the products of a layer are: else every layer would round it again. Row by row in memory: else
        # PyTorch finds no kernel for it, and computes step by step without a word.
        bias = bias.to(_dtype_of_products(hidden_states)).contiguous()
        for layer in self.layer:
            hidden_states = layer(hidden_states, None, bias)[0]
        last: Any = hidden_states
        return BaseModelOutput(last_hidden_state=last) if return_dict else (last,)

    def _relative_positions(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        apart = places[None] - places[:, None]  # [T, T]
        buckets = self.relative_position_bucket(apart)  # type: ignore[no-untyped-call]
        bias: Tensor = self.relative_attention_bias(buckets)  # [T, T, N]
        return bias.permute(2, 0, 1)[None]


class FastMPNetModel(MPNetModel):  # type: ignore[no-untyped-call]
    """As its parent; it is given the mask as the bias that it would make of it."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **more: Any) -> Any:
        if on_gpu(input_ids) and attention_mask is not None and attention_mask.ndim == 2:
            bias = torch.zeros(attention_mask.shape, device=input_ids.device)
            bias = bias.masked_fill_(attention_mask == 0, torch.finfo(torch.float32).min)
            attention_mask = bias[:, None, None]  # [B, 1, 1, T]
        return super().forward(input_ids, attention_mask, **more)
