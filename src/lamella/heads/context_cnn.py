"""A mixer whose convolution filters are computed from the text that they are applied to."""

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

_SMOOTHING = 8  # tokens over whose maximum every feature map is smoothed first


_WITH_SEGMENTS = {"context": ["segments", "none"]}  # the length of the filters follows from the segments


@register(
    "mixer",
    "context_cnn",
    needs={
        "kernel": {"context": ["segments", "vector"]},
        "maps": {"context": ["vector"]},
        "segment": _WITH_SEGMENTS,
        "step": _WITH_SEGMENTS,
    },
)
class ContextCNN(Stage):
    """Context-aware convolution: filters F computed from the text of each window (Hulburd, after Shen et al.).

    x_t = Σ_k h_{t+k} · F_k for `filters` F of every output, from the feature maps relu(conv(h)) over `kernel` tokens:

    - `context = "segments"`: the maps are the filters, without a context vector. F_k is their maximum over the k-th
      segment of the window, plus a bias. Segments are `segment` tokens long and start every `step` tokens, at fixed
      positions: [0, 100), [50, 150), … as many as fit into the longest window. A segment without tokens has F_k = 0.
    - `context = "vector"`: F = V z + b, where the context vector z is the maximum of `maps` maps over all tokens; F is
      `kernel` long.
    - `context = "none"`: one learned F for all windows, of the same shape as with `segments`: the baseline for filters
      computed from the text.

    `filters_from = "question"` computes the filters from the tokens outside the context only. The paper suggests this
    and did not try it.

    As the first stage it reads the last of the selected layers, as in the paper. Every token is first projected to
    `size` numbers; this is ours and makes it affordable. `size = 0` leaves the token as it is; with segments, this is
    the network of the code that the paper built on: 11,802,630 parameters on BERT-base. As there, the maximum of each
    map over 8 tokens is taken before the segments, and there is no dropout. The sizes with a context vector are not in
    the paper: these are ours.
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
            raise ConfigError(
                "learner.mixer",
                ["context_cnn.filters_from: 'question' needs a context other than 'none'."],
            )
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
        responses = self._convolve(text, self._compute_filters(text, source))  # [S·B, T, n]
        responses = responses.reshape(S, B, T, self.outputs, -1)
        streams = [responses[output if S > 1 else 0, :, :, output] for output in range(self.outputs)]
        return torch.stack(streams)[:, None]  # [O, 1, B, T, filters]

    def _compute_filters(self, text: Tensor, source: Tensor) -> Tensor:
        """Return the filters of every window, [S·B or 1, length, width, n], from its tokens in `source[S·B, T]`."""
        if self.context == "none":
            return self.bank[None]
        ignored = ~source[:, None]  # [S·B, 1, T]
        maps = text.mT.masked_fill(ignored, 0)  # [S·B, width, T]
        maps = relu(self.conv(pad(maps, _edges(self.conv.kernel_size[0])))).masked_fill(ignored, 0)
        if self.context == "vector":
            filters: Tensor = self.spell_out(maps.amax(2))
            return filters.reshape(-1, self.length, self.width, self.count)
        maps = _max_pool(pad(maps, _edges(_SMOOTHING)), _SMOOTHING, 1).masked_fill(ignored, 0)
        empty = self._pool_segments((~ignored).to(maps.dtype)) == 0  # [S·B, 1, length]
        filters = (self._pool_segments(maps) + self.bias[:, None]).masked_fill(empty, 0)  # [S·B, n · width, length]
        return filters.reshape(-1, self.count, self.width, self.length).permute(0, 3, 2, 1)

    def _pool_segments(self, maps: Tensor) -> Tensor:
        """Return the maximum of `maps[S·B, …, T]` over every segment; no value is below 0, so zeros can fill it up."""
        end = (self.length - 1) * self.step + self.segment
        return _max_pool(pad(maps, (0, end))[..., :end], self.segment, self.step)

    def _convolve(self, text: Tensor, filters: Tensor) -> Tensor:
        """Convolve every window with its own filters: one product for all positions, then shift and add.

        A grouped convolution with one group per window is equivalent, but cannot be exported with a dynamic batch size.
        """
        T = text.shape[1]
        products = text @ filters.transpose(1, 2).flatten(2)  # [S·B, T, length · n]
        products = products.reshape(-1, T, self.length, self.count)
        products = pad(products, (0, 0, 0, 0, *_edges(self.length)))
        shifted = [products[:, position : position + T, position] for position in range(self.length)]
        return torch.stack(shifted).sum(0)  # [S·B, T, n]


def _edges(length: int) -> tuple[int, int]:
    """Return the numbers of zeros before and after a sequence that keep its length under a kernel of `length`."""
    return (length - 1) // 2, length // 2


def _max_pool(maps: Tensor, size: int, step: int) -> Tensor:
    """Return the maximum over windows of `maps[…, T]`; max_pool1d cannot be exported with a dynamic length."""
    return max_pool2d(maps[:, :, None], (1, size), (1, step))[:, :, 0]
