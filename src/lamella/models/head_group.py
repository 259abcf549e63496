"""Heads of equal structure, which run together: each row of a batch has the tensors of its own reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from lamella.encoder.encoder import HiddenStates
from lamella.encoder.tensors import check_tensors, trained_tensors
from lamella.heads.head import Head
from lamella.models.tensor_bank import Place, TensorBank


class HeadGroup:
    """One head module for all readers whose heads have the same options; their tensors are in a bank, in fp32."""

    def __init__(self, head: Head, device: torch.device) -> None:
        self.head, self.bank = head.eval().to(device), TensorBank(device)
        self._expected = trained_tensors(head)
        self._together = True  # whether different heads run at once; otherwise, one after the other

    def add(self, tensors: dict[str, Tensor], where: str) -> Place:
        """Add the tensors of a head; those that are no floating-point numbers count training steps."""
        check_tensors(self._expected, tensors, where)
        return self.bank.add({name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()})

    def logits(self, hidden: HiddenStates, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of windows, [O, B, T], with the tensors of the head of each, [B, …], or of one for all."""
        heads = len(next(iter(tensors.values()), hidden.mask[:1]))
        with torch.autocast(hidden.mask.device.type, enabled=False):
            if heads == 1:
                return self._run(tensors, 0, hidden)
            if self._together:
                try:
                    pooled = [] if hidden.pooled is None else [hidden.pooled]
                    windows = tensors, hidden.layers, hidden.mask, hidden.is_context, pooled
                    return vmap(self._run_window, out_dims=1)(*windows)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError:  # a mixer of a plugin may do what vmap cannot, such as read a value back
                    self._together = False
            numbers = range(heads)
            return torch.cat([self._run(tensors, number, hidden[number : number + 1]) for number in numbers], dim=1)

    def _run(self, tensors: Mapping[str, Tensor], number: int, hidden: HiddenStates) -> Tensor:
        """Return the logits of all windows with one of the heads."""
        logits: Tensor = functional_call(self.head, {name: own[number] for name, own in tensors.items()}, hidden)
        return logits

    def _run_window(
        self,
        tensors: Mapping[str, Tensor],
        layers: Sequence[Tensor],
        mask: Tensor,
        is_context: Tensor,
        pooled: Sequence[Tensor],
    ) -> Tensor:
        """Return the logits of one window, [O, T]."""
        hidden = HiddenStates(
            layers=tuple(layer[None] for layer in layers),
            mask=mask[None],
            is_context=is_context[None],
            pooled=pooled[0][None] if pooled else None,
        )
        logits: Tensor = functional_call(self.head, dict(tensors), hidden)
        return logits[:, 0]
