"""Tiny encoders whose weights are rounded to 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

Change = Callable[[dict[str, Tensor]], None]


def change_file(folder: Path, change: Change) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return folder


def round_weights(tensors: dict[str, Tensor]) -> None:
    """Round as tools that quantise do: embeddings with one step, the weights of linear layers with one per output."""
    for name, value in tensors.items():
        if value.dim() == 2:
            largest = value.abs().max() if "embeddings" in name else value.abs().amax(1, keepdim=True)
            value.copy_((value / largest * 127).round() * (largest / 127))
