"""Fast attention: window by window on a CPU, by a suitable kernel on a GPU.

On a CPU, PyTorch computes attention for a whole batch, including the padding. With dropout, it allocates arrays of
[B, heads, T, T], so large that they are requested from the system each time. One window at a time, without padding, the
arrays fit into the processor's cache. Without dropout and gradients, its kernel runs on one window at a time.

On a GPU, nothing may be read back during a step. In half precision, the kernel for rows of windows with different
lengths takes a padded batch as such a row, which needs no mask. Otherwise PyTorch chooses, but not cuDNN's kernel: that
is planned again for every shape, which takes tens of milliseconds, and batches of texts have many shapes.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lamella.encoder.device import HALF_TYPES, dtype_of_products
from lamella.encoder.dropout import draw_kept

ATTENTION = "lamella"  # the name of this implementation in transformers


def suitable_kernels(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that excludes cuDNN's kernel for attention on a GPU."""
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
    """Compute attention with the interface of transformers; all tensors are [B, N, T, D], with N heads of width D.

    The padding is skipped: its output is 0, and nothing reads it. The whole batch is left to PyTorch in half precision
    without dropout, for gradients without dropout, on other devices, in an exported graph and for local attention.
    """
    dropped = dropout if module.training else 0.0
    if attention_mask is not None and attention_mask.dim() == 1:
        return _attend_between(query, key, value, attention_mask, dropped, scaling), None
    ours = drops_by_window(query, dropped) or (
        dropped == 0 and not torch.is_grad_enabled() and _is_on_cpu(query) and query.dtype == torch.float32
    )
    ours = ours and more.get("sliding_window") is None
    lengths = find_lengths(attention_mask, query) if ours else None
    if lengths is not None and key.shape[1] < query.shape[1]:  # EuroBERT: several heads of queries share one of keys
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    if lengths is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if dropped > 0:
        return attend_with_dropout(query, key, value, None, lengths, scale, dropped), None
    return _attend_windows(query, key, value, lengths, scale), None


def drops_by_window(x: Tensor, dropout: float) -> bool:
    """Return whether `attend_with_dropout` should compute: on a CPU, whose kernels have no dropout."""
    return 0 < dropout < 1 and _is_on_cpu(x) and dtype_of_products(x) in (torch.float32, torch.bfloat16)


def attend_with_dropout(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, lengths: list[int], scale: float, dropout: float
) -> Tensor:
    """Attend window by window, [B, T, N, D]; `bias` [1, N, T, T] is added to the scores of every window."""
    kind = dtype_of_products(query)  # autocast does not reach the backward pass, where types may not differ
    query, key, value = (x.to(kind) for x in (query, key, value))
    attended: Tensor = _Attention.apply(query, key, value, bias, lengths, scale, dropout)  # type: ignore[no-untyped-call]
    return attended.transpose(1, 2).contiguous()


