"""Tasks: the output vectors, their logits, and the targets that the logits are trained on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lamella.data.windows.batches import Batch
from lamella.registry import register


@dataclass(frozen=True)
class Choice:
    """A choice that a task makes for every window: the scores of N candidates, the target, and which are real."""

    name: str
    scores: Tensor  # [B, N]
    target: Tensor  # [B]
    real: Tensor  # [B, N]


class Task(nn.Module):
    """Output vectors q and biases b, initialised like BERT's output layer: N(0, 0.02) and zero."""

    outputs: int
    at_cls = False  # whether the task reads only the first token
    choice_names: tuple[str, ...]
    output_names: tuple[str, ...] = ()  # of the vectors q; by default their numbers
    headline: tuple[str, str]  # metrics to report; the second selects the best checkpoint by default

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.empty(self.outputs, width).normal_(std=0.02))  # [O, W]
        self.b = nn.Parameter(torch.zeros(self.outputs))  # [O]

    @classmethod
    def names_of_outputs(cls) -> tuple[str, ...]:
        """Return a name for each vector q."""
        return cls.output_names or tuple(map(str, range(cls.outputs)))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:  # one stream, read by all outputs
            return nn.functional.linear(x[0], self.q, self.b).movedim(-1, 0)  # [O, B, T]
        return torch.einsum("obtw,ow->obt", x, self.q) + self.b[:, None, None]  # [O, B, T]

    def choices(self, logits: Tensor, batch: Batch) -> list[Choice]:
        """Return the choices of the task with their targets."""
        raise NotImplementedError


@register("task", "span")
class Span(Task):
    """Start and end of the answer: logit_o(t) = q_o · x_t + b_o, o in (start, end); no answer is the span on [CLS]."""

    outputs = 2
    choice_names = output_names = ("start", "end")
    headline = ("exact", "f1")

    def choices(self, logits: Tensor, batch: Batch) -> list[Choice]:
        return [
            Choice("start", logits[0], batch.start, batch.mask),
            Choice("end", logits[1], batch.end, batch.mask),
        ]


@register("task", "answerability")
class Answerability(Task):
    """Whether the window contains the answer: two classes (0 yes, 1 no), read at [CLS].

    The labels are BERTVision's. The best window of a question decides whether the question is answerable.
    """

    outputs = 2
    at_cls = True
    choice_names = ("answerability",)
    output_names = ("answer", "no answer")
    headline = ("answerability_accuracy", "answerability_f1")

    def choices(self, logits: Tensor, batch: Batch) -> list[Choice]:
        scores = logits[:, :, 0].T  # [B, 2]
        return [Choice("answerability", scores, (~batch.has_answer).long(), torch.ones_like(scores, dtype=torch.bool))]
