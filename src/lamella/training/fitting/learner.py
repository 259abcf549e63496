"""A learner: a head (and perhaps its encoder) with its objective, its optimiser and its own random numbers."""

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
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lamella import registry
from lamella.config import LearnerOptions
from lamella.data.windows.batches import Batch, Totals
from lamella.data.windows.features import Features
from lamella.encoder.encoder import HiddenStates
from lamella.encoder.tensors import trained_tensors
from lamella.errors import RunError
from lamella.models.model import ReaderModel
from lamella.training.fitting.cuda_graphs import GraphedBackward
from lamella.training.fitting.objective import Forward, Objective, PassFacts, TaskLoss
from lamella.training.fitting.optimiser import make_optimiser
from lamella.training.fitting.steps import Step

Record = dict[str, Any]
PROGRESS = (
    "steps",
    "best",
    "kept",
    "stale",
    "ended",
    "failed",
    "windows",
    "encoder_seconds",
    "head_seconds",
)  # attributes that a checkpoint holds as they are
BIASES = ("b", "bias")  # names of parameters


@dataclass
class Learner:
    """One learner of a pass. It depends on its options and its batches, not on the other learners, unless these are
    its teachers.
    """

    name: str
    model: ReaderModel
    objective: Objective
    optimiser: Optimizer
    schedule: LambdaLR
    scaler: GradScaler
    max_grad_norm: float  # 0: no clipping
    stratum: int  # it takes the steps of the strata up to this one
    random_stream: RandomStream
    steps: int = 0
    best: Record = field(default_factory=dict)  # the scores of its best evaluation
    kept: Record = field(default_factory=dict)  # the scores of the saved model: the best, or the last
    stale: int = 0  # evaluations since the best
    ended: str | None = None  # why it stopped before the pass did
    failed: str | None = None  # what went wrong, if that was the reason
    windows: int = 0  # trained on, in all processes, counted once per epoch
    encoder_seconds: float = 0.0  # of an encoder that it shares
    head_seconds: float = 0.0  # of its head, and of its encoder where it trains that
    graphed: GraphedBackward | None = None  # replaces `backward` where it trains its encoder on a GPU
    _terms: dict[str, Tensor] = field(default_factory=dict)
    _pending: list[tuple[int, float, float, dict[str, Tensor]]] = field(default_factory=list)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimiser.param_groups for parameter in group["params"]]

    @property
    def running_statistics(self) -> list[Tensor]:
        """The running means of normalisations: they follow the batches that a process has seen, not its gradients.

        No encoder has any.
        """
        tensors = trained_tensors(self.model.head).values()
        return [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter) and tensor.is_floating_point()]

    def takes(self, step: Step) -> bool:
        """Whether it trains on a step of the pass."""
        return self.ended is None and step.stratum <= self.stratum

    def add_gradients(self, batch: Batch, hidden: HiddenStates | None, totals: Totals) -> None:
        """Add the gradients of one batch, with this learner's own random numbers."""
        began = time.perf_counter()
        with self.random_stream.active():
            stored_logits = self.objective.stored_logits(batch)
            if self.graphed is not None and hidden is None:
                terms = self.graphed(batch, stored_logits, totals)
            else:
                terms = self.backward(batch, stored_logits, totals, hidden)
        for name, value in terms.items():
            self._terms[name] = self._terms.get(name, 0.0) + value
        self.head_seconds += time.perf_counter() - began

    def backward(
        self, batch: Batch, stored_logits: Tensor | None, totals: Totals, hidden: HiddenStates | None = None
    ) -> dict[str, Tensor]:
        """Add the gradients of one batch, and return the terms of its loss."""
        terms = self.objective(Forward(self.model, batch, hidden, stored_logits), batch, totals)
        torch.autograd.backward(self.scaler.scale(terms["loss"]))
        return {name: value.detach() for name, value in terms.items()}

    def zero_gradients(self) -> None:
        """Drop the gradients since the last step; CUDA graphs add to them in place, so these are set to zero."""
        self.optimiser.zero_grad(set_to_none=self.graphed is None)
        self._terms = {}

    def step(self, epoch: float) -> None:
        """Clip the gradients, which all processes have summed, and update the weights."""
        began = time.perf_counter()
        self.scaler.unscale_(self.optimiser)
        if self.max_grad_norm:
            nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        rate = float(self.schedule.get_last_lr()[0])
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.schedule.step()
        self.steps += 1
        self.objective.after_step()
        self._pending.append((self.steps, epoch, rate, self._terms))
        self.zero_gradients()
        self.head_seconds += time.perf_counter() - began

    def take_records(self, sum_processes: Callable[[Tensor], Tensor]) -> tuple[list[Record], str | None]:
        """Return the steps since the last call, up to the first whose loss is not finite, and the error message then.

        Reading a loss waits for the device, so it is done for several steps at once.
        """
        if not self._pending:
            return [], None
        names = self.objective.names  # not the keys of the terms: this process may have had no window in a step
        nothing = torch.zeros((), device=self.model.device)
        rows = [torch.stack([terms.get(name, nothing).float() for name in names]) for *_, terms in self._pending]
        values = sum_processes(torch.stack(rows)).tolist()
        pending, self._pending = self._pending, []
        records: list[Record] = []
        for (step, epoch, rate, _), row in zip(pending, values, strict=True):
            terms = dict(zip(names, row, strict=True))
            if not math.isfinite(terms["loss"]):
                problem = f"the loss at step {step} is {terms['loss']}"
                return records, f"{problem}: training has diverged; lower learner.learning_rate."
            records.append({"event": "step", "step": step, "epoch": round(epoch, 6), **terms, "learning_rate": rate})
        return records, None

    def training_seconds(self, pass_seconds: float) -> float:
        """Return how long it has trained, as if it were alone: the encoder, which it may share, and its own steps.

        A GPU runs asynchronously, so on one only the time of the whole pass is known.
        """
        return self.encoder_seconds + self.head_seconds if self.model.device.type == "cpu" else pass_seconds

    def has_finite_weights(self) -> bool:
        return all(bool(parameter.isfinite().all()) for parameter in self.parameters)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds: everything the next step depends on, except the random state."""
        return {
            "tensors": trained_tensors(self.model),
            "optimiser": self.optimiser.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "objective": self.objective.state(),
            **{name: getattr(self, name) for name in PROGRESS},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        tensors = trained_tensors(self.model)
        if tensors.keys() != state["tensors"].keys():
            raise RunError(
                "checkpoint: expected the tensors that this version of lamella trains, got others; start again from "
                "scratch with --overwrite."
            )
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(state["tensors"][name])
        self.optimiser.load_state_dict(state["optimiser"])
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        self.objective.load_state(state["objective"])
        for name in PROGRESS:
            setattr(self, name, state[name])


class RandomStream:
    """A separate stream of random numbers, so that what one learner draws does not depend on the others."""

    def __init__(self, device: torch.device) -> None:
        """Start at the current state of the process's own stream."""
        self.module = None if device.type == "cpu" else torch.get_device_module(device)
        self.state = self._get()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw from this stream inside the block."""
        outside = self._get()
        self._set(self.state)
        try:
            yield
        finally:
            self.state = self._get()
            self._set(outside)

    def _get(self) -> list[Tensor]:
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
    random_stream: RandomStream | None = None,
    pass_models: Sequence[ReaderModel] = (),
    train: Features | None = None,
    single_process: bool = True,
) -> Learner:
    """Build the learner that the options describe.

    Teachers may need the `pass_models` of all learners and the windows to `train` on, if these are the same in every
    epoch. CUDA graphs are captured only in a `single_process`: gradients that several processes sum come back as other
    tensors than those that a graph adds to.
    """
    head_rate = options.head_learning_rate or options.learning_rate
    groups = [
        *parameter_groups(model.encoder, options.learning_rate, options.weight_decay),
        *parameter_groups(model.head, head_rate, options.weight_decay),
    ]
    optimiser = make_optimiser(
        groups,
        options.learning_rate,
        epsilon=options.adam_epsilon,
        bias_correction=options.bias_correction,
        fused=model.device.type in ("cuda", "cpu"),
    )
    schedule = registry.build("schedule", options.schedule, total_steps)
    objective: Objective = TaskLoss(model.head.task, registry.build("loss", options.loss))
    if options.distil is not None:
        facts = PassFacts(total_steps, pass_models, train)
        objective = registry.build("distiller", options.distil, objective, model, facts)
    # fp16 has few exponent bits, so its loss must be scaled; only a trained encoder computes gradients in it.
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
        random_stream=random_stream or RandomStream(model.device),
    )
    trains_on_gpu = model.device.type == "cuda" and model.encoder.trainable
    if single_process and trains_on_gpu and objective.capturable and not scales:
        learner.graphed = GraphedBackward(learner.backward)
    return learner


def layers_read_by(learners: Sequence[Learner]) -> list[int]:
    """Return the hidden layers that learners read, with their heads and for their teachers."""
    return sorted({layer for learner in learners for layer in (*learner.model.head.layers, *learner.objective.layers)})


def parameter_groups(module: nn.Module, learning_rate: float, weight_decay: float) -> list[dict[str, Any]]:
    """Group the trained parameters: matrices are decayed; biases, LayerNorms and scalars are not.

    Several biases may be in one matrix, such as one for each layer; they are recognised by their name. A module can
    declare its own parameters, by name: `undecayed`, and `learning_rate_ratios` of other learning rates (LoRA+).
    """
    undecayed = {child.get_parameter(name) for child in module.modules() for name in getattr(child, "undecayed", ())}
    ratios = {
        child.get_parameter(name): ratio
        for child in module.modules()
        for name, ratio in getattr(child, "learning_rate_ratios", {}).items()
    }
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            spared = parameter.ndim < 2 or name.rpartition(".")[2] in BIASES or parameter in undecayed
            groups.setdefault((ratios.get(parameter, 1.0), spared), []).append(parameter)
    # The usual rate comes first: its first group is the one whose learning rate is recorded.
    return [
        {"params": members, "lr": ratio * learning_rate, "weight_decay": 0.0 if spared else weight_decay}
        for (ratio, spared), members in sorted(groups.items(), key=lambda item: (item[0][0] != 1, item[0]))
    ]
