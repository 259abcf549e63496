"""ModernBERT's attention without masks: no padding on a CPU, and local layers that compute only what they see.

Two of three layers of ModernBERT are local: a token sees 64 tokens on either side. transformers computes them as it
does the others, with all pairs of tokens and a mask.

On a CPU, the tokens of a batch are in one row, so that no layer computes padding. Local attention goes block by block:
a block sees itself and its two neighbours. On a GPU the batch stays padded, because a CUDA graph needs the same shapes
in every step, and the number of tokens would have to be read back. Long windows use PyTorch's attention for windows of
different lengths, which knows local layers.

Queries and keys are rotated together, with fewer passes over the memory than in transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.modernbert.modeling_modernbert import ModernBertAttention

from lamella.encoder.device import HALF_TYPES, dtype_of_products
from lamella.encoder.fast_attention import ATTENTION, attend, find_bounds, has_bounded_kernel
from lamella.encoder.packing import Packing, pack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamella.data.windows.batches import Batch

LONG = 256  # tokens from which a GPU gains by skipping the masks: see docs/decisions/0037-modernbert.md


def use_blocks(model: nn.Module) -> None:
    """Replace the attention of a model in place; its weights stay the same objects."""
    for module in model.modules():
        if type(module) is ModernBertAttention:
            module.__class__ = FastModernBertAttention


@dataclass(frozen=True)
class PackedWindows:
    """Where the windows of a packed batch are, for attention on a CPU."""

    lengths: list[int]
    band: Tensor  # [reach, 3 · reach], see _make_band


@dataclass(frozen=True)
class WindowBounds:
    """Where tokens and padding begin if the windows of a padded batch are one row, for attention on a GPU."""

    bounds: Tensor  # [2B + 1]
    longest: int


def inputs_without_masks(model: PreTrainedModel, batch: Batch) -> tuple[dict[str, Any], Packing | None]:
    """Return the inputs of a model and their packing, if any; no inputs at all where masks are required or faster.

    All padding of the batch must be at the end of its windows.
    """
    config: Any = model.config
    if not _is_ours(config) or (model.training and config.attention_dropout > 0):
        return {}, None
    device, kind = batch.input_ids.device.type, dtype_of_products(next(model.parameters()))
    windows: PackedWindows | WindowBounds
    if device == "cpu":
        packing = pack(batch.mask)
        windows = PackedWindows(packing.lengths, _make_band(config.sliding_window, kind))
        inputs = {"input_ids": packing.pack(batch.input_ids), "position_ids": packing.positions}
        return {**inputs, "attention_mask": dict.fromkeys(config.layer_types, windows)}, packing
    longest = batch.input_ids.shape[1]
    width = config.hidden_size // config.num_attention_heads
    if device == "cuda" and kind in HALF_TYPES.values() and longest > LONG and has_bounded_kernel(width):
        windows = WindowBounds(find_bounds(batch.mask), longest)
        return {"input_ids": batch.input_ids, "attention_mask": dict.fromkeys(config.layer_types, windows)}, None
    return {}, None


class FastModernBertAttention(ModernBertAttention):
    """The attention of its parent, of N heads with width D."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Any = None,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if position_embeddings is None or not _is_ours(self.config):
            return super().forward(hidden_states, position_embeddings, attention_mask, **more)
        B, T = hidden_states.shape[:2]
        projected = self.Wqkv(hidden_states).view(B, T, 3, -1, self.head_dim)
        both, value = torch.split(projected, [2, 1], dim=2)  # a split has a faster backward pass than two slices
        cos, sin = (table[:, :, None, None].float() for table in position_embeddings)  # [1, T, 1, 1, D]
        both = _Rotation.apply(both, cos, sin)  # type: ignore[no-untyped-call]
        attended = self._attend(both, value, attention_mask, more)  # [B, T, N, D]
        return self.out_drop(self.Wo(attended.reshape(B, T, -1))), None

    def _attend(self, both: Tensor, value: Tensor, windows: Any, more: dict[str, Any]) -> Tensor:
        """Return the attention of queries and keys, [B, T, 2, N, D], and values, [B, T, 1, N, D]."""
        reach = None if self.sliding_window is None else self.sliding_window - 1
        if isinstance(windows, PackedWindows):
            return _attend_packed(both, value, windows, reach)
        query, key, value = *both.unbind(2), value.squeeze(2)
        if isinstance(windows, WindowBounds):
            return _attend_between(query, key, value, windows, reach)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # [B, N, T, D]
        more = {**more, "sliding_window": self.sliding_window}
        dropout = self.attention_dropout if self.training else 0.0
        return attend(self, query, key, value, windows, dropout=dropout, **more)[0]


def _is_ours(config: Any) -> bool:
    """Return whether the attention is this one: not replaced by another (for export), and not being traced."""
    return config._attn_implementation == ATTENTION and not torch.compiler.is_compiling()


def _attend_packed(both: Tensor, value: Tensor, windows: PackedWindows, reach: int | None) -> Tensor:
    """Attend window by window, and in local attention block by block, [1, tokens, N, D]."""
    attended = []
    for own, v in zip(*(torch.split(x, windows.lengths, dim=1) for x in (both, value)), strict=True):
        q, k, v = (x.transpose(1, 2) for x in (*own.unbind(2), v.squeeze(2)))  # [1, N, t, D]
        if reach is None or q.shape[2] <= reach + 1:
            attended.append(scaled_dot_product_attention(q, k, v))
        else:
            attended += _attend_blocks(q, k, v, windows.band, reach)
    return torch.cat(attended, dim=2).transpose(1, 2)


def _attend_blocks(query: Tensor, key: Tensor, value: Tensor, band: Tensor, reach: int) -> list[Tensor]:
    """Return the local attention of each block of `reach` tokens, which see the blocks before and after it."""
    T, attended = query.shape[2], []
    for begin in range(0, T, reach):
        end, first, last = min(begin + reach, T), max(begin - reach, 0), min(begin + 2 * reach, T)
        seen = slice(first, last)
        near = band[: end - begin, first - begin + reach : last - begin + reach]
        attended.append(scaled_dot_product_attention(query[:, :, begin:end], key[:, :, seen], value[:, :, seen], near))
    return attended


def _make_band(reach: int, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores of a block of `reach` tokens with itself and the blocks on either side."""
    distances = torch.arange(reach)[:, None] + reach - torch.arange(3 * reach)
    return torch.zeros(distances.shape, dtype=dtype).masked_fill_(distances.abs() > reach, -torch.inf)


def _attend_between(query: Tensor, key: Tensor, value: Tensor, windows: WindowBounds, reach: int | None) -> Tensor:
    """Attend within the bounds, [B, T, N, D]."""
    from torch.nn.attention.varlen import varlen_attn

    sides = (-1, -1) if reach is None else (reach, reach)
    q, k, v = (x.flatten(0, 1) for x in (query, key, value))  # [B · T, N, D]
    bounds, longest = windows.bounds, windows.longest
    attended: Any = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=sides)
    row: Tensor = attended
    return row.view(query.shape)


class _Rotation(torch.autograd.Function):
    """Rotate the halves (a, b) of the last dimension to (a cos - b sin, b cos + a sin), in fp32."""

    @staticmethod
    def forward(context: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        context.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = context.saved_tensors
        return _rotate(gradient, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (a, b), half = x.chunk(2, -1), sin[..., : x.shape[-1] // 2]  # both halves of a table are the same
    rotated = torch.mul(x, cos)
    first, second = rotated.chunk(2, -1)
    first.addcmul_(b, half, value=-1)
    second.addcmul_(a, half)
    return rotated.to(x.dtype)
