"""Training losses, computed from the choices of a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from lamella.data.windows.batches import Batch, Totals
from lamella.errors import ConfigError
from lamella.heads.tasks import Choice
from lamella.registry import register

Weight = Annotated[float, Field(ge=0)]


@register("loss", "cross_entropy")
class CrossEntropy:
    """Weighted mean of the cross-entropies of the task's choices; for a span (CE(start) + CE(end)) / 2.

    Pads are excluded from the softmax, so the loss does not depend on what else is in the batch. `start` and `end`
    weight the two choices of a span (the Korean paper's start-weighted loss: start = 2). `answerable` and
    `unanswerable` weight windows with and without the answer: by `example`, Σ w l / Σ w, or, as in that paper, by the
    `group` means, (2A + U) / 3 at answerable = 2; the weight of a single window then depends on how many windows of
    its group are in the step. `label_smoothing` spreads a share of the target over the real tokens.

    Means are over the whole optimiser step: a batch gives its share, and the shares of all batches and processes add
    up to the loss.
    """

    weighs_choices = ("start", "end")  # options that weigh the choice of that name

    def __init__(
        self,
        *,
        start: Weight = 1.0,
        end: Weight = 1.0,
        answerable: Weight = 1.0,
        unanswerable: Weight = 1.0,
        weigh_by: Literal["example", "group"] = "example",
        label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0,
    ) -> None:
        if not (start or end) or not (answerable or unanswerable):
            names = "answerable and unanswerable" if start or end else "start and end"
            raise ConfigError(
                "learner.loss", [f"{names}: expected a weight above 0 for at least one of them, got 0 for both."]
            )
        self.choice_weights = dict(zip(self.weighs_choices, (start, end), strict=True))
        self.answerable, self.unanswerable = answerable, unanswerable
        self.weigh_by, self.label_smoothing = weigh_by, label_smoothing

    def __call__(
        self, choices: Sequence[Choice], batch: Batch, totals: Totals | None = None, belief: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the loss as `loss`, and the mean of every choice under its name.

        Without `totals` the batch is the whole step. `belief` [B] scales the loss of each window by the confidence in
        its labels; other windows do not gain weight.
        """
        totals = totals or Totals.of([batch])
        errors = {choice.name: self._errors(choice) for choice in choices}  # each [B]
        weights = {name: self.choice_weights.get(name, 1.0) for name in errors}
        total = sum(weights[name] * error for name, error in errors.items()) / sum(weights.values())
        if belief is not None:
            total = belief * total
        loss = (self._window_weights(batch.has_answer, totals) * total).sum()
        return {"loss": loss, **{name: error.detach().sum() / totals.windows for name, error in errors.items()}}

    def _errors(self, choice: Choice) -> Tensor:
        log_p = choice.scores.float().masked_fill(~choice.real, float("-inf")).log_softmax(1)
        error = -log_p.gather(1, choice.target[:, None])[:, 0]
        if self.label_smoothing:
            uniform = -log_p.masked_fill(~choice.real, 0).sum(1) / choice.real.sum(1)
            error = (1 - self.label_smoothing) * error + self.label_smoothing * uniform
        return error

    def _window_weights(self, has_answer: Tensor, totals: Totals) -> Tensor:
        """Return the weight of every window, [B]: over a whole step they sum to 1, or to 0 if all weights are 0."""
        weights = (self.answerable, self.unanswerable)
        counts = totals.windows_with_and_without_answer(has_answer.device)
        if self.weigh_by == "example":
            whole = weights[0] * counts[0] + weights[1] * counts[1]
            per_window = [weight / _nonzero(whole) for weight in weights]
        else:
            whole = weights[0] * (counts[0] > 0) + weights[1] * (counts[1] > 0)  # of groups in this step
            per_window = [
                weight / _nonzero(whole) / count.clamp(min=1) for weight, count in zip(weights, counts, strict=True)
            ]
        answerable, unanswerable = per_window
        return torch.where(has_answer, answerable, unanswerable)


def _nonzero(total: Tensor) -> Tensor:
    """Return the total, or 1 if it is 0: as a tensor, because a recorded step is replayed with other totals."""
    return torch.where(total == 0, 1.0, total)
