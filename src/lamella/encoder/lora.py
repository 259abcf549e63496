"""LoRA with its relatives, and IA³: small trained changes of linear layers that can be merged into their weights.

Like an adapter, each is a child of its layer and applied by a hook, so that the pretrained weights keep their names.
peft has both, and the tests compare with it. Importing it takes several times as long as loading a small encoder, and
would delay the first answer of every such reader.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle

from lamella.encoder.dropout import FastDropout
from lamella.encoder.low_rank import nearest_of_rank

_TENSORS_FOLLOW = ContextVar("_TENSORS_FOLLOW", default=False)


@dataclass(frozen=True)
class Part:
    """Some outputs of a linear layer, as if they had a layer of their own: the queries of a layer for all three."""

    layer: nn.Linear
    name: str
    begin: int
    end: int

    @property
    def weight(self) -> Tensor:
        return self.layer.weight[self.begin : self.end]

    @property
    def bias(self) -> Tensor | None:
        return None if self.layer.bias is None else self.layer.bias[self.begin : self.end]

    @property
    def in_features(self) -> int:
        return self.layer.in_features

    @property
    def out_features(self) -> int:
        return self.end - self.begin


class Lora(nn.Module):
    """W x + scale · B A x, with scale = alpha/rank. A starts like a linear layer and B as 0: W starts unchanged.

    Every relative keeps that start and stores a change of W, never a replacement: the base encoder stays as it is, and
    rounding to fp16 rounds the change only.

    `rslora`: scale = alpha/√rank. The pace of learning then does not depend on the rank.

    `dora`: (|W| + m) ⊙ V/|V| with V = W + scale · B A and the norms |·| of the rows: a change of direction and one of
    length. m, one number per output, starts as 0. As in the paper, no gradient goes through |V|.

    `pissa`: W + scale · ((B₀ + B)(A₀ + A) - B₀A₀). scale · B₀A₀ is the part of W with its largest singular values; A
    and B start as 0. The paper replaces W by W - scale · B₀A₀ and trains B₀ + B and A₀ + A: the same function, with the
    same gradients. A₀ and B₀ are stored: on another machine, the same W could give others.

    `b_learning_rate_ratio`: the learning rate of B divided by that of A (LoRA+).
    """

    name = "lora"
    part: tuple[str, int, int] | None = None  # the part of the layer that is changed, if not all of it
    hook: RemovableHandle
    A0: Tensor
    B0: Tensor

    def __init__(
        self,
        layer: nn.Linear | Part,
        *,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        rslora: bool = False,
        dora: bool = False,
        pissa: bool = False,
        b_learning_rate_ratio: float = 1.0,
    ) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(rank, layer.in_features))
        self.B = nn.Parameter(torch.zeros(layer.out_features, rank))
        self.dropout = FastDropout(dropout)
        self.scale = alpha / (math.sqrt(rank) if rslora else rank)
        self.learning_rate_ratios: Mapping[str, float] = {"B": b_learning_rate_ratio}
        self.pissa = pissa
        if pissa:
            nn.init.zeros_(self.A)
            self.register_buffer("A0", torch.zeros_like(self.A))
            self.register_buffer("B0", torch.zeros_like(self.B))
            if not _TENSORS_FOLLOW.get():
                self._start_from(layer.weight)
        else:
            nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.m = nn.Parameter(torch.zeros(layer.out_features)) if dora else None

    def forward(self, layer: nn.Linear | Part, x: Tensor, output: Tensor) -> Tensor:
        A, B = self.factors()
        inner = linear(self.dropout(x), A)  # [B, T, R]
        # Added in the product, without an array as wide as the output. Compiled code joins the two by itself; PyTorch
        # 2.11 cannot compile addmm with a rank of 19 on a GPU.
        if self.m is None and not torch.compiler.is_compiling():
            return torch.addmm(output.flatten(0, -2), inner.flatten(0, -2), self.scale * B.mT).view_as(output)
        change = self.scale * linear(inner, B)
        if self.m is None:
            return output + change
        factor = self._length_factor(layer.weight)
        # Written as a change of the output: a factor of exactly 1 changes nothing, in any precision. peft also drops
        # inputs of W x in its second term, at the cost of a second product with W; only noise in training differs.
        plain = output if layer.bias is None else output - layer.bias
        return (output + (factor - 1) * plain + factor * change).to(output.dtype)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A [R, I] and B [O, R] whose product is the change of W before scaling; R is 2 · rank for PiSSA."""
        return join_factors(self.A, self.B, *((self.A0, self.B0) if self.pissa else ()))

    def changed(self, weight: Tensor) -> Tensor:
        """Return what a weight [O, I] becomes."""
        changed = weight + self._change()
        return changed if self.m is None else self._length_factor(weight)[:, None] * changed

    def merge_into(self, layer: nn.Linear | Part) -> None:
        layer.weight.copy_(self.changed(layer.weight))

    def _change(self) -> Tensor:
        A, B = self.factors()
        return self.scale * B @ A

    def _length_factor(self, weight: Tensor) -> Tensor:
        """Return the factor of each output in DoRA: its new length divided by the length of its row in V."""
        assert self.m is not None
        with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
            length, unscaled = vector_norm(weight, dim=1), vector_norm(weight + self._change(), dim=1)
        factor: Tensor = (length + self.m) / unscaled
        return factor  # [O]

    @torch.no_grad()
    def _start_from(self, weight: Tensor) -> None:
        a, b, _ = nearest_of_rank(weight / self.scale, len(self.A))
        self.A0[: len(a)], self.B0[:, : len(a)] = a, b


