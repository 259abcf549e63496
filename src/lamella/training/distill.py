"""Objectives with a teacher: the student's own past, its neighbours in the pass, or models trained before.

All of them add one term to the loss of the task,

    loss = task + weight · distance(student's logits, teacher's logits),

and differ in who the teacher is. A teacher runs in evaluation mode and gets no gradient. On a frozen encoder, live or
from a cache, it costs a few heads; a student that trains its encoder pays the encoder's forward again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from lamella.config import Share
from lamella.data.batches import Batch, Totals
from lamella.encoder.tensors import trained_tensors
from lamella.errors import ConfigError
from lamella.heads.tasks import Choice
from lamella.inference.model import ReaderModel
from lamella.registry import register
from lamella.training.objective import Forward, TaskLoss, Terms

Weight = Annotated[float, Field(ge=0)]
Measure = Literal["mse", "kl"]
Over = Literal["all", "start"]
State = dict[str, Tensor]


class Distilled:
    """The loss of the task with a teacher's term beside it; what a kind of teacher must say is `teach`.

    `measure = "mse"` is the mean squared difference of the logits over real tokens and outputs; `"kl"` is the
    divergence KL(teacher ‖ student) of the softmaxes over real tokens, a mean over windows and outputs. With
    `over = "start"` the end logits are left alone, as the code of the Korean paper does. In the first `warmup` share of
    the steps there is no teacher.
    """

    layers: tuple[int, ...] = ()
    more_forwards = 1  # of the encoder, where it is trained

    def __init__(
        self,
        inner: TaskLoss,
        model: ReaderModel,
        total_steps: int,
        weight: float,
        measure: str,
        over: str,
        warmup: float,
    ) -> None:
        self.inner, self.model = inner, model
        self.names = (*inner.names, "distillation")
        self.weight, self.measure, self.over = weight, measure, over
        self.begins = round(warmup * total_steps)
        self.steps = 0

    def teach(self, forward: Forward) -> Tensor | None:
        """The teacher's logits, [O, B, T]; None where there is no teacher yet."""
        raise NotImplementedError

    def __call__(self, forward: Forward, batch: Batch, totals: Totals) -> Terms:
        logits = forward()
        terms = self.inner.of_logits(logits, batch, totals)
        taught = self.teach(forward) if self.steps >= self.begins else None
        if taught is None:
            return {**terms, "distillation": torch.zeros((), device=logits.device)}
        term = self._distance(logits, taught, batch, totals)
        return {**terms, "loss": terms["loss"] + self.weight * term, "distillation": term.detach()}

    def stepped(self) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def put_state(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]

    def _distance(self, logits: Tensor, taught: Tensor, batch: Batch, totals: Totals) -> Tensor:
        task = self.inner.task
        own, theirs = task.choices(logits, batch), task.choices(taught, batch)
        pairs = [
            (mine, other)
            for mine, other in zip(own, theirs, strict=True)
            if self.over == "all" or mine.name in ("start", "answerability")
        ]
        if self.measure == "kl":
            return sum_of(_divergence(mine, other) for mine, other in pairs) / (len(pairs) * totals.windows)
        candidates = totals.windows * task.outputs if task.at_cls else totals.tokens
        return sum_of(_squares(mine, other) for mine, other in pairs) / (len(pairs) * candidates)


class OwnPast(Distilled):
    """What the two kinds of self-distillation share: a ring of the last k students, one every so many steps.

    A student is kept as its trained tensors and statistics alone, so with adapters or a frozen encoder the ring is
    small. There is no teacher before the ring is full.
    """

    def __init__(
        self, inner: TaskLoss, model: ReaderModel, total_steps: int, k: int, every: int, **options: Any
    ) -> None:
        super().__init__(inner, model, total_steps, **options)
        self.k, self.every = k, every
        self.ring: list[State] = []  # the oldest first

    def stepped(self) -> None:
        super().stepped()
        if self.steps % self.every == 0:
            now = {name: tensor.detach().clone() for name, tensor in trained_tensors(self.model).items()}
            self.ring = [*self.ring, now][-self.k :]

    def state(self) -> dict[str, Any]:
        return {**super().state(), "ring": self.ring}

    def put_state(self, state: Mapping[str, Any]) -> None:
        super().put_state(state)
        device = self.model.device
        self.ring = [{name: tensor.to(device) for name, tensor in student.items()} for student in state["ring"]]


@register("distiller", "sda")
class AveragedStudents(OwnPast):
    """Self-distillation averaged: the teacher has the mean of the weights of the last k students (Xu et al., 2020).

    θ̄ = (θ_1 + … + θ_k) / k, and one forward more. The Korean paper's code set the teacher to the scaled *difference* of
    two students instead and taught start logits alone; this is the definition it names.
    """

    def __init__(
        self,
        inner: TaskLoss,
        model: ReaderModel,
        total_steps: int,
        pass_models: Sequence[ReaderModel],
        *,
        k: Annotated[int, Field(ge=1)] = 5,
        every: Annotated[int, Field(ge=1)] = 1,
        weight: Weight = 1.0,
        measure: Measure = "mse",
        over: Over = "all",
        warmup: Share = 0.0,
    ) -> None:
        super().__init__(inner, model, total_steps, k, every, weight=weight, measure=measure, over=over, warmup=warmup)
        self.mean: State | None = None

    def teach(self, forward: Forward) -> Tensor | None:
        return None if self.mean is None else forward(self.mean)

    def stepped(self) -> None:
        before = self.ring
        super().stepped()
        if self.ring is not before:
            self._average()

    def put_state(self, state: Mapping[str, Any]) -> None:
        super().put_state(state)
        self._average()

    def _average(self) -> None:
        # Added up anew each time: a running sum would gather the rounding of every student that came and went.
        if len(self.ring) == self.k:
            self.mean = {
                name: sum_of(one[name] for one in self.ring) / self.k if latest.is_floating_point() else latest
                for name, latest in self.ring[-1].items()
            }


