"""What a learner is trained towards: the terms of its loss on one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import functional_call

from lamella.data.batches import Batch, Totals
from lamella.data.features import Features
from lamella.encoder.encoder import HiddenStates
from lamella.heads.tasks import Task
from lamella.models.facts import TeacherFacts
from lamella.models.model import ReaderModel

Terms = dict[str, Tensor]  # `loss` has a gradient; the others are told beside it


class Objective(Protocol):
    """Gives the terms of a batch: its share of the means over the whole optimiser step."""

    names: tuple[str, ...]  # of its terms
    layers: tuple[int, ...]  # what it reads of the encoder besides what the head does
    folders: tuple[Path, ...]  # of the models it reads
    more_forwards: int  # of an encoder on every batch, besides the learner's own
    steady: bool  # whether it does the same with every batch, so that a device can record it once and replay it
    remark: str  # what is told of it before training
    made_from: Mapping[str, str]  # hashes of what it learns from besides the training data
    taught_by: Sequence[TeacherFacts]  # what a model's facts are to say of its teachers

    def gather(self, batch: Batch) -> Tensor | None:
        """What it reads of a batch besides the batch itself, on the batch's device: `forward.beside` when called."""

    def __call__(self, forward: Forward, batch: Batch, totals: Totals) -> Terms: ...

    def stepped(self) -> None:
        """Called after every optimiser step."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""

    def put_state(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class PassFacts:
    """What a teacher may know of the pass that its student is trained in."""

    total_steps: int  # that the student takes
    models: Sequence[ReaderModel] = ()  # of all learners
    train: Features | None = None  # the windows to learn from, where they are the same in every epoch


class Forward:
    """The logits of one batch. Called plainly it is the model in training; under other tensors it is a teacher."""

    def __init__(
        self, model: ReaderModel, batch: Batch, hidden: HiddenStates | None, beside: Tensor | None = None
    ) -> None:
        self.model, self.batch, self.hidden, self.beside = model, batch, hidden, beside

    def __call__(self, state: Mapping[str, Tensor] | None = None) -> Tensor:
        """With `state` the model's tensors of these names are replaced, nothing is dropped out, no gradient is kept."""
        if state is None:
            logits: Tensor = self.model(self.batch, self.hidden)
            return logits  # [O, B, T]
        with evaluating(self.model), torch.no_grad():
            return functional_call(self.model, dict(state), (self.batch, self.hidden))  # type: ignore[no-any-return]

    def of(self, others: Sequence[ReaderModel]) -> Tensor:
        """What other models say of the same batch. Those with one encoder share what it gives."""
        made = {self.model.encoder: self.hidden}
        said = []
        for other in others:
            with evaluating(other), torch.no_grad():
                if made.get(other.encoder) is None:
                    layers = {layer for one in others if one.encoder is other.encoder for layer in one.head.layers}
                    made[other.encoder] = other.encode(self.batch, sorted(layers))
                said.append(other(self.batch, made[other.encoder]))
        return torch.stack(said)  # [N, O, B, T]


class TaskLoss:
    """The loss of the task, as its labels are."""

    layers: tuple[int, ...] = ()
    folders: tuple[Path, ...] = ()
    more_forwards = 0
    steady = True
    remark = ""
    made_from: Mapping[str, str] = MappingProxyType({})
    taught_by: Sequence[TeacherFacts] = ()

    def __init__(
        self,
        task: Task,
        loss: Callable[..., Terms],  # of choices, a batch and its totals; and of a belief, where there is one
    ) -> None:
        self.task, self.loss = task, loss
        self.names = ("loss", *task.choice_names)

    def gather(self, batch: Batch) -> Tensor | None:
        return None

    def __call__(self, forward: Forward, batch: Batch, totals: Totals) -> Terms:
        return self.of_logits(forward(), batch, totals)

    def of_logits(self, logits: Tensor, batch: Batch, totals: Totals, belief: Tensor | None = None) -> Terms:
        """The same for logits that are there already; `belief` [B] is how far each window's labels are believed."""
        beside = {} if belief is None else {"belief": belief}
        return self.loss(self.task.choices(logits, batch), batch, totals, **beside)

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
