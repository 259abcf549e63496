"""A learner: a head (and perhaps its encoder) with its objective, its optimiser and its own randomness."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from lamella import registry
from lamella.config import LearnerOptions
from lamella.data.batches import Batch, Totals
from lamella.data.features import Features
from lamella.encoder.encoder import HiddenStates
from lamella.encoder.tensors import trained_tensors
from lamella.errors import RunError
from lamella.models.model import ReaderModel
from lamella.training.cuda_graphs import Recorded
from lamella.training.objective import Forward, Objective, PassFacts, TaskLoss
from lamella.training.steps import Step

Record = dict[str, Any]
PROGRESS = (
    "steps",
    "best",
    "stale",
    "ended",
    "failed",
    "windows",
    "encoder_seconds",
    "head_seconds",
)  # what a checkpoint keeps as it is


@dataclass
class Learner:
    """One of the learners of a pass. What it becomes depends on its options and its batches, not on its neighbours,
    unless these are its teachers.
    """

    name: str
    model: ReaderModel
    objective: Objective
    optimiser: AdamW
    schedule: LambdaLR
    scaler: GradScaler
    max_grad_norm: float
    stratum: int  # it takes the steps of the strata up to this one
    randomness: Randomness
    steps: int = 0
    best: Record = field(default_factory=dict)  # the scores of its best evaluation
    stale: int = 0  # evaluations since then
    ended: str | None = None  # why it stopped before the pass did
    failed: str | None = None  # what went wrong, if that was the reason
    windows: int = 0  # learnt from, each as often as it came, in this process
    encoder_seconds: float = 0.0  # of an encoder that it shares
    head_seconds: float = 0.0  # its own: of its head, and of the encoder where it trains that
    recorded: Recorded | None = None  # its forward and backward, where it trains its encoder on a GPU
    _terms: dict[str, Tensor] = field(default_factory=dict)
    _pending: list[tuple[int, float, float, dict[str, Tensor]]] = field(default_factory=list)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimiser.param_groups for parameter in group["params"]]

    @property
    def statistics(self) -> list[Tensor]:
        """The running means of normalisations: they follow what a process has seen, not its gradients."""
        tensors = trained_tensors(self.model).values()
        return [one for one in tensors if not isinstance(one, nn.Parameter) and one.is_floating_point()]

    def takes(self, step: Step) -> bool:
        return self.ended is None and step.stratum <= self.stratum

    def learn(self, batch: Batch, hidden: HiddenStates | None, totals: Totals) -> None:
        """Add the gradient of one batch."""
        began = time.perf_counter()
        with self.randomness.used():
            beside = self.objective.gather(batch)
            if self.recorded is not None and hidden is None:
                terms = self.recorded(batch, beside, totals)
            else:
                terms = self.backward(batch, beside, totals, hidden)
        for name, value in terms.items():
            self._terms[name] = self._terms.get(name, 0.0) + value
        self.windows += len(batch.windows)
        self.head_seconds += time.perf_counter() - began

    def backward(
        self, batch: Batch, beside: Tensor | None, totals: Totals, hidden: HiddenStates | None = None
    ) -> dict[str, Tensor]:
        """Add the gradient of one batch to those that are there, and give the terms of its loss."""
        terms = self.objective(Forward(self.model, batch, hidden, beside), batch, totals)
        torch.autograd.backward(self.scaler.scale(terms["loss"]))
        return {name: value.detach() for name, value in terms.items()}

    def forget(self) -> None:
        """Drop the gradients since the last step; what is recorded adds to them where they lie."""
        self.optimiser.zero_grad(set_to_none=self.recorded is None)
        self._terms = {}

    def step(self, epoch: float) -> None:
        """Follow the gradients, which all processes have added up."""
        began = time.perf_counter()
        self.scaler.unscale_(self.optimiser)
        nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        rate = float(self.schedule.get_last_lr()[0])
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.schedule.step()
        self.steps += 1
        self.objective.stepped()
        self._pending.append((self.steps, epoch, rate, self._terms))
        self.forget()
        self.head_seconds += time.perf_counter() - began

    def records(self, add_up: Callable[[Tensor], Tensor]) -> tuple[list[Record], str | None]:
        """The steps since the last time, up to the first whose loss is not a number, and what is to be said of that.

        Reading a loss waits for the device, so it is done for several steps at once.
        """
        if not self._pending:
            return [], None
        names = self.objective.names  # not those found: this process may have had no window of a step
        nothing = torch.zeros((), device=self.model.device)
        rows = [torch.stack([terms.get(name, nothing).float() for name in names]) for *_, terms in self._pending]
        values = add_up(torch.stack(rows)).tolist()
        pending, self._pending = self._pending, []
        records: list[Record] = []
        for (step, epoch, rate, _), row in zip(pending, values, strict=True):
            terms = dict(zip(names, row, strict=True))
            if not math.isfinite(terms["loss"]):
                found = f"the loss at step {step} is {terms['loss']}"
                return records, f"{found}: training has diverged; lower learner.learning_rate."
            records.append({"event": "step", "step": step, "epoch": round(epoch, 6), **terms, "learning_rate": rate})
        return records, None

    def is_finite(self) -> bool:
        """Whether its weights are numbers still."""
        return all(bool(parameter.isfinite().all()) for parameter in self.parameters)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: everything that the next step depends on, but for the randomness."""
        return {
            "tensors": trained_tensors(self.model),
            "optimiser": self.optimiser.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "objective": self.objective.state(),
            **{name: getattr(self, name) for name in PROGRESS},
        }

    def put_state(self, state: Mapping[str, Any]) -> None:
        own = trained_tensors(self.model)
        if own.keys() != state["tensors"].keys():
            raise RunError("the checkpoint has other tensors than this lamella trains; start anew with --overwrite.")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state["tensors"][name])
        self.optimiser.load_state_dict(state["optimiser"])
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        self.objective.put_state(state["objective"])
        for name in PROGRESS:
            setattr(self, name, state[name])


