"""What is asked of a reader: the output vectors, and the logits they give."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lamella.registry import register


@register("task", "span")
class Span(nn.Module):
    """Where the answer starts and ends: logit_o(t) = q_o · x_t + b_o, o in (start, end); no answer is a span on [CLS].

    Initialised as BERT's own output layer is, N(0, 0.02) and zero biases.
    """

    outputs = 2

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.empty(self.outputs, width).normal_(std=0.02))  # [O, W]
        self.b = nn.Parameter(torch.zeros(self.outputs))  # [O]

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:  # one stream, read by both outputs
            logits = nn.functional.linear(x[0], self.q, self.b).movedim(-1, 0)  # [O, B, T]
        else:
            logits = torch.einsum("obtw,ow->obt", x, self.q) + self.b[:, None, None]  # [O, B, T]
        return logits
