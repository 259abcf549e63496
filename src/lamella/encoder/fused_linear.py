"""Linear layers fused with their bias and activation, for half precision on a CPU.

On processors with bf16 instructions a matrix product is so fast that one more read and write of a layer's widest array
takes as long: PyTorch needs one to apply the activation, and one to copy the bias to where the product is added. oneDNN
applies both to the product while it is in the cache. In fp32, where products take several times as long, nothing is
gained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from lamella.encoder.device import has_bf16_products


def fuse_products(model: nn.Module) -> None:
    """Fuse every plain linear layer with its bias, and with an exact gelu that follows it; for inference only."""
    from transformers.activations import GELUActivation

    for module in list(model.modules()):
        dense, activation = getattr(module, "dense", None), getattr(module, "intermediate_act_fn", None)
        if type(dense) is nn.Linear and isinstance(activation, GELUActivation) and not list(dense.children()):
            dense.__class__ = LinearGelu
            module.intermediate_act_fn = nn.Identity()
        elif type(module) is nn.Linear:
            module.__class__ = FusedLinear


class FusedLinear(nn.Linear):
    """W x + b."""

    def forward(self, x: Tensor) -> Tensor:
        return _product(self, x, "none", "") if _can_fuse(x) else super().forward(x)


class LinearGelu(nn.Linear):
    """gelu(W x + b)."""

    def forward(self, x: Tensor) -> Tensor:
        return _product(self, x, "gelu", "none") if _can_fuse(x) else gelu(super().forward(x))


def operation_counts() -> dict[Any, Callable[..., int]]:
    """Return how many floating-point operations a fused layer takes, for torch's counter, which does not know it."""

    def count(x: torch.Size, weight: torch.Size, *more: Any, **others: Any) -> int:
        return 2 * x.numel() * weight[0]

    return {torch.ops.mkldnn._linear_pointwise: count} if _exists() else {}


def _product(layer: nn.Linear, x: Tensor, activation: str, form: str) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, activation, [], form)
    return product


def _can_fuse(x: Tensor) -> bool:
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or torch.is_grad_enabled():
        return False
    return _exists() and has_bf16_products()


def _exists() -> bool:
    """Check for the operation, which torch.compile uses: a build of PyTorch may lack it."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")
