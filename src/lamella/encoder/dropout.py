"""Dropout that does not hold up training on a CPU.

PyTorch draws the random numbers of a dropout there one by one on one thread, and attention with dropout makes arrays of
[B, heads, T, T] so large that the system hands them out anew each time. Together that is a quarter to a third of a
training step on two cores, and more of it on more. Here four numbers are cut from each draw, and attention goes window
by window, in arrays that fit into the cache. It is the same dropout, of other random numbers; on other devices, in half
precision and without dropout everything is left to transformers.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "lamella"  # the name under which transformers finds ours


def use_fast_dropout(model: PreTrainedModel) -> None:
    """Put our dropout into an encoder, and our attention where it lets attention be chosen (MPNet does not)."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Dropout:
                setattr(module, name, FastDropout(child.p).train(child.training))
    if model.config._attn_implementation == "sdpa":
        _register()
        model.set_attn_implementation(ATTENTION)


class FastDropout(nn.Dropout):
    """As its parent."""

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and 0 < self.p < 1 and x.device.type == "cpu"):
            return super().forward(x)
        return _Dropout.apply(x, self.p)  # type: ignore[no-any-return, no-untyped-call]


def draw_kept(shape: tuple[int, ...], p: float) -> Tensor:
    """Which elements stay, each with the probability 1 - p to within 1/65536."""
    count = math.prod(shape)
    bits = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)  # 64 at once
    return bits.view(torch.int16)[:count].view(shape) >= round(p * 65536) - 32768


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, p: float) -> Tensor:
        # As factors 0 and 1 / (1 - p): products of numbers are several times as fast as choices by true and false.
        factors = draw_kept(x.shape, p).to(x.dtype).mul_(1 / (1 - p))
        context.save_for_backward(factors)
        return x * factors

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (factors,) = context.saved_tensors
        return gradient * factors, None


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for attention; all tensors are [B, N, T, D], with N heads of width D."""
    ours = module.training and 0 < dropout < 1 and query.device.type == "cpu" and query.dtype == torch.float32
    if not ours:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        attention_mask = torch.zeros(attention_mask.shape).masked_fill_(~attention_mask, lowest)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    attended = _Attention.apply(query, key, value, attention_mask, scale, dropout)  # type: ignore[no-untyped-call]
    return attended.transpose(1, 2).contiguous(), None  # [B, T, N, D]


class _Attention(torch.autograd.Function):
    """O = M ∘ softmax(s Q Kᵀ + mask) V / (1 - p) for each window and head, M being what dropout keeps.

    With W the softmax, K = M ∘ W what is left of it, and G = dO / (1 - p): dV = Kᵀ G, and for the scores S,
    dS = K ∘ (G Vᵀ) - W ∘ D with D = Σ_j K_j (G Vᵀ)_j, which is G · K V, the output once more: no sum over the large
    array is needed, and M itself is not kept.
    """

    @staticmethod
    def forward(
        context: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, p: float
    ) -> Tensor:
        mixed = torch.empty_like(query)  # the output, but for the factor 1 / (1 - p)
        weights, left = [], []
        for window in range(len(query)):
            scores = torch.bmm(query[window] * scale, key[window].mT)  # [N, T, T]
            if mask is not None:
                scores += mask[window]
            weights.append(scores.softmax(-1))
            left.append(torch.where(draw_kept(scores.shape, p), weights[-1], 0.0))
            torch.bmm(left[-1], value[window], out=mixed[window])
        context.save_for_backward(query, key, value, mixed, *weights, *left)
        context.scale, context.factor = scale, 1 / (1 - p)
        attended: Tensor = mixed * context.factor
        return attended

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mixed, *rest = context.saved_tensors
        windows = len(query)
        gradient = gradient * context.factor
        along = (gradient * mixed).sum(-1, keepdim=True)  # [B, N, T, 1]
        of_query, of_key, of_value = (torch.empty_like(query) for _ in range(3))
        for window, (weights, left) in enumerate(zip(rest[:windows], rest[windows:], strict=True)):
            torch.bmm(left.mT, gradient[window], out=of_value[window])
            of_scores = torch.bmm(gradient[window], value[window].mT).mul_(left)
            of_scores.addcmul_(weights, along[window], value=-1)
            torch.bmm(of_scores, key[window], out=of_query[window])
            torch.bmm(of_scores.mT, query[window], out=of_key[window])
        return of_query.mul_(context.scale), of_key.mul_(context.scale), of_value, None, None, None


@functools.cache
def _register() -> None:
    """Make our attention known. Imported here: heads and run files are read without transformers, which takes long."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
