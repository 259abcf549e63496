"""What a learner is trained towards: the terms of its loss on one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import functional_call

from lamella.data.windows.batches import Batch, Totals
from lamella.data.windows.features import Features
from lamella.encoder.encoder import HiddenStates
from lamella.heads.tasks import Task
from lamella.models.facts import TeacherFacts
from lamella.models.model import ReaderModel

Terms = dict[str, Tensor]  # `loss` has a gradient; the others are only logged


class Objective(Protocol):
    """Computes the terms of a batch: its share of the means over the whole optimiser step."""

    names: tuple[str, ...]  # of its terms
    layers: tuple[int, ...]  # hidden layers that it reads in addition to the head's
    folders: tuple[Path, ...]  # of the models it reads
    extra_forwards: int  # runs of an encoder per batch, in addition to the learner's own
    capturable: bool  # whether it does the same with every batch, so that a CUDA graph can replay it
    remark: str  # a line to log before training
    source_hashes: Mapping[str, str]  # of what it learns from in addition to the training data
    teacher_facts: Sequence[TeacherFacts]  # the teachers that the model card names

    def stored_logits(self, batch: Batch) -> Tensor | None:
        """Return a teacher's stored logits for a batch, on its device; they come back as `forward.stored_logits`."""

    def __call__(self, forward: Forward, batch: Batch, totals: Totals) -> Terms: ...

    def after_step(self) -> None:
        """Is called after every optimiser step."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""

    def load_state(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class PassFacts:
    """What a teacher may know about the pass that its student is trained in."""

    total_steps: int  # that the student takes
    models: Sequence[ReaderModel] = ()  # of all learners
    train: Features | None = None  # the training windows, if they are the same in every epoch


class Forward:
    """The logits of one batch: of the model in training, of the model with other tensors, or of other models."""

    def __init__(
        self, model: ReaderModel, batch: Batch, hidden: HiddenStates | None, stored_logits: Tensor | None = None
    ) -> None:
        self.model, self.batch, self.hidden, self.stored_logits = model, batch, hidden, stored_logits

    def __call__(self, state: Mapping[str, Tensor] | None = None, *, dropout: bool = False) -> Tensor:
        """Run the model in training; with `state`, run it with those tensors, without gradients and `dropout`."""
        if state is None:
            logits: Tensor = self.model(self.batch, self.hidden)
            return logits  # [O, B, T]
        parameters = dict(self.model.named_parameters())
        # In training mode, normalisations update their statistics in place; those of `state` must stay as they are.
        own = {name: tensor if name in parameters else tensor.clone() for name, tensor in state.items()}
        with nullcontext() if dropout else evaluating(self.model), torch.no_grad():
            return functional_call(self.model, own, (self.batch, self.hidden))  # type: ignore[no-any-return]

    def logits_of(self, models: Sequence[ReaderModel]) -> Tensor:
        """Return the logits of other models on the same batch. Models with one encoder share its hidden states."""
        hidden_by_encoder = {self.model.encoder: self.hidden}
        logits = []
        for model in models:
            with evaluating(model), torch.no_grad():
                if hidden_by_encoder.get(model.encoder) is None:
                    sharing = [other for other in models if other.encoder is model.encoder]
                    layers = {layer for other in sharing for layer in other.head.layers}
                    hidden_by_encoder[model.encoder] = model.encode(self.batch, sorted(layers))
                logits.append(model(self.batch, hidden_by_encoder[model.encoder]))
        return torch.stack(logits)  # [N, O, B, T]


class TaskLoss:
    """The loss of the task against the labels."""

    layers: tuple[int, ...] = ()
    folders: tuple[Path, ...] = ()
    extra_forwards = 0
    capturable = True
    remark = ""
    source_hashes: Mapping[str, str] = MappingProxyType({})
    teacher_facts: Sequence[TeacherFacts] = ()

    def __init__(
        self,
        task: Task,
        loss: Callable[..., Terms],  # of choices, a batch and its totals, and of a `belief` where there is one
    ) -> None:
        self.task, self.loss = task, loss
        self.names = ("loss", *task.choice_names)

    def stored_logits(self, batch: Batch) -> Tensor | None:
        return None

    def __call__(self, forward: Forward, batch: Batch, totals: Totals) -> Terms:
        return self.from_logits(forward(), batch, totals)

    def from_logits(self, logits: Tensor, batch: Batch, totals: Totals, belief: Tensor | None = None) -> Terms:
        """Compute the terms from logits; `belief` [B] weighs the labels of each window."""
        weights = {} if belief is None else {"belief": belief}
        return self.loss(self.task.choices(logits, batch), batch, totals, **weights)

    def after_step(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        pass


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Switch a model to evaluation mode inside the block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