def _is_on_cpu(x: Tensor) -> bool:
    """Return whether a tensor is on a CPU, and not in a graph for export."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


@functools.cache
def has_bounded_kernel(width: int) -> bool:
    """Return whether this GPU has the kernel for windows of different lengths, with heads of this width."""
    return torch.cuda.get_device_capability() >= (8, 0) and width % 8 == 0 and width <= 256


def find_bounds(mask: Tensor) -> Tensor:
    """Return where the tokens and the padding of each window begin when all windows are one row, and where it ends.

    All padding must be at the end of its window. Windows have two parts: tokens see tokens, and padding sees padding,
    which nothing reads. So the shape, [2B + 1], does not depend on the lengths.
    """
    B, T = mask.shape
    begins = torch.arange(0, B * T, T, dtype=torch.int32, device=mask.device)
    bounds = torch.stack([begins, begins + mask.sum(1, dtype=torch.int32)], dim=1).flatten()  # [2B]
    return torch.cat([bounds, begins[-1:] + T])


def _attend_between(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, dropout: float, scaling: float | None
) -> Tensor:
    """Attend within the bounds, [B, T, N, D].

    The public function for this kernel, `varlen_attn`, has no dropout.
    """
    B, N, T, D = query.shape
    kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else value.dtype
    q, k, v = (x.transpose(1, 2).flatten(0, 1).to(kind) for x in (query, key, value))  # [B · T, N, D]
    attended: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, bounds, bounds, T, T, dropout, False, False, scale=scaling
    )[0]
    return attended.view(B, T, N, D)


def _attend_windows(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float) -> Tensor:
    """Compute softmax(s Q Kᵀ) V for each window and head."""
    B, N, T, D = query.shape
    attended = query.new_zeros(B, T, N, D)
    for window, length in enumerate(lengths):
        q, k, v = (x[window : window + 1, :, :length] for x in (query, key, value))  # [1, N, t, D]
        attended[window, :length] = scaled_dot_product_attention(q, k, v, scale=scale)[0].transpose(0, 1)
    return attended


def find_lengths(mask: Tensor | None, query: Tensor) -> list[int] | None:
    """Return the number of tokens of each window; None if the mask (True or 0: seen) hides more than end padding."""
    B, _, T, _ = query.shape
    if mask is None:
        return [T] * B
    seen = mask if mask.dtype == torch.bool else mask == 0  # [B, 1, 1 or T, T]
    lengths = seen[:, 0, -1].sum(-1)
    if not torch.equal(seen, (torch.arange(T) < lengths[:, None])[:, None, None].expand_as(seen)):
        return None
    listed: list[int] = lengths.tolist()
    return listed


class _Attention(torch.autograd.Function):
    """O = M ∘ softmax(s Q Kᵀ + bias + mask) V / (1 - p) for each window and head, where M is the dropout mask.

    Let W be the softmax, K = M ∘ W its remaining entries, and G = dO / (1 - p). Then dV = Kᵀ G, and for the scores S,
    dS = K ∘ (G Vᵀ) - W ∘ D with D = Σ_j K_j (G Vᵀ)_j. This equals G · K V, and K V is the output: no sum over the large
    array is needed, and M itself is not stored. The gradient of the bias is the sum of dS over the windows.
    """

    @staticmethod
    def forward(
        context: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        lengths: list[int],
        scale: float,
        p: float,
    ) -> Tensor:
        B, N, T, D = query.shape
        mixed = query.new_zeros(B, N, T, D)  # the output without the factor 1 / (1 - p)
        weights, remaining = [], []
        for window, length in enumerate(lengths):
            here = (window, slice(None), slice(length))  # [N, t, D]
            scores = torch.bmm((query[here] * scale).float(), key[here].mT.float())  # [N, t, t]
            if bias is not None:
                scores += bias[0, :, :length, :length]
            weights.append(scores.softmax(-1).to(query.dtype))
            remaining.append(draw_kept(scores.shape, p, query.dtype).mul_(weights[-1]))
            mixed[here] = torch.bmm(remaining[-1], value[here])
        context.save_for_backward(query, key, value, mixed, *weights, *remaining)
        context.bias_shape = bias.shape if bias is not None and context.needs_input_grad[3] else None
        context.lengths, context.scale, context.factor = lengths, scale, 1 / (1 - p)
        attended: Tensor = mixed * context.factor
        return attended

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mixed, *rest = context.saved_tensors
        gradient = gradient * context.factor
        along = (gradient * mixed).sum(-1, keepdim=True, dtype=torch.float32)  # [B, N, T, 1]
        query_grad, key_grad, value_grad = (mixed.new_zeros(mixed.shape) for _ in range(3))
        bias_grad = None if context.bias_shape is None else torch.zeros(context.bias_shape)
        weights, remaining = rest[: len(query)], rest[len(query) :]
        for window, length in enumerate(context.lengths):
            here = (window, slice(None), slice(length))
            value_grad[here] = torch.bmm(remaining[window].mT, gradient[here])
            score_grad = torch.bmm(gradient[here].float(), value[here].mT.float()).mul_(remaining[window])
            score_grad = score_grad.addcmul_(weights[window], along[here], value=-1).to(query.dtype)
            query_grad[here] = torch.bmm(score_grad, key[here])
            key_grad[here] = torch.bmm(score_grad.mT, query[here])
            if bias_grad is not None:
                bias_grad[0, :, :length, :length] += score_grad
        query_grad.mul_(context.scale)
        key_grad.mul_(context.scale)
        return query_grad, key_grad, value_grad, bias_grad, None, None, None


def _takes_bounds(options: dict[str, Any]) -> bool:
    """Return whether a mask of transformers hides nothing but padding, from a kernel that takes bounds instead."""
    config: Any = options["config"]
    kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else options["dtype"]
    plain = options.get("local_size") is None and not options.get("use_vmap")
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return plain and kind in HALF_TYPES.values() and has_bounded_kernel(width)


@functools.cache
def register_attention() -> None:
    """Register this attention. Imports transformers, which is slow, only here: heads and run files do not need it."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def mask(**options: Any) -> Tensor | None:
        """Build the padding mask of transformers, without its check for padding on a GPU, which would wait for it."""
        padding, kind = options.get("attention_mask"), options.get("dtype")
        if padding is not None and padding.device.type == "cuda" and _takes_bounds(options):
            return find_bounds(padding)
        if padding is not None and padding.device.type != "cpu":
            options["allow_is_bidirectional_skip"] = False
        built: Tensor | None = sdpa_mask(**options)
        if built is None or built.device.type != "cpu" or kind not in (torch.bfloat16, torch.float16):
            return built
        # In the form of PyTorch's kernel; otherwise each layer would convert it again, for every pair of tokens.
        same_for_all = options.get("local_size") is None  # tokens see the same tokens, except in local attention
        seen = built[:, :, :1] if same_for_all else built  # [B, 1, 1 or T, T]
        return torch.zeros(seen.shape, dtype=kind).masked_fill_(~seen, torch.finfo(kind).min)

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, mask)
