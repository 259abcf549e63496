"""Products with their bias and activation in one step, for half precision on a CPU.

Where products are quick, as in bf16 on processors made for it, what only reads and writes a layer's widest array once
more takes as long as its product: to apply the activation, and to put the bias where the product is added to it, which
is PyTorch's way. oneDNN does both to what it has just computed. In fp32, whose products take several times as long,
nothing is gained.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from lamella.encoder.device import has_bf16_products


def fuse_products(model: nn.Module) -> None:
    """Fuse every plain linear layer with its bias, and with the exact gelu where that follows; for answering alone."""
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


def _product(layer: nn.Linear, x: Tensor, activation: str, form: str) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, activation, [], form)
    return found


def _can_fuse(x: Tensor) -> bool:
    """The operation is one that torch.compile uses: it may be missing from a build, or the processor lack bf16."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or torch.is_grad_enabled():
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and has_bf16_products()
