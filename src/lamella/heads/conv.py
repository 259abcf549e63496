"""Mixers that convolve: along the hidden axis, over the tokens, or both (BERTVision's CNNs).

The chosen layers are the channels of an image whose rows are the tokens and whose columns are the hidden units. No
convolution changes the number of tokens. What lies beyond the ends of a window counts as zero, and so do its pads: they
are put to zero before every layer that mixes tokens, so that nothing depends on how far a batch is padded.

The widths of the papers' span networks are lost, all but the percentage of the encoder's parameters that they add up
to. Ours are chosen to reach these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d, max_pool2d, pad, relu

from lamella.encoder.encoder import HiddenStates
from lamella.errors import ConfigError
from lamella.heads.head import Stage, StageShape
from lamella.registry import register

Size = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]


class _Grid(Stage):
    """Two convolutions, the second as wide as what the first leaves: x_t = relu(V · dropout(relu(K * h)_t) + b)."""

    def __init__(
        self,
        shape: StageShape,
        *,
        kernel: tuple[int, int],  # tokens, hidden units
        filters: int,
        stride: int,
        dilation: int,
        maps: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape.channels, filters, kernel, stride=(1, stride), dilation=(1, dilation))
        self.edges = (*_edges((kernel[1] - 1) * dilation), *_edges(kernel[0] - 1))
        self.dropout = nn.Dropout(dropout)
        self.read = nn.Linear(filters * (1 + (shape.width - 1) // stride), maps)
        self.out_shape = replace(shape, channels=maps, width=1)

    def forward(self, x: Tensor, hidden: HiddenStates, q: Tensor) -> Tensor:
        S, C, B, T, W = x.shape
        image = x.masked_fill(~hidden.mask[..., None], 0).transpose(1, 2).reshape(S * B, C, T, W)
        found = relu(self.conv(pad(image, self.edges)))  # [S·B, filters, T, W / stride]
        maps = relu(self.read(self.dropout(found).transpose(1, 2).flatten(2)))  # [S·B, T, maps]
        return maps.reshape(S, B, T, -1, 1).permute(0, 3, 1, 2, 4)  # [S, maps, B, T, 1]


@register("mixer", "conv_1xn")
class Conv1xN(_Grid):
    """A convolution along the hidden axis of every token, the layers as its channels (BERTVision's 1xN CNN).

    `filters` kernels of `kernel` hidden units at every `stride`-th place, relu; then `maps` kernels as wide as all that
    is left, relu: one number each for every token. Tokens are not mixed.

    The paper's widths are lost, these are ours. At BERT-large's size with 25 layers they give the share of parameters
    that the paper prints (0.099 %; 0.093 % behind a pooling); `dilation = 2, maps = 47` that of its dilated network
    (0.121 %). `dropout = 0` is its network without dropout. The stride is what makes it affordable: a single
    convolution with as many parameters would leave 155,000 numbers for every token.
    """

    def __init__(
        self,
        shape: StageShape,
        *,
        filters: Size = 64,
        kernel: Size = 13,
        stride: Size = 8,
        dilation: Size = 1,
        maps: Size = 38,
        dropout: Share = 0.1,
    ) -> None:
        super().__init__(
            shape,
            kernel=(1, kernel),
            filters=filters,
            stride=stride,
            dilation=dilation,
            maps=maps,
            dropout=dropout,
        )


@register("mixer", "conv_nxn")
class ConvNxN(_Grid):
    """A convolution over N tokens and N hidden units at once, the layers as its channels (BERTVision's NxN CNN).

    As `conv_1xn`, with a square kernel; `stride` is along the hidden axis alone, so that all tokens are kept. The paper
    used it behind pooling and `compress`, N from 1 to 7; its widths are lost, these are ours. Behind a `compress` of
    386, `maps = 227` with `skip` gives the paper's share of parameters (0.332 %).
    """

    def __init__(
        self,
        shape: StageShape,
        *,
        filters: Size = 64,
        kernel: Annotated[int, Field(ge=1, le=7)] = 5,
        stride: Size = 8,
        maps: Size = 64,
        dropout: Share = 0.1,
    ) -> None:
        super().__init__(
            shape, kernel=(kernel, kernel), filters=filters, stride=stride, dilation=1, maps=maps, dropout=dropout
        )


@register("mixer", "inception")
class Inception(Stage):
    """Convolutions over 1, 3 and 5 tokens and over the largest of 3, side by side (BERTVision's modified Inception).

    A module reads all channels of a token at once (C·W numbers) and gives 4 · `filters`: a convolution of 1 token; of 3
    and of 5 behind one that narrows to `reduce`; and of 1 over the maximum of 3 tokens. Each ends in a relu. `modules`
    stand behind one another.

    The paper's widths are lost, these are ours. Behind pooling and `compress` of 386 with `skip`, two modules with
    `filters = 532, reduce = 266` give the paper's share of parameters (1.994 %).
    """

    def __init__(self, shape: StageShape, *, filters: Size = 32, reduce: Size = 16, modules: Size = 1) -> None:
        super().__init__()
        widths = [shape.channels * shape.width, *[4 * filters] * modules]
        self.blocks = nn.ModuleList(_InceptionModule(width, filters, reduce) for width in widths[:-1])
        self.out_shape = replace(shape, channels=widths[-1], width=1)

    def forward(self, x: Tensor, hidden: HiddenStates, q: Tensor) -> Tensor:
        S, C, B, T, W = x.shape
        pads = ~hidden.mask.repeat(S, 1)[:, None]  # [S·B, 1, T]
        text = x.permute(0, 2, 1, 4, 3).reshape(S * B, C * W, T).masked_fill(pads, 0)
        for module in self.blocks:
            text = module(text, pads)  # [S·B, 4 · filters, T]
        return text.reshape(S, B, -1, T, 1).transpose(1, 2)  # [S, 4 · filters, B, T, 1]


class _InceptionModule(nn.Module):
    def __init__(self, width: int, filters: int, reduce: int) -> None:
        super().__init__()
        self.one = nn.Conv1d(width, filters, 1)
        self.to_three, self.three = nn.Conv1d(width, reduce, 1), nn.Conv1d(reduce, filters, 3, padding=1)
        self.to_five, self.five = nn.Conv1d(width, reduce, 1), nn.Conv1d(reduce, filters, 5, padding=2)
        self.pooled = nn.Conv1d(width, filters, 1)

    def forward(self, text: Tensor, pads: Tensor) -> Tensor:
        """`text[N, width, T]` is zero at the pads, and so is what comes back."""
        # A zero lies beyond each end, as where pads follow. In two dimensions: in one, torch exports no free length.
        largest = max_pool2d(pad(text, (1, 1))[:, :, None], (1, 3), stride=1)[:, :, 0]
        found = [
            self.one(text),
            self.three(relu(self.to_three(text)).masked_fill(pads, 0)),
            self.five(relu(self.to_five(text)).masked_fill(pads, 0)),
            self.pooled(largest),
        ]
        return relu(torch.cat(found, 1)).masked_fill(pads, 0)


_XCEPTION_WIDTHS = {"abbreviated": (64, 128, 256, 512), "full": (32, 64, 128, 256, 728, 1024, 1536, 2048)}
_XCEPTION_NARROWEST = 9  # hidden units that the two first convolutions need


@register("mixer", "xception")
class Xception(Stage):
    """Xception along the hidden axis of every token, the layers as its channels (BERTVision's classification CNNs).

    Two convolutions (the first takes every third place), blocks of separable convolutions with a shortcut that halve
    the width, and the mean over what is left of it: one number for each channel. No biases; a normalisation behind
    every convolution. Tokens are not mixed.

    `abbreviated` has one block; the head's `skip` makes it the paper's abbreviated + CLS. `full` is the whole network
    with its `middle` blocks. `widths` are the channels in order: for `abbreviated` two convolutions and the two of the
    block; for `full` two convolutions, three entry blocks, the exit block's second convolution and the two behind it.
    The defaults are the paper's.

    The paper's span form is lost. Ours is the same network for every token; behind pooling and `compress` of 386 with
    `skip`, `variant = "full", middle = 4, widths = [32, 64, 128, 256, 512, 728, 728, 1024]` gives the paper's share of
    parameters (1.970 %). Over all tokens of a window it costs more than the encoder; for [CLS] alone next to nothing.
    The normalisation's statistics are those of real tokens, and move by a tenth at each step: that is ours too.
    """

    def __init__(
        self,
        shape: StageShape,
        *,
        variant: Literal["abbreviated", "full"] = "abbreviated",
        middle: Annotated[int, Field(ge=0)] = 8,
        widths: Annotated[Sequence[Size], Field(min_length=1)] | None = None,
    ) -> None:
        super().__init__()
        if shape.width < _XCEPTION_NARROWEST:
            found = f"expected what it reads to be at least {_XCEPTION_NARROWEST} wide. Got {shape.width}."
            raise ConfigError("learner.mixer", [f"xception: {found}"])
        usual = _XCEPTION_WIDTHS[variant]
        widths = widths or usual
        if len(widths) != len(usual):
            found = f"expected {len(usual)} numbers for {variant!r}. Got {len(widths)}."
            raise ConfigError("learner.mixer", [f"xception.widths: {found}"])
        first, second, *rest = widths
        self.first = _Normed(nn.Conv1d(shape.channels, first, 3, stride=3, bias=False))
        self.second = _Normed(nn.Conv1d(first, second, 3, bias=False))
        if variant == "abbreviated":
            self.blocks = nn.ModuleList([_Block(second, *rest)])
            self.last = nn.ModuleList()
        else:
            *entry, leaving, last_but_one, last = rest
            inner = entry[-1]
            enter = (_Block(narrow, wide, wide) for narrow, wide in pairwise([second, *entry]))
            stay = (_Block(inner, inner, inner, inner, halve=False) for _ in range(middle))
            self.blocks = nn.ModuleList([*enter, *stay, _Block(inner, inner, leaving)])
            self.last = nn.ModuleList([_separable(leaving, last_but_one), _separable(last_but_one, last)])
        self.out_shape = replace(shape, channels=widths[-1], width=1)

    def forward(self, x: Tensor, hidden: HiddenStates, q: Tensor) -> Tensor:
        S, C, B, T, W = x.shape
        real = hidden.mask.repeat(S, 1).flatten()  # [S·B·T]
        found = x.permute(0, 2, 3, 1, 4).reshape(S * B * T, C, W)
        found = relu(self.second(relu(self.first(found, real)), real))
        for block in self.blocks:
            found = block(found, real)
        for layer in self.last:
            found = relu(layer(found, real))
        return found.mean(2).reshape(S, B, T, -1, 1).permute(0, 3, 1, 2, 4)  # [S, widths[-1], B, T, 1]


class _Block(nn.Module):
    """Separable convolutions, each behind a relu, and a shortcut; `halve` takes the mean of 3 at every second place.

    The paper's first block opens without a relu. What it reads comes from one, which a second does not change.
    """

    def __init__(self, *widths: int, halve: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_separable(narrow, wide) for narrow, wide in pairwise(widths))
        self.shortcut = _Normed(nn.Conv1d(widths[0], widths[-1], 1, stride=2, bias=False)) if halve else None

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        found = x
        for layer in self.layers:
            found = layer(relu(found), real)
        if self.shortcut is None:
            return x + found
        shortcut: Tensor = self.shortcut(x, real)
        return shortcut + avg_pool1d(found, 3, stride=2, padding=1, count_include_pad=False)


class _Normed(nn.Module):
    """A convolution of every token and the batch normalisation behind it, whose statistics are those of real tokens."""

    def __init__(self, *conv: nn.Conv1d, momentum: float = 0.1, eps: float = 1e-3) -> None:
        super().__init__()
        self.conv = nn.Sequential(*conv)
        channels = conv[-1].out_channels
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.momentum, self.eps = momentum, eps

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """`x[N, C, W]` with N tokens, of which those with `real[N]` count."""
        found: Tensor = self.conv(x)
        mean, var = self._measure(found, real) if self.training else (self.running_mean, self.running_var)
        scale = self.weight * (var + self.eps).rsqrt()
        return found * scale[:, None] + (self.bias - mean * scale)[:, None]

    def _measure(self, x: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of every channel, which also move the running ones."""
        pads = ~real[:, None, None]
        count = real.sum() * x.shape[2]
        mean = x.masked_fill(pads, 0).sum((0, 2)) / count
        var = (x - mean[:, None]).masked_fill(pads, 0).square().sum((0, 2)) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1).clamp(min=1), self.momentum)  # free of bias, as usual
        return mean, var


def _separable(narrow: int, wide: int) -> _Normed:
    """A convolution of 3 places within each channel, then one of a single place across the channels."""
    within = nn.Conv1d(narrow, narrow, 3, padding=1, groups=narrow, bias=False)
    return _Normed(within, nn.Conv1d(narrow, wide, 1, bias=False))


def _edges(total: int) -> tuple[int, int]:
    """How many zeros go before and behind, where a convolution is to keep the length."""
    return total // 2, total - total // 2
