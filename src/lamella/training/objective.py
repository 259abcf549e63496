"""What a learner is trained towards: the terms of its loss on one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import functional_call

from lamella.data.batches import Batch, Totals
from lamella.encoder.encoder import HiddenStates
from lamella.heads.tasks import Choice
from lamella.inference.model import ReaderModel

Terms = dict[str, Tensor]  # `loss` has a gradient; the others are told beside it


class Objective(Protocol):
    """Gives the terms of a batch: its share of the means over the whole optimiser step."""

    names: tuple[str, ...]  # of its terms
    layers: tuple[int, ...]  # what it reads of the encoder besides what the head does
    more_forwards: int  # how many times it runs a trained encoder besides the learner's own

    def __call__(self, forward: Forward, batch: Batch, totals: Totals) -> Terms: ...

    def stepped(self) -> None:
        """Called after every optimiser step."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""

    def put_state(self, state: Mapping[str, Any]) -> None: ...


class Forward:
    """The logits of one batch. Called plainly it is the model in training; under other tensors it is a teacher."""

    def __init__(self, model: ReaderModel, batch: Batch, hidden: HiddenStates | None) -> None:
        self.model, self.batch, self.hidden = model, batch, hidden

    def __call__(self, state: Mapping[str, Tensor] | None = None) -> Tensor:
        """With `state` the model's tensors of these names are replaced, nothing is dropped out, no gradient is kept."""
        if state is None:
            logits: Tensor = self.model(self.batch, self.hidden)
            return logits  # [O, B, T]
        with evaluating(self.model), torch.no_grad():
            return functional_call(self.model, dict(state), (self.batch, self.hidden))  # type: ignore[no-any-return]

    def of(self, other: ReaderModel) -> Tensor:
        """What another model says of the same batch; one on the same encoder is given the layers that are there."""
        shared = self.hidden if other.encoder is self.model.encoder else None
        with evaluating(other), torch.no_grad():
            logits: Tensor = other(self.batch, shared)
        return logits  # [O, B, T]


class TaskLoss:
    """The loss of the task, as its labels are."""

    layers: tuple[int, ...] = ()
    more_forwards = 0

    def __init__(
        self,
        task: Any,
        loss: Callable[[Sequence[Choice], Batch, Totals], Terms],
    ) -> None:
        self.task, self.loss = task, loss
        self.names = ("loss", *task.choice_names)

    def __call__(self, forward: Forward, batch: Batch, totals: Totals) -> Terms:
        return self.of_logits(forward(), batch, totals)

    def of_logits(self, logits: Tensor, batch: Batch, totals: Totals) -> Terms:
        """The same for logits that are there already."""
        return self.loss(self.task.choices(logits, batch), batch, totals)

    def stepped(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def put_state(self, state: Mapping[str, Any]) -> None:
        pass


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode for a moment."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
