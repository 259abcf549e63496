"""A mixer whose convolution filters are made from the text that they are applied to."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, pad, relu

from lamella.encoder.encoder import HiddenStates
from lamella.errors import ConfigError
from lamella.heads.head import Stage, StageShape
from lamella.registry import register

Size = Annotated[int, Field(ge=1)]

_SPREAD = 8  # tokens over which every feature map is first smoothed by its maximum


@register("mixer", "context_cnn")
class ContextCNN(Stage):
    """Context-aware convolution: every window's own filters F, made from its text (Hulburd, after Shen et al.).

    x_t = Σ_k h_{t+k} · F_k for `filters` F of every output, from the feature maps relu(conv(h)) over `kernel` tokens:

    - `context = "segments"`: the maps are the filters, without a context vector. F_k is their maximum over the k-th
      segment of the window, and a bias. Segments are `segment` long, one begins every `step` tokens, at fixed places:
      [0, 100), [50, 150), … as far as they fit into the longest window. A segment without tokens gives F_k = 0.
    - `context = "vector"`: F = V z + b, where the context vector z is the maximum of `maps` maps over all tokens; F is
      as long as `kernel`.
    - `context = "none"`: one learned F for all windows, of the shape that `segments` has: what the text's own filters
      are to be compared with.

    `filters_from = "question"` makes the filters from the tokens outside the context alone: an idea of the paper, which
    did not try it.

    As a first stage it reads the last of the chosen layers, as the paper does. Every token is first narrowed to `size`
    numbers, which is ours and affordable. `size = 0` leaves it as it is and, with segments, is the network of the code
    that the paper built on: 11,802,630 parameters on BERT-base. As there, each map takes its maximum over 8 tokens
    before the segments; there is no dropout. The sizes of the form with a context vector are unknown: these are ours.
    """

    @staticmethod
    def reads(layers: tuple[int, ...]) -> tuple[int, ...]:
        return layers[-1:]

    def __init__(
        self,
        shape: StageShape,
        *,
        filters: Size = 2,
        context: Literal["segments", "vector", "none"] = "segments",
        filters_from: Literal["all", "question"] = "all",
        size: Annotated[int, Field(ge=0)] = 64,
        kernel: Size = 5,
        maps: Size = 100,
        segment: Size = 100,
        step: Size = 50,
    ) -> None:
        super().__init__()
        if context == "none" and filters_from == "question":
            raise ConfigError("learner.mixer", ['context_cnn: context = "none" makes no filters from the question.'])
        width = shape.channels * shape.width
        self.narrow = nn.Linear(width, size) if size else nn.Identity()
        self.context, self.filters_from = context, filters_from
        self.segment, self.step = segment, step
        self.length = kernel if context == "vector" else max(0, shape.longest - segment) // step + 1
        self.width, self.outputs, self.count = size or width, shape.outputs, shape.outputs * filters
        if context == "none":
            deviation = (self.length * self.width) ** -0.5
            self.bank = nn.Parameter(torch.empty(self.length, self.width, self.count).normal_(std=deviation))
        else:
            channels = maps if context == "vector" else self.count * self.width
            self.conv = nn.Conv1d(self.width, channels, kernel)
        if context == "segments":
            self.bias = nn.Parameter(nn.init.trunc_normal_(torch.empty(self.count * self.width)))
        if context == "vector":
            self.spell_out = nn.Linear(maps, self.length * self.width * self.count)
        self.out_shape = replace(shape, streams=shape.outputs, channels=1, width=filters)

    def forward(self, x: Tensor, hidden: HiddenStates, q: Tensor) -> Tensor:
        S, C, B, T, W = x.shape
        real = hidden.mask.repeat(S, 1)  # [S·B, T]
        text = self.narrow(x.permute(0, 2, 3, 1, 4).reshape(S * B, T, C * W)).masked_fill(~real[..., None], 0)
        source = real & ~hidden.is_context.repeat(S, 1) if self.filters_from == "question" else real
        found = self._convolve(text, self._make_filters(text, source))  # [S·B, T, n]
        found = found.reshape(S, B, T, self.outputs, -1)
        own = [found[output if S > 1 else 0, :, :, output] for output in range(self.outputs)]
        return torch.stack(own)[:, None]  # [O, 1, B, T, filters]

    def _make_filters(self, text: Tensor, source: Tensor) -> Tensor:
        """The filters of every window, [S·B or 1, length, width, n], from its tokens in `source[S·B, T]`."""
        if self.context == "none":
            return self.bank[None]
        hide = ~source[:, None]  # [S·B, 1, T]
        found = text.mT.masked_fill(hide, 0)  # [S·B, width, T]
        found = relu(self.conv(pad(found, _edges(self.conv.kernel_size[0])))).masked_fill(hide, 0)
        if self.context == "vector":
            spelled: Tensor = self.spell_out(found.amax(2))
            return spelled.reshape(-1, self.length, self.width, self.count)
        found = _max_pool(pad(found, _edges(_SPREAD)), _SPREAD, 1).masked_fill(hide, 0)
        empty = self._pool_segments((~hide).to(found.dtype)) == 0  # [S·B, 1, length]
        found = (self._pool_segments(found) + self.bias[:, None]).masked_fill(empty, 0)  # [S·B, n · width, length]
        return found.reshape(-1, self.count, self.width, self.length).permute(0, 3, 2, 1)

    def _pool_segments(self, found: Tensor) -> Tensor:
        """The maximum over every segment, whatever T is: nothing of `found[S·B, …, T]` is below 0, nor are the pads."""
        end = (self.length - 1) * self.step + self.segment
        return _max_pool(pad(found, (0, end))[..., :end], self.segment, self.step)

    def _convolve(self, text: Tensor, filters: Tensor) -> Tensor:
        """Every window with its own filters: one product for all of a filter's places, then each is shifted and added.

        A convolution with one group for each window would be the same, but cannot be exported with a free batch size.
        """
        T = text.shape[1]
        products = text @ filters.transpose(1, 2).flatten(2)  # [S·B, T, length · n]
        products = products.reshape(-1, T, self.length, self.count)
        products = pad(products, (0, 0, 0, 0, *_edges(self.length)))
        shifted = [products[:, place : place + T, place] for place in range(self.length)]
        return torch.stack(shifted).sum(0)  # [S·B, T, n]


def _edges(length: int) -> tuple[int, int]:
    """How many zeros go before and behind, for a window of `length` to give as many places as it is given."""
    return (length - 1) // 2, length // 2


def _max_pool(found: Tensor, size: int, step: int) -> Tensor:
    """The maximum over windows of `found[…, T]`. In two dimensions: in one, torch cannot export a free length."""
    return max_pool2d(found[:, :, None], (1, size), (1, step))[:, :, 0]