class Randomness:
    """A stream of random numbers of its own, so that what one learner draws does not depend on the others."""

    def __init__(self, device: torch.device) -> None:
        """Goes on from where the process's own stream is now."""
        self.module = None if device.type == "cpu" else torch.get_device_module(device)
        self.state = self._now()

    @contextmanager
    def used(self) -> Iterator[None]:
        outside = self._now()
        self._set(self.state)
        try:
            yield
        finally:
            self.state = self._now()
            self._set(outside)

    def _now(self) -> list[Tensor]:
        return [torch.get_rng_state(), *([self.module.get_rng_state()] if self.module else [])]

    def _set(self, state: list[Tensor]) -> None:
        torch.set_rng_state(state[0])
        if self.module:
            self.module.set_rng_state(state[1])


def make_learner(
    model: ReaderModel,
    options: LearnerOptions,
    total_steps: int,
    *,
    name: str = "",
    stratum: int = 0,
    randomness: Randomness | None = None,
    pass_models: Sequence[ReaderModel] = (),
    train: Features | None = None,
    alone: bool = True,
) -> Learner:
    """Put together what the options describe. Teachers may need the `pass_models` of all learners and the windows to
    `train` on, which they are given where these are the same in every epoch. Only a process that trains `alone` records
    its steps: gradients that several add up come back as other tensors than those that a recording adds to.
    """
    head_rate = options.head_learning_rate or options.learning_rate
    groups = [
        *parameter_groups(model.encoder, options.learning_rate, options.weight_decay),
        *parameter_groups(model.head, head_rate, options.weight_decay),
    ]
    optimiser = AdamW(groups, lr=options.learning_rate, fused=model.device.type in ("cuda", "cpu"))
    schedule = registry.build("schedule", options.schedule, total_steps)
    objective: Objective = TaskLoss(model.head.task, registry.build("loss", options.loss))
    if options.distil is not None:
        facts = PassFacts(total_steps, pass_models, train)
        objective = registry.build("distiller", options.distil, objective, model, facts)
    # Half precision with few exponent bits needs its loss scaled; only a trained encoder computes gradients in it.
    scales = model.precision == "fp16" and model.encoder.trainable
    learner = Learner(
        name=name,
        model=model,
        objective=objective,
        optimiser=optimiser,
        schedule=LambdaLR(optimiser, schedule),
        scaler=GradScaler(model.device.type, enabled=scales),
        max_grad_norm=options.max_grad_norm,
        stratum=stratum,
        randomness=randomness or Randomness(model.device),
    )
    if alone and model.device.type == "cuda" and model.encoder.trainable and objective.steady and not scales:
        learner.recorded = Recorded(learner.backward)
    return learner


def layers_of(learners: Sequence[Learner]) -> list[int]:
    """All that some learners read of their encoder, with their heads and for their teachers."""
    return sorted({layer for one in learners for layer in (*one.model.head.layers, *one.objective.layers)})


def parameter_groups(module: nn.Module, learning_rate: float, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters in two groups: matrices are decayed; biases, LayerNorms and single factors are not."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        ([parameter for parameter in trained if parameter.ndim >= 2], weight_decay),
        ([parameter for parameter in trained if parameter.ndim < 2], 0.0),
    ]
    return [{"params": found, "lr": learning_rate, "weight_decay": decay} for found, decay in groups if found]