def join_factors(A: Tensor, B: Tensor, A0: Tensor | None = None, B0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the factors of the change of W by LoRA, or with A₀ and B₀ by PiSSA, before scaling."""
    if A0 is None or B0 is None:
        return A, B
    # (B₀ + B)(A₀ + A) - B₀A₀ without the difference of two large products
    return torch.cat([A, A0 + A]), torch.cat([B0, B], dim=1)


@contextmanager
def tensors_follow() -> Iterator[None]:
    """Build LoRA without the decomposition that PiSSA starts from: the tensors of a saved model are set next."""
    token = _TENSORS_FOLLOW.set(True)
    try:
        yield
    finally:
        _TENSORS_FOLLOW.reset(token)


class Ia3(nn.Module):
    """l ⊙ (W x + b), or with `inputs` W (l ⊙ x) + b. l starts as 1: the layer starts unchanged."""

    name = "ia3"
    part: tuple[str, int, int] | None = None
    hook: RemovableHandle

    def __init__(self, layer: nn.Linear | Part, *, inputs: bool) -> None:
        super().__init__()
        self.inputs = inputs
        self.factor = nn.Parameter(torch.ones(layer.in_features if inputs else layer.out_features))

    def forward(self, layer: nn.Linear | Part, x: Tensor, output: Tensor) -> Tensor:
        return (output * self.factor).to(output.dtype)  # keeps half precision

    def merge_into(self, layer: nn.Linear | Part) -> None:
        layer.weight.mul_(self.factor if self.inputs else self.factor[:, None])
        if layer.bias is not None and not self.inputs:
            layer.bias.mul_(self.factor)


def insert_change(layer: nn.Linear | Part, change: Lora | Ia3) -> None:
    """Add LoRA or IA³ to a layer, or to a part of it under the name of that part."""
    if isinstance(layer, Part):
        change.name, change.part = f"{change.name}_{layer.name}", (layer.name, layer.begin, layer.end)
        layer = layer.layer
    layer.add_module(change.name, change)
    scales_input = isinstance(change, Ia3) and change.inputs
    if scales_input:
        change.hook = layer.register_forward_pre_hook(partial(_change_input, change.name))
    else:
        change.hook = layer.register_forward_hook(partial(_change_output, change.name))


def change_of(layer: nn.Module) -> Lora | Ia3:
    """Return the LoRA or IA³ of a layer that has one for all its outputs."""
    (change,) = changes_of(layer)
    return change


def changes_of(layer: nn.Module) -> list[Lora | Ia3]:
    """Return the LoRA or IA³ of a layer; there may be one for each part."""
    return [child for child in layer.children() if isinstance(child, Lora | Ia3)]


def changed_part(layer: nn.Linear, change: Lora | Ia3) -> nn.Linear | Part:
    """Return the part of a layer that LoRA or IA³ changes; for most, the whole layer."""
    return layer if change.part is None else Part(layer, *change.part)


def changed_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the layers that have LoRA or IA³, by their paths."""
    return {
        path: module for path, module in model.named_modules() if isinstance(module, nn.Linear) and changes_of(module)
    }


@torch.no_grad()
def merge_changes(layer: nn.Linear) -> None:
    """Merge the LoRA or IA³ of a layer into its weights and remove it."""
    for change in changes_of(layer):
        change.merge_into(changed_part(layer, change))
        change.hook.remove()
        delattr(layer, change.name)


def _change_output(name: str, layer: nn.Linear, arguments: Any, output: Tensor) -> Tensor:
    """Apply LoRA or IA³ (a forward hook). It is looked up by name, so that a copy of the encoder uses its own."""
    change: Any = layer.get_submodule(name)
    if change.part is None:
        changed: Tensor = change(layer, arguments[0], output)
        return changed
    part = Part(layer, *change.part)
    own = change(part, arguments[0], output[..., part.begin : part.end])
    return torch.cat([output[..., : part.begin], own, output[..., part.end :]], dim=-1)


def _change_input(name: str, layer: nn.Module, arguments: Any) -> Any:
    x, *others = arguments
    change: Any = layer.get_submodule(name)
    return ((x * change.factor).to(x.dtype), *others)
