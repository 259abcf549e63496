"""What a saved reader changes in its encoder, as `lamella.encoder.row_modules` applies it to the rows of a batch.

The tunings themselves say what there is to read: they are applied to a copy of the encoder without values, once for
each combination of options.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lamella.encoder.adapters import Adapter
from lamella.encoder.encoder import Encoder
from lamella.encoder.lora import Ia3, Lora, changed_layers, changes_of, join_factors, tensors_follow
from lamella.encoder.row_modules import RowLayerNorm, RowLinear, RowRMSNorm, RowTokenTypes
from lamella.encoder.tensors import check_tensors, trained_tensors
from lamella.encoder.tuning import tune_in_turn
from lamella.graph.support import NoGraphError
from lamella.graph.tuned_tensors import TUNINGS

Tensors = dict[str, Tensor]


def without_values(encoder: Encoder) -> Encoder:
    """Return a copy of an encoder on the device `meta`: all of its modules, but no values."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        for parameter in encoder.parameters()
    }
    memo |= {id(buffer): buffer.to("meta") for buffer in encoder.buffers()}
    return copy.deepcopy(encoder, memo)


class RowDelta:
    """Reads what readers with one tuning change; the names of its tensors are `path:name`."""

    def __init__(self, tuning: Mapping[str, Any], outline: Encoder) -> None:
        """Apply a tuning to a copy of `outline`, which has no values."""
        if tuning["name"] not in TUNINGS:
            raise NoGraphError(f"the tuning {tuning['name']} is not one that readers on a shared encoder can have")
        self.tuning = tuning
        tuned = copy.deepcopy(outline)
        with torch.device("meta"), tensors_follow():
            tune_in_turn(tuned, [tuning])
        self._expected = trained_tensors(tuned.model)
        self._changed = changed_layers(tuned.model)
        adapters = [path for path, module in tuned.model.named_modules() if isinstance(module, Adapter)]
        parts = [f"{path}.{change.name}" for path, layer in self._changed.items() for change in changes_of(layer)]
        self._adapters = {name: path for path in adapters for name in self._expected if name.startswith(f"{path}.")}
        self._replaced = [
            name
            for name in self._expected
            if name not in self._adapters and not name.startswith(tuple(f"{part}." for part in parts))
        ]

    def read(self, tensors: Tensors, model: nn.Module, own: Mapping[str, Tensor], where: str) -> Tensors:
        """Return what a reader changes, from its tensors by name; `own` are the vectors of the encoder itself."""
        check_tensors(self._expected, tensors, where)
        tensors = {name: tensor.float() for name, tensor in tensors.items()}
        changes: Tensors = {}
        for path, layer in self._changed.items():
            changes |= {f"{path}:{name}": tensor for name, tensor in _linear_changes(path, layer, tensors).items()}
        for name, path in self._adapters.items():
            changes[f"{path}:{name.removeprefix(f'{path}.')}"] = tensors[name]
        for name in self._replaced:
            path, _, kind = name.rpartition(".")
            module = model.get_submodule(path)
            if isinstance(module, RowLinear) and kind == "bias":
                changes[f"{path}:{kind}"] = tensors[name] - own[name]
            elif isinstance(module, RowLayerNorm | RowRMSNorm | RowTokenTypes):
                changes[f"{path}:{kind}"] = tensors[name]
            else:
                what = f"whole weight matrices, such as {name}" if tensors[name].dim() > 1 else name
                raise NoGraphError(f"its tuning {self.tuning['name']} changes {what}")
        return changes


def _linear_changes(path: str, layer: nn.Linear, tensors: Tensors) -> Tensors:
    """Return the changes of one linear layer; changes of its parts are joined."""
    factors: list[tuple[Tensor, Tensor]] = []
    joined: Tensors = {}
    for change in changes_of(layer):
        own = {part: tensors[f"{path}.{change.name}.{part}"] for part in trained_tensors(change)}
        begin, end = (0, layer.out_features) if change.part is None else change.part[1:]
        if isinstance(change, Ia3):
            if change.inputs:
                joined["inputs"] = own["factor"]
            else:
                outputs = joined.setdefault("outputs", torch.ones(layer.out_features))
                outputs[begin:end] = own["factor"]
        else:
            factors.append(_low_rank(change, own, layer.out_features, begin, end))
    if factors:
        joined["A"] = torch.cat([a for a, _ in factors])
        joined["B"] = torch.cat([b for _, b in factors], dim=1)
    return joined


def _low_rank(change: Lora, own: Tensors, outputs: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """Return A and B of LoRA for all outputs of a layer; B includes the scale."""
    if change.m is not None:
        raise NoGraphError("DoRA rescales whole weight matrices")
    a, b = join_factors(**own)
    padded = b.new_zeros(outputs, b.shape[1])
    padded[begin:end] = change.scale * b
    return a, padded
