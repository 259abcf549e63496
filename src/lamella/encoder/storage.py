"""The number formats of the cache: how hidden states are rounded for storage."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from lamella.encoder.encoder import HiddenStates

Storage = Literal["fp32", "fp16", "bf16", "int8"]
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}
SCALE_BYTES = 4
LEVELS = 127  # of int8, on each side of zero
SMALLEST = torch.finfo(torch.float32).tiny  # a smaller scale would itself lose bits


def round_states(hidden: HiddenStates, storage: Storage) -> HiddenStates:
    """Return the states as they would be after storing and reading them."""
    pooled = hidden.pooled
    return replace(
        hidden,
        layers=tuple(decode(*encode(layer, storage)) for layer in hidden.layers),
        pooled=None if pooled is None else decode(*encode(pooled, storage)),
    )


def encode(states: Tensor, storage: Storage) -> tuple[Tensor, Tensor | None]:
    """Return the stored form of `[..., H]` and, for int8, the scale of each row, `[...]`.

    A value outside the range of the format becomes its largest value, not infinity. An int8 row is n · scale with n
    from -127 to 127 and scale = max|x| / 127, in fp32. A scale in fp16 would add no error (a row is divided by the
    stored scale) and save 0.5 % at H = 384, but underflows for a row whose values are all below 0.008.
    """
    states = states.float().clamp(-largest(storage), largest(storage))
    if storage != "int8":
        return states.to(TYPES[storage]), None
    scales = states.abs().amax(-1) / LEVELS
    scales = torch.where(scales < SMALLEST, 0.0, scales)
    divisors = torch.where(scales == 0, 1.0, scales)[..., None]  # 0 / 0 has no int8 value
    return (states / divisors).round().to(torch.int8), scales


def decode(values: Tensor, scales: Tensor | None) -> Tensor:
    """Return stored values as fp32, on the same device."""
    states = values.float()
    return states if scales is None else states.mul_(scales[..., None])


def largest(storage: Storage) -> float:
    """Return the largest value of a number format; for int8, one where 127 · scale cannot overflow."""
    return 1e38 if storage == "int8" else torch.finfo(TYPES[storage]).max
