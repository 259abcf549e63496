"""The layers of an encoder that a head can read. Nothing here imports torch."""

from __future__ import annotations

from typing import Literal

from lamella.config import POOLED
from lamella.errors import ConfigError

LayerChoice = Literal["encoder", "all", "pooled", "pooled+all"] | list[int]


def choose_layers(choice: LayerChoice, depth: int) -> tuple[int, ...]:
    """Return the numbers of the layers that a head can read; 0 is the output of the embeddings."""
    if choice == "encoder":
        return tuple(range(1, depth + 1))
    if choice == "all":
        return tuple(range(depth + 1))
    if choice == "pooled":
        return (POOLED,)
    if choice == "pooled+all":
        return (POOLED, *range(depth + 1))
    unknown = [layer for layer in choice if not 0 <= layer <= depth]
    if unknown or not choice or len(set(choice)) < len(choice):
        raise ConfigError("learner.layers", [f"expected different layers from 0 to {depth}, got {choice}."])
    return tuple(choice)
