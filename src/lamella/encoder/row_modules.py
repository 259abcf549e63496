"""Modules of an encoder whose changes differ from row to row of a batch: each row has the changes of its own reader.

The linear layers, norms and token types of an encoder are replaced once, and behind every place of an adapter is a
hook. They look up what the current batch changes at their path; where it changes nothing, they compute what they did
before. The changes of a batch are [B, …], or [1, …] if all rows have the same:

    linear layer   A [R, I] and B [O, R] of LoRA, B with its scale; factors of IA³ for `inputs` [I] or `outputs` [O];
                   `bias` [O], a difference from the layer's own
    norm           `weight` and `bias` [H], instead of its own
    token types    `weight` [2, H], instead of its own
    adapter        `down.weight` [S, H], `down.bias` [S], `up.weight` [H, S], `up.bias` [H]

R and S may be larger than those of a reader: its factors are padded with zeros, which change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, gelu, layer_norm, linear

from lamella.encoder.adapters import NAME as ADAPTER
from lamella.encoder.encoder import Encoder
from lamella.encoder.fused_linear import FusedLinear

Changes = Mapping[str, Mapping[str, Tensor]]  # by the path of a module, then by the names above


class RowChanges:
    """What the batch that is running changes; whoever runs the encoder sets it."""

    def __init__(self) -> None:
        self.current: Changes = {}


def use_row_changes(encoder: Encoder) -> RowChanges:
    """Replace the modules of an encoder in place; its weights stay the same objects."""
    changes = RowChanges()
    paths = {module: path for path, module in encoder.model.named_modules()}
    for module, path in paths.items():
        if type(module) is nn.Linear:
            module.__class__ = RowLinear
        elif type(module) is nn.LayerNorm:
            module.__class__ = RowLayerNorm
        elif type(module).__name__.endswith("RMSNorm"):
            module.__class__ = RowRMSNorm
        elif path.endswith("token_type_embeddings"):
            module.__class__ = RowTokenTypes
        else:
            continue
        place: Any = module
        place.changes, place.path = changes, path
    for layer in encoder.layer_modules:
        for site in (encoder.family.attention_site, encoder.family.ffn_site):
            module = layer.get_submodule(site)
            module.register_forward_hook(partial(_adapt, changes, f"{paths[module]}.{ADAPTER}"))
    return changes


class RowLinear(FusedLinear):
    """(W (l ⊙ x) + b + B A (l ⊙ x) + d) ⊙ m, with all but W and b from the reader of each row."""

    changes: RowChanges
    path: str

    def forward(self, x: Tensor) -> Tensor:
        own = self.changes.current.get(self.path)
        if own is None:
            return super().forward(x)
        if "inputs" in own:
            x = x * _along(own["inputs"], x)
        y = super().forward(x)
        if "A" in own:
            y = _add_product(y, _product(x, own["A"]), own["B"])
        if "bias" in own:
            y = y + _along(own["bias"], x)
        return y * _along(own["outputs"], x) if "outputs" in own else y


class RowLayerNorm(nn.LayerNorm):
    """A LayerNorm with the weight and bias of the reader of each row."""

    changes: RowChanges
    path: str

    def forward(self, x: Tensor) -> Tensor:
        own = self.changes.current.get(self.path)
        if own is None:
            return super().forward(x)
        y = layer_norm(x, self.normalized_shape, None, None, self.eps)
        weight = own["weight"][:, None] if "weight" in own else self.weight
        bias = own["bias"][:, None] if "bias" in own else self.bias
        return y * weight if bias is None else torch.addcmul(bias, y, weight)


class RowRMSNorm(nn.Module):
    """The RMSNorm of transformers, with the weight of the reader of each row."""

    changes: RowChanges
    path: str
    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        own = self.changes.current.get(self.path)
        weight = self.weight if own is None else _along(own["weight"], x)
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)


class RowTokenTypes(nn.Embedding):
    """Embeddings of token types, of the reader of each row."""

    changes: RowChanges
    path: str

    def forward(self, types: Tensor) -> Tensor:
        own = self.changes.current.get(self.path)
        if own is None:
            return super().forward(types)
        table = own["weight"]  # [B, 2, H]
        if len(table) == 1:
            return embedding(types, table[0])
        return table.gather(1, types[..., None].expand(*types.shape, table.shape[2]))


def _adapt(changes: RowChanges, path: str, site: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    """Apply the adapter of each row (a forward hook)."""
    own = changes.current.get(path)
    if own is None:
        return output
    narrow = _product(output, own["down.weight"]) + _along(own["down.bias"], output)
    return _add_product(output, gelu(narrow, approximate="tanh"), own["up.weight"]) + _along(own["up.bias"], output)


def _product(x: Tensor, matrices: Tensor) -> Tensor:
    """Multiply each row [T, I] of x with its own matrix [O, I]; a single row is that of all (DeBERTa's positions)."""
    if len(matrices) == 1:
        return linear(x, matrices[0])
    return torch.bmm(x.expand(len(matrices), -1, -1), matrices.mT)


def _add_product(y: Tensor, x: Tensor, matrices: Tensor) -> Tensor:
    """Add such a product to y, without a pass over the memory for the sum."""
    if len(matrices) == 1:
        return torch.addmm(y.flatten(0, -2), x.flatten(0, -2), matrices[0].mT).view(y.shape)
    return torch.baddbmm(y, x, matrices.mT)


def _along(vectors: Tensor, x: Tensor) -> Tensor:
    """Return a vector for each row so that it applies to all tokens of x, [B, T, H] or without tokens [B, H]."""
    return vectors[:, None] if x.dim() == 3 else vectors
