"""LoRA and IA³: a few numbers learnt at a linear layer, which can be merged into its weights.

Each is a child of its layer and applied by a hook, as adapters are, so that the pretrained weights keep their names.
peft has both, and is what the tests compare with; to import it takes several times as long as to load a small encoder,
which every first answer of such a reader would have to wait for.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle


class Lora(nn.Module):
    """W x + alpha/rank · B A x. A is drawn as for a linear layer and B starts as 0: the layer starts unchanged."""

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
        return (output * self.factor).to(output.dtype)  # half precision stays so

    def merge_into(self, layer: nn.Linear) -> None:
        layer.weight.mul_(self.factor if self.inputs else self.factor[:, None])
        if layer.bias is not None and not self.inputs:
            layer.bias.mul_(self.factor)


def insert(layer: nn.Linear, learnt: Lora | Ia3) -> None:
    """Put what is to be learnt at a layer into it."""
    layer.add_module(learnt.name, learnt)
    before = isinstance(learnt, Ia3) and learnt.inputs
    learnt.hook = layer.register_forward_pre_hook(_before) if before else layer.register_forward_hook(_behind)


def learnt_at(layer: nn.Module) -> Lora | Ia3:
    """Whichever of the two was put into a layer."""
    return next(one for one in layer.children() if isinstance(one, Lora | Ia3))


def layers_with(model: nn.Module) -> dict[str, nn.Linear]:
    """The layers at which something of the kind is learnt, by their paths."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(isinstance(one, Lora | Ia3) for one in module.children())
    }


@torch.no_grad()
def merge_into(layer: nn.Linear) -> None:
    """Put what was learnt into the layer's weights, and take it out of the layer."""
    learnt = learnt_at(layer)
    learnt.merge_into(layer)
    learnt.hook.remove()
    delattr(layer, learnt.name)


def _behind(layer: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    """A hook that looks for what was learnt: in a copy of the encoder it finds that of the copy."""
    found: Tensor = learnt_at(layer)(arguments[0], output)
    return found


def _before(layer: nn.Module, arguments: Any) -> Any:
    x, *others = arguments
    return ((x * learnt_at(layer).factor).to(x.dtype), *others)
