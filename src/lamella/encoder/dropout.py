"""Dropout that does not hold up training on a CPU.

PyTorch draws the random numbers of a dropout there one by one on one thread, and attention with dropout makes arrays of
[B, heads, T, T] so large that the system hands them out anew each time. Together that is a quarter to a third of a
training step on two cores, and more of it on more. Here numpy's quickest generator draws, four numbers are cut from
each draw, and attention goes window by window, without its padding, in arrays that fit into the cache. It is the same
dropout, of other random numbers; on other devices, in half precision and without dropout everything is left to
transformers.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
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
    """Which elements stay, as 1.0 and 0.0, each with the probability 1 - p to within 1/65536.

    As numbers, for their products are several times as fast as choices by true and false. PyTorch's generator gives the
    seed, so that whatever sets or keeps that one rules this too.
    """
    count = math.prod(shape)
    seed = torch.empty((), dtype=torch.int64).random_(0, None).item()
    drawn = np.random.SFC64(int(seed)).random_raw(-(-count // 4))  # 64 bits at once
    return torch.from_numpy(drawn.view(np.int16)[:count]).view(shape).float().ge_(round(p * 65536) - 32768)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, p: float) -> Tensor:
        factors = draw_kept(x.shape, p).mul_(1 / (1 - p)).to(x.dtype)
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
    """What transformers calls for attention; all tensors are [B, N, T, D], with N heads of width D.

    Ours leaves the padding out: what a window gets there is 0, and nobody reads it.
    """
    ours = module.training and 0 < dropout < 1 and query.device.type == "cpu" and query.dtype == torch.float32
    lengths = _lengths(attention_mask, query) if ours else None
    if lengths is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended = _Attention.apply(query, key, value, lengths, scale, dropout)  # type: ignore[no-untyped-call]
    return attended.transpose(1, 2).contiguous(), None  # [B, T, N, D]


def _lengths(mask: Tensor | None, query: Tensor) -> list[int] | None:
    """How many tokens each window has; nothing where the mask, of true or of 0, hides more than padding at the end."""
    B, _, T, _ = query.shape
    if mask is None:
        return [T] * B
    seen = mask if mask.dtype == torch.bool else mask == 0  # [B, 1, 1 or T, T]
    lengths = seen[:, 0, -1].sum(-1)
    if not torch.equal(seen, (torch.arange(T) < lengths[:, None])[:, None, None].expand_as(seen)):
        return None
    found: list[int] = lengths.tolist()
    return found


class _Attention(torch.autograd.Function):
    """O = M ∘ softmax(s Q Kᵀ + mask) V / (1 - p) for each window and head, M being what dropout keeps.

    With W the softmax, K = M ∘ W what is left of it, and G = dO / (1 - p): dV = Kᵀ G, and for the scores S,
    dS = K ∘ (G Vᵀ) - W ∘ D with D = Σ_j K_j (G Vᵀ)_j, which is G · K V, the output once more: no sum over the large
    array is needed, and M itself is not kept.
    """

    @staticmethod
    def forward(
        context: Any, query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float, p: float
    ) -> Tensor:
        B, N, T, D = query.shape
        mixed = query.new_zeros(B, N, T, D)  # the output, but for the factor 1 / (1 - p)
        weights, left = [], []
        for window, length in enumerate(lengths):
            here = (window, slice(None), slice(length))  # [N, t, D]
            scores = torch.bmm(query[here] * scale, key[here].mT)  # [N, t, t]
            weights.append(scores.softmax(-1))
            left.append(draw_kept(scores.shape, p).mul_(weights[-1]))
            mixed[here] = torch.bmm(left[-1], value[here])
        context.save_for_backward(query, key, value, mixed, *weights, *left)
        context.lengths, context.scale, context.factor = lengths, scale, 1 / (1 - p)
        attended: Tensor = mixed * context.factor
        return attended

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mixed, *rest = context.saved_tensors
        gradient = gradient * context.factor
        along = (gradient * mixed).sum(-1, keepdim=True)  # [B, N, T, 1]
        of_query, of_key, of_value = (mixed.new_zeros(mixed.shape) for _ in range(3))
        weights, left = rest[: len(query)], rest[len(query) :]
        for window, length in enumerate(context.lengths):
            here = (window, slice(None), slice(length))
            of_value[here] = torch.bmm(left[window].mT, gradient[here])
            of_scores = torch.bmm(gradient[here], value[here].mT).mul_(left[window])
            of_scores.addcmul_(weights[window], along[here], value=-1)
            of_query[here] = torch.bmm(of_scores, key[here])
            of_key[here] = torch.bmm(of_scores.mT, query[here])
        return of_query.mul_(context.scale), of_key.mul_(context.scale), of_value, None, None, None


@functools.cache
def _register() -> None:
    """Make our attention known. Imported here: heads and run files are read without transformers, which takes long."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
