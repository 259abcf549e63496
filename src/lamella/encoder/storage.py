"""How hidden states are rounded to be stored: the number formats of the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from lamella.encoder.encoder import HiddenStates

Storage = Literal["fp32", "fp16", "bf16", "int8"]
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}
SCALE_BYTES = 4
LEVELS = 127  # of int8, on either side of zero
SMALLEST = torch.finfo(torch.float32).tiny  # a scale below it would have lost bits of its own


def round_states(hidden: HiddenStates, storage: Storage) -> HiddenStates:
    """What storing live states and reading them again makes of them."""
    pooled = hidden.pooled
    return replace(
        hidden,
        layers=tuple(decode(*encode(layer, storage)) for layer in hidden.layers),
        pooled=None if pooled is None else decode(*encode(pooled, storage)),
    )


def encode(states: Tensor, storage: Storage) -> tuple[Tensor, Tensor | None]:
    """The stored form of `[..., H]` and, of int8, the scale of each row, `[...]`.

    A value beyond what the format holds becomes the largest that it does, not infinity. An int8 row is n · scale with
    n from -127 to 127 and scale = max|x| / 127, in fp32. In fp16 the scale would cost no error (a row is divided by the
    scale that is stored) and save 0.5 % at H = 384, but could not hold that of a row whose values are all below 0.008.
    """
    states = states.float().clamp(-largest(storage), largest(storage))
    if storage != "int8":
        return states.to(TYPES[storage]), None
    scales = states.abs().amax(-1) / LEVELS
    scales = torch.where(scales < SMALLEST, 0.0, scales)
    divisors = torch.where(scales == 0, 1.0, scales)[..., None]  # 0 / 0 is no int8
    return (states / divisors).round().to(torch.int8), scales


def decode(values: Tensor, scales: Tensor | None) -> Tensor:
    """What was stored as fp32, on the device where it lies."""
    states = values.float()
    return states if scales is None else states.mul_(scales[..., None])


def largest(storage: Storage) -> float:
    """The largest value that a number format holds; of int8, what 127 · scale cannot round to infinity."""
    return 1e38 if storage == "int8" else torch.finfo(TYPES[storage]).max
