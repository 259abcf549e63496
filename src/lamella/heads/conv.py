"""Convolutional mixers: along the hidden axis, over the tokens, or both (BERTVision's CNNs).

The selected layers are the channels of an image whose rows are the tokens and whose columns are the hidden units. No
convolution changes the number of tokens. Pads count as zero, like everything beyond the ends of a window: they are set
to zero before every layer that mixes tokens, so that the result does not depend on the padding of a batch.

The papers do not give the widths of their span networks, only their size as a share of the encoder's parameters. Our
widths are chosen to match it.
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

from lamella.encoder.dropout import FastDropout
from lamella.encoder.encoder import HiddenStates
from lamella.errors import ConfigError
from lamella.heads.head import Stage, StageShape
from lamella.registry import register

Size = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]


class _Grid(Stage):
    """Two convolutions, the second as wide as the output of the first: x_t = relu(V · dropout(relu(K * h)_t) + b)."""

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
        self.dropout = FastDropout(dropout)
        self.read = nn.Linear(filters * (1 + (shape.width - 1) // stride), maps)
        self.out_shape = replace(shape, channels=maps, width=1)

    def forward(self, x: Tensor, hidden: HiddenStates, q: Tensor) -> Tensor:
        S, C, B, T, W = x.shape
        image = x.masked_fill(~hidden.mask[..., None], 0).transpose(1, 2).reshape(S * B, C, T, W)
        features = relu(self.conv(pad(image, self.edges)))  # [S·B, filters, T, W / stride]
        maps = relu(self.read(self.dropout(features).transpose(1, 2).flatten(2)))  # [S·B, T, maps]
        return maps.reshape(S, B, T, -1, 1).permute(0, 3, 1, 2, 4)  # [S, maps, B, T, 1]


@register("mixer", "conv_1xn")
class Conv1xN(_Grid):
    """Convolution along the hidden axis of every token, with the layers as channels (BERTVision's 1xN CNN).

    `filters` kernels of `kernel` hidden units at every `stride`-th position, relu; then `maps` kernels as wide as the
    result, relu: one number each for every token. Tokens are not mixed.

    The paper does not give its widths; these are ours. On BERT-large with 25 layers they give the share of parameters
    that the paper prints (0.099 %; 0.093 % after pooling), and `dilation = 2, maps = 47` the share of its dilated
    network (0.121 %). `dropout = 0` is its network without dropout. The stride makes it affordable: a single
    convolution with as many parameters would produce 155,000 numbers for every token.
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
    """Convolution over N tokens and N hidden units, with the layers as channels (BERTVision's NxN CNN).

    Like `conv_1xn`, with a square kernel; `stride` is along the hidden axis only, so that all tokens are kept. The
    paper uses it after pooling and `compress`, with N from 1 to 7, and does not give its widths; these are ours. After
    a `compress` of 386, `maps = 227` with `skip` gives the paper's share of parameters (0.332 %).
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
    """Parallel convolutions over 1, 3 and 5 tokens and over a maximum of 3 (BERTVision's modified Inception).

    A module reads all channels of a token (C·W numbers) and returns 4 · `filters`: a convolution over 1 token; over 3
    and over 5 after a projection to `reduce`; and over 1 after the maximum of 3 tokens. Each ends in a relu. `modules`
    is the number of modules in sequence.

    The paper does not give its widths; these are ours. After pooling and `compress` of 386 with `skip`, two modules
    with `filters = 532, reduce = 266` give the paper's share of parameters (1.994 %).
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
    """Four parallel branches over the tokens."""

    def __init__(self, width: int, filters: int, reduce: int) -> None:
        super().__init__()
        self.one = nn.Conv1d(width, filters, 1)
        self.to_three, self.three = nn.Conv1d(width, reduce, 1), nn.Conv1d(reduce, filters, 3, padding=1)
        self.to_five, self.five = nn.Conv1d(width, reduce, 1), nn.Conv1d(reduce, filters, 5, padding=2)
        self.pooled = nn.Conv1d(width, filters, 1)

    def forward(self, text: Tensor, pads: Tensor) -> Tensor:
        """Return the four branches, [N, 4 · filters, T]; `text[N, width, T]` and the result are zero at the pads."""
        # A zero beyond each end, as if pads followed. max_pool1d cannot be exported with a dynamic length.
        largest = max_pool2d(pad(text, (1, 1))[:, :, None], (1, 3), stride=1)[:, :, 0]
        branches = [
            self.one(text),
            self.three(relu(self.to_three(text)).masked_fill(pads, 0)),
            self.five(relu(self.to_five(text)).masked_fill(pads, 0)),
            self.pooled(largest),
        ]
        return relu(torch.cat(branches, 1)).masked_fill(pads, 0)


_XCEPTION_WIDTHS = {"abbreviated": (64, 128, 256, 512), "full": (32, 64, 128, 256, 728, 1024, 1536, 2048)}
_XCEPTION_MIN_WIDTH = 9  # hidden units that the first two convolutions need


@register("mixer", "xception", needs={"middle": {"variant": ["full"]}})
class Xception(Stage):
    """Xception along the hidden axis of every token, with the layers as channels (BERTVision's classification CNNs).

    Two convolutions (the first with stride 3), blocks of separable convolutions with a shortcut that halve the width,
    and the mean over the remaining width: one number for each channel. No biases; a batch normalisation after every
    convolution. Tokens are not mixed.

    `abbreviated` has one block; with the head's `skip` it is the paper's abbreviated + CLS. `full` is the whole network
    with its `middle` blocks. `widths` are the channels in order: for `abbreviated` two convolutions and the two of the
    block; for `full` two convolutions, three entry blocks, the exit block's second convolution and the two after it.
    The defaults are the paper's.

    The paper does not give its span network. Ours is the same network for every token; after pooling and `compress` of
    386 with `skip`, `variant = "full", middle = 4, widths = [32, 64, 128, 256, 512, 728, 728, 1024]` gives the paper's
    share of parameters (1.970 %). Over all tokens of a window it costs more than the encoder; for [CLS] alone almost
    nothing. The statistics of the normalisation come from real tokens, with momentum 0.1: this is ours, too. So is the
    place of the means over 3 units: around the units that the shortcut reads. Keras shifts them by one unit where the
    width is even, as after the first block on BERT-large.
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
        if shape.width < _XCEPTION_MIN_WIDTH:
            problem = f"xception: expected an input at least {_XCEPTION_MIN_WIDTH} wide, got {shape.width}."
            raise ConfigError("learner.mixer", [problem])
        defaults = _XCEPTION_WIDTHS[variant]
        widths = widths or defaults
        if len(widths) != len(defaults):
            problem = f"xception.widths: expected {len(defaults)} numbers for {variant!r}, got {len(widths)}."
            raise ConfigError("learner.mixer", [problem])
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
        tokens = x.permute(0, 2, 3, 1, 4).reshape(S * B * T, C, W)
        tokens = relu(self.second(relu(self.first(tokens, real)), real))
        for block in self.blocks:
            tokens = block(tokens, real)
        for layer in self.last:
            tokens = relu(layer(tokens, real))
        return tokens.mean(2).reshape(S, B, T, -1, 1).permute(0, 3, 1, 2, 4)  # [S, widths[-1], B, T, 1]


class _Block(nn.Module):
    """Separable convolutions, each after a relu, and a shortcut; `halve` averages 3 units at every second position.

    The paper's first block starts without a relu. Its input comes from a relu, so another one changes nothing.
    """

    def __init__(self, *widths: int, halve: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_separable(narrow, wide) for narrow, wide in pairwise(widths))
        self.shortcut = _Normed(nn.Conv1d(widths[0], widths[-1], 1, stride=2, bias=False)) if halve else None

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        convolved = x
        for layer in self.layers:
            convolved = layer(relu(convolved), real)
        if self.shortcut is None:
            return x + convolved
        shortcut: Tensor = self.shortcut(x, real)
        return shortcut + avg_pool1d(convolved, 3, stride=2, padding=1, count_include_pad=False)


class _Normed(nn.Module):
    """A convolution of every token, then batch normalisation with statistics from real tokens only."""

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
        """Return the normalised convolution of `x[N, C, W]`; only the tokens in `real[N]` enter the statistics."""
        convolved: Tensor = self.conv(x)
        mean, var = self._measure(convolved, real) if self.training else (self.running_mean, self.running_var)
        scale = self.weight * (var + self.eps).rsqrt()
        return convolved * scale[:, None] + (self.bias - mean * scale)[:, None]

    def _measure(self, x: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of every channel, and update the running statistics."""
        pads = ~real[:, None, None]
        count = real.sum() * x.shape[2]
        mean = x.masked_fill(pads, 0).sum((0, 2)) / count
        var = (x - mean[:, None]).masked_fill(pads, 0).square().sum((0, 2)) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1).clamp(min=1), self.momentum)  # the unbiased variance
        return mean, var


def _separable(narrow: int, wide: int) -> _Normed:
    """Return a convolution of 3 units within each channel, then one of a single unit across the channels."""
    within = nn.Conv1d(narrow, narrow, 3, padding=1, groups=narrow, bias=False)
    return _Normed(within, nn.Conv1d(narrow, wide, 1, bias=False))


def _edges(total: int) -> tuple[int, int]:
    """Return the numbers of zeros before and after a sequence that keep its length under a convolution."""
    return total // 2, total - total // 2
