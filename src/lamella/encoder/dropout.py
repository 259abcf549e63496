"""Dropout that does not hold up training on a CPU.

PyTorch draws its random numbers there one by one on one thread: with the dropout of attention (see attention.py) that
is a quarter to a third of a training step on two cores, and more of it on more. Here numpy's quickest generator draws,
and four numbers are cut from each draw. It is the same dropout, of other random numbers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def use_fast_dropout(model: nn.Module) -> None:
    """Put our dropout into an encoder."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Dropout:
                setattr(module, name, FastDropout(child.p).train(child.training))


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