@register("distiller", "sdv")
class VotingStudents(OwnPast):
    """Self-distillation voted: the teacher's logits are the mean of those of the last k students (Xu et al., 2020).

    k forwards more.
    """

    def __init__(
        self,
        inner: TaskLoss,
        model: ReaderModel,
        total_steps: int,
        pass_models: Sequence[ReaderModel],
        *,
        k: Annotated[int, Field(ge=1)] = 5,
        every: Annotated[int, Field(ge=1)] = 1,
        weight: Weight = 1.0,
        measure: Measure = "mse",
        over: Over = "all",
        warmup: Share = 0.0,
    ) -> None:
        super().__init__(inner, model, total_steps, k, every, weight=weight, measure=measure, over=over, warmup=warmup)
        self.more_forwards = k

    def teach(self, forward: Forward) -> Tensor | None:
        if len(self.ring) < self.k:
            return None
        return sum_of(forward(student) for student in self.ring) / self.k


@register("distiller", "teacher")
class Teacher(Distilled):
    """One or more saved models teach: the mean of their logits. This makes one small student of an ensemble.

    They must tokenise as the student does and have its task. Where a teacher has the student's own encoder, and both
    leave it frozen, its head reads the layers that are computed already.
    """

    def __init__(
        self,
        inner: TaskLoss,
        model: ReaderModel,
        total_steps: int,
        pass_models: Sequence[ReaderModel],
        *,
        models: Annotated[Sequence[str], Field(min_length=1)],
        weight: Weight = 1.0,
        measure: Measure = "mse",
        over: Over = "all",
        warmup: Share = 0.0,
    ) -> None:
        super().__init__(inner, model, total_steps, weight, measure, over, warmup)
        self.models = [self._load(path) for path in models]
        shared = [teacher for teacher in self.models if teacher.encoder is model.encoder]
        self.layers = tuple(sorted({layer for teacher in shared for layer in teacher.head.layers}))
        self.more_forwards = len(self.models) - len(shared)

    def teach(self, forward: Forward) -> Tensor | None:
        return sum_of(forward.of(teacher) for teacher in self.models) / len(self.models)

    def _load(self, path: str) -> ReaderModel:
        teacher, student = ReaderModel.load(Path(path).expanduser()), self.model
        where = "learner.distil.models"
        if teacher.tokenizer.get_vocab() != student.tokenizer.get_vocab():
            raise ConfigError(where, [f"{path}: expected a teacher with the student's tokens. Its tokenizer differs."])
        if type(teacher.head.task) is not type(student.head.task):
            raise ConfigError(where, [f"{path}: expected a teacher with the student's task. It has another one."])
        if teacher.windows.max_seq_length < student.windows.max_seq_length:
            raise ConfigError(
                where,
                [
                    f"{path}: expected a teacher of windows of {student.windows.max_seq_length} tokens at least. Its "
                    f"are of {teacher.windows.max_seq_length}."
                ],
            )
        teacher.requires_grad_(False).to(student.device)
        teacher.precision = student.precision
        frozen = teacher.tuning["name"] == student.tuning["name"] == "frozen"
        if frozen and teacher.base_sha256 == student.base_sha256:
            teacher.encoder = student.encoder
        return teacher.eval()


@register("distiller", "peers")
class Peers(Distilled):
    """The other learners of the pass teach: the mean of their logits as they are at this step.

    The Korean paper's closing idea, students of different seeds that learn from one another; on a frozen encoder it
    costs their heads alone.
    """

    def __init__(
        self,
        inner: TaskLoss,
        model: ReaderModel,
        total_steps: int,
        pass_models: Sequence[ReaderModel],
        *,
        weight: Weight = 1.0,
        measure: Measure = "mse",
        over: Over = "all",
        warmup: Share = 0.0,
    ) -> None:
        super().__init__(inner, model, total_steps, weight, measure, over, warmup)
        self.models = [
            other for other in pass_models if other is not model and type(other.head.task) is type(model.head.task)
        ]
        if not self.models:
            raise ConfigError(
                "learner.distil", ["peers: expected other learners of the same task in the pass. There are none."]
            )

    def teach(self, forward: Forward) -> Tensor | None:
        return sum_of(forward.of(peer) for peer in self.models) / len(self.models)


def sum_of(tensors: Any) -> Tensor:
    """The sum of some tensors, of which there is one at least."""
    first, *others = tensors
    for other in others:
        first = first + other
    return first  # type: ignore[no-any-return]


def _squares(mine: Choice, other: Choice) -> Tensor:
    return (mine.scores.float() - other.scores.float()).masked_fill(~mine.real, 0).square().sum()


def _divergence(mine: Choice, other: Choice) -> Tensor:
    log_q, log_p = (one.scores.float().masked_fill(~mine.real, float("-inf")).log_softmax(1) for one in (mine, other))
    return (log_p.exp() * (log_p - log_q).masked_fill(~mine.real, 0)).sum()
