"""LoRA and IA³: small trained changes of linear layers that can be merged into their weights.

Like an adapter, each is a child of its layer and applied by a hook, so that the pretrained weights keep their names.
peft has both, and the tests compare with it. Importing it takes several times as long as loading a small encoder, and
would delay the first answer of every such reader.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle


class Lora(nn.Module):
    """W x + alpha/rank · B A x. A is initialised like a linear layer and B as 0: the layer starts unchanged."""

    name = "lora"
    hook: RemovableHandle

    def __init__(self, layer: nn.Linear, *, rank: int, alpha: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(rank, layer.in_features))
        self.B = nn.Parameter(torch.zeros(layer.out_features, rank))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.dropout = nn.Dropout(dropout)
        self.scale = alpha / rank

    def forward(self, x: Tensor, output: Tensor) -> Tensor:
        return output + self.scale * linear(linear(self.dropout(x), self.A), self.B)

    def merge_into(self, layer: nn.Linear) -> None:
        layer.weight.add_(self.scale * self.B @ self.A)


class Ia3(nn.Module):
    """l ⊙ (W x + b), or with `inputs` W (l ⊙ x) + b. l starts as 1: the layer starts unchanged."""

    name = "ia3"
    hook: RemovableHandle

    def __init__(self, layer: nn.Linear, *, inputs: bool) -> None:
        super().__init__()
        self.inputs = inputs
        self.factor = nn.Parameter(torch.ones(layer.in_features if inputs else layer.out_features))

    def forward(self, x: Tensor, output: Tensor) -> Tensor:
        return (output * self.factor).to(output.dtype)  # keeps half precision

    def merge_into(self, layer: nn.Linear) -> None:
        layer.weight.mul_(self.factor if self.inputs else self.factor[:, None])
        if layer.bias is not None and not self.inputs:
            layer.bias.mul_(self.factor)


def insert_change(layer: nn.Linear, change: Lora | Ia3) -> None:
    """Add LoRA or IA³ to a layer."""
    layer.add_module(change.name, change)
    scales_input = isinstance(change, Ia3) and change.inputs
    if scales_input:
        change.hook = layer.register_forward_pre_hook(_change_input)
    else:
        change.hook = layer.register_forward_hook(_change_output)


def change_of(layer: nn.Module) -> Lora | Ia3:
    """Return the LoRA or IA³ of a layer that has one."""
    return next(child for child in layer.children() if isinstance(child, Lora | Ia3))


def changed_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the layers that have LoRA or IA³, by their paths."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(isinstance(child, Lora | Ia3) for child in module.children())
    }


@torch.no_grad()
def merge_change(layer: nn.Linear) -> None:
    """Merge the LoRA or IA³ of a layer into its weights and remove it."""
    change = change_of(layer)
    change.merge_into(layer)
    change.hook.remove()
    delattr(layer, change.name)


def _change_output(layer: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    """Apply LoRA or IA³ (a forward hook). It is looked up, so that a copy of the encoder uses its own."""
    changed: Tensor = change_of(layer)(arguments[0], output)
    return changed


def _change_input(layer: nn.Module, arguments: Any) -> Any:
    x, *others = arguments
    return ((x * change_of(layer).factor).to(x.dtype), *others)
