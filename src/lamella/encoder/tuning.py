"""What of the encoder is trained: each way is a function that edits the encoder in place before training."""

from __future__ import annotations

from torch import nn

from lamella.encoder.encoder import Encoder
from lamella.registry import register


@register("tuning", "full")
def full(encoder: Encoder) -> None:
    """Train every weight of the encoder."""
    encoder.requires_grad_(True)


@register("tuning", "frozen")
def frozen(encoder: Encoder) -> None:
    """Train nothing of the encoder; only the head learns."""
    encoder.requires_grad_(False)


def trainable_line(module: nn.Module) -> str:
    """The count of trainable parameters, in the form that users of peft know."""
    trainable = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in module.parameters())
    return f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {100 * trainable / total:.4f}"
