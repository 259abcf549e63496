"""What training makes small, given the choices of a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from lamella.data.batches import Batch, Totals
from lamella.errors import ConfigError
from lamella.heads.tasks import Choice
from lamella.registry import register

Weight = Annotated[float, Field(ge=0)]


@register("loss", "cross_entropy")
class CrossEntropy:
    """The weighted mean of the cross-entropies of the task's choices; for a span (CE(start) + CE(end)) / 2.

    Padding takes no part in the softmax, so a loss does not depend on what else is in the batch. `start` and `end`
    weigh the two choices of a span (the Korean paper's start-weighted loss: start = 2). `answerable` and
    `unanswerable` weigh windows with and without the answer: by `example`, Σ w l / Σ w, or as in that paper by the
    `group` means, (2A + U) / 3 at answerable = 2; the weight of a single window then depends on how many of its kind
    the step holds. `label_smoothing` spreads a share of the target over the real tokens.

    Means are over the whole optimiser step: what a batch gives is its share of them, and the shares of all batches and
    processes add up to the loss.
    """

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
            raise ConfigError("learner.loss", [f"{names}: expected one of the weights above 0. Got 0 for both."])
        self.choice_weights = {"start": start, "end": end}
        self.answerable, self.unanswerable = answerable, unanswerable
        self.weigh_by, self.label_smoothing = weigh_by, label_smoothing

    def __call__(
        self, choices: Sequence[Choice], batch: Batch, totals: Totals | None = None, belief: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The loss under `loss`, and the mean of every choice beside it; without `totals` the batch is the step.

        `belief` [B] is how far each window's labels are believed: what is doubted counts less, and no other more.
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
            spread = -log_p.masked_fill(~choice.real, 0).sum(1) / choice.real.sum(1)
            error = (1 - self.label_smoothing) * error + self.label_smoothing * spread
        return error

    def _window_weights(self, has_answer: Tensor, totals: Totals) -> Tensor:
        """What every window counts, [B]; over a whole step this sums to 1, or to 0 where nothing in it counts."""
        weights = (self.answerable, self.unanswerable)
        counts = totals.windows_with_and_without_answer(has_answer.device)
        if self.weigh_by == "example":
            whole = weights[0] * counts[0] + weights[1] * counts[1]
            each = [weight / _or_one(whole) for weight in weights]
        else:
            whole = weights[0] * (counts[0] > 0) + weights[1] * (counts[1] > 0)  # of the kinds that are there
            each = [weight / _or_one(whole) / count.clamp(min=1) for weight, count in zip(weights, counts, strict=True)]
        answerable, unanswerable = each
        return torch.where(has_answer, answerable, unanswerable)


def _or_one(total: Tensor) -> Tensor:
    """What to divide by where a total may be 0: not decided now, for a recorded step has other totals later."""
    return torch.where(total == 0, 1.0, total)
