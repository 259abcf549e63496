"""What is asked of a reader: the output vectors, the logits they give, and what those should have been."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lamella.data.batches import Batch
from lamella.registry import register


@dataclass(frozen=True)
class Choice:
    """One choice that a task makes for every window: scores of the N candidates, the right one, which are real."""

    name: str
    scores: Tensor  # [B, N]
    target: Tensor  # [B]
    real: Tensor  # [B, N]


class Task(nn.Module):
    """Output vectors q and biases b, initialised as BERT's own output layer is: N(0, 0.02) and zero."""

    outputs: int
    at_cls = False  # whether it reads the first token alone
    choice_names: tuple[str, ...]
    headline: tuple[str, str]  # what is reported of it; the best model is the best by the second

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.empty(self.outputs, width).normal_(std=0.02))  # [O, W]
        self.b = nn.Parameter(torch.zeros(self.outputs))  # [O]

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:  # one stream, read by all outputs
            return nn.functional.linear(x[0], self.q, self.b).movedim(-1, 0)  # [O, B, T]
        return torch.einsum("obtw,ow->obt", x, self.q) + self.b[:, None, None]  # [O, B, T]

    def choices(self, logits: Tensor, batch: Batch) -> list[Choice]:
        """What was decided for every window, and what is right."""
        raise NotImplementedError


@register("task", "span")
class Span(Task):
    """Where the answer starts and ends: logit_o(t) = q_o · x_t + b_o, o in (start, end); no answer is [CLS] twice."""

    outputs = 2
    choice_names = ("start", "end")
    headline = ("exact", "f1")

    def choices(self, logits: Tensor, batch: Batch) -> list[Choice]:
        return [
            Choice("start", logits[0], batch.start, batch.mask),
            Choice("end", logits[1], batch.end, batch.mask),
        ]


@register("task", "answerability")
class Answerability(Task):
    """Whether the window holds the answer: two classes (0 yes, 1 no) read from [CLS].

    BERTVision's labels. A question is answerable by its best window.
    """

    outputs = 2
    at_cls = True
    choice_names = ("answerability",)
    headline = ("answerability_accuracy", "answerability_f1")

    def choices(self, logits: Tensor, batch: Batch) -> list[Choice]:
        scores = logits[:, :, 0].T  # [B, 2]
        return [Choice("answerability", scores, (~batch.has_answer).long(), torch.ones_like(scores, dtype=torch.bool))]
