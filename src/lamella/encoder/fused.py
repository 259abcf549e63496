"""A layer's widest product and its activation in one step, for half precision on a CPU.

Where products are quick, as in bf16 on processors made for it, a step that only reads and writes the widest array of a
layer once more takes as long as its product. oneDNN applies the activation to what it has just computed. In fp32, whose
products take several times as long, nothing is gained.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu


def fuse_activations(model: nn.Module) -> None:
    """Let feed-forward layers that are followed by the exact gelu apply it themselves; for answering, not training."""
    from transformers.activations import GELUActivation

    for module in model.modules():
        dense, activation = getattr(module, "dense", None), getattr(module, "intermediate_act_fn", None)
        if type(dense) is nn.Linear and isinstance(activation, GELUActivation):
            dense.__class__ = LinearGelu
            module.intermediate_act_fn = nn.Identity()


class LinearGelu(nn.Linear):
    """gelu(W x + b)."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.bfloat16 or x.device.type != "cpu" or torch.is_grad_enabled() or not _can_fuse():
            return gelu(super().forward(x))
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "gelu", [], "none")
        return found


def _can_fuse() -> bool:
    """The operation is one that torch.compile uses: it may be missing from a build, or the processor lack bf16."""
    there = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported")
    return there and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
