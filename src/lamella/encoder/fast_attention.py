"""Attention: on a CPU window by window, on a GPU by the kernel that fits.

For a CPU, PyTorch computes it for a whole batch, padding and all. With dropout it makes arrays of [B, heads, T, T], so
large that the system hands them out anew each time; without, its kernel is made for longer texts than these. One window
at a time, without its padding, the arrays fit into the cache.

On a GPU nothing may be read back while a step goes on, and cuDNN's kernel is left out: it is planned anew for every
shape, which takes tens of milliseconds, and batches of texts have many shapes.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from lamella.encoder.dropout import draw_kept

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "lamella"  # the name under which transformers finds ours


def use_fast_attention(model: PreTrainedModel) -> None:
    """Put our attention into a model that lets it be chosen; MPNet does not, and gets a kernel on a GPU alone."""
    if model.config.model_type == "mpnet":
        from lamella.encoder.fast_mpnet import use_kernels

        use_kernels(model)
    elif model.config._attn_implementation == "sdpa":
        _register()
        model.set_attn_implementation(ATTENTION)


def suitable_kernels(device: torch.device) -> AbstractContextManager[None]:
    """PyTorch's kernels for attention without cuDNN's, on a GPU."""
    if device.type != "cuda":
        return nullcontext()
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(kernels)


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

    Ours leaves the padding out: what a window gets there is 0, and nobody reads it. Where a gradient is wanted without
    dropout, in half precision, on other devices and in an exported graph it is PyTorch's.
    """
    dropped = dropout if module.training else 0.0
    ours = 0 < dropped < 1 or (dropped == 0 and not torch.is_grad_enabled())
    ours = ours and query.device.type == "cpu" and query.dtype == torch.float32 and not torch.compiler.is_compiling()
    lengths = _lengths(attention_mask, query) if ours else None
    if lengths is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if dropped > 0:
        attended = _Attention.apply(query, key, value, lengths, scale, dropped)  # type: ignore[no-untyped-call]
        return attended.transpose(1, 2).contiguous(), None  # [B, T, N, D]
    return _attend_windows(query, key, value, lengths, scale), None


def _attend_windows(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float) -> Tensor:
    """softmax(s Q Kᵀ) V for each window and head."""
    B, N, T, D = query.shape
    attended = query.new_zeros(B, T, N, D)
    nothing = query.new_empty(1, 1, 1)
    for window, length in enumerate(lengths):
        here = (window, slice(None), slice(length))  # [N, t, D]
        scores = torch.baddbmm(nothing, query[here], key[here].mT, beta=0, alpha=scale)  # [N, t, t]
        attended[window, :length] = torch.bmm(scores.softmax(-1), value[here]).transpose(0, 1)
    return attended


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

    def mask(**options: Any) -> Tensor | None:
        """transformers' own of padding; it looks whether there is any, for which a GPU would have to be waited for."""
        padding, kind = options.get("attention_mask"), options.get("dtype")
        if padding is not None and padding.device.type != "cpu":
            options["allow_is_bidirectional_skip"] = False
        made: Tensor | None = sdpa_mask(**options)
        if made is None or made.device.type != "cpu" or kind not in (torch.bfloat16, torch.float16):
            return made
        # As PyTorch's kernel wants it; else each layer would make this of it anew, for every pair of tokens.
        seen = made[:, :, :1]  # [B, 1, 1, T]
        return torch.zeros(seen.shape, dtype=kind).masked_fill_(~seen, torch.finfo(kind).min)

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, mask)
