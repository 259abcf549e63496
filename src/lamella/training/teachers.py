"""Objectives with a teacher: the student's own past, its neighbours in the pass, or models trained before.

All of them add one term to the loss of the task,

    loss = task + weight · distance(student's logits, teacher's logits),

and differ in who the teacher is. A teacher runs in evaluation mode and gets no gradient. On a frozen encoder, live or
from a cache, it costs a few heads; a student that trains its encoder pays the encoder's forward again.

The options of a part are its signature, so every class with options of its own spells out the four that all share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from lamella.config import POOLED, Share
from lamella.data.batches import Batch, Totals
from lamella.data.examples import Context, Example
from lamella.data.features import featurise
from lamella.encoder.tensors import trained_tensors
from lamella.errors import ConfigError
from lamella.heads.losses import Weight
from lamella.heads.tasks import Choice
from lamella.models.facts import TeacherFacts
from lamella.models.model import ReaderModel
from lamella.models.names import short_model_name
from lamella.models.saved import weights_sha256
from lamella.registry import register
from lamella.training.objective import Forward, PassFacts, TaskLoss, Terms

Count = Annotated[int, Field(ge=1)]
Measure = Literal["mse", "kl"]
Over = Literal["all", "start"]
State = dict[str, Tensor]
PROBE = "Zoë's CAFÉ, 3.5°C: 서울, 東京"  # tells tokenizers of one vocabulary apart


class Distilled:
    """The loss of the task with a teacher's term beside it; what a kind of teacher must say is `teach`.

    `measure = "mse"` is the mean squared difference of the logits over real tokens and outputs; `"kl"` is the
    divergence KL(teacher ‖ student) of the softmaxes over real tokens, a mean over windows and outputs. With
    `over = "start"` the end logits are left alone, as the code of the Korean paper does. In the first `warmup` share of
    the steps there is no teacher. Where a teacher says -inf it says nothing: no probability, no square; a window of
    which it says nothing at all is not taught.
    """

    layers: tuple[int, ...] = ()
    folders: tuple[Path, ...] = ()
    more_forwards = 0
    steady = False
    remark = ""
    made_from: Mapping[str, str] = MappingProxyType({})
    taught_by: Sequence[TeacherFacts] = ()
    labels = 1.0  # the weight of the loss of the task, once there is a teacher

    def __init__(
        self, inner: TaskLoss, total_steps: int, *, weight: float, measure: Measure, over: Over, warmup: float
    ) -> None:
        self.inner = inner
        self.names = (*inner.names, "distillation")
        self.weight, self.measure, self.over = weight, measure, over
        self.begins = round(warmup * total_steps)
        self.steps = 0

    def gather(self, batch: Batch) -> Tensor | None:
        return None

    def teach(self, forward: Forward, own: Tensor) -> Tensor | None:
        """The teacher's logits beside the student's own, both [O, B, T]; None where there is no teacher yet."""
        raise NotImplementedError

    def believe(self, taught: Tensor, batch: Batch) -> Tensor | None:
        """How far the teacher believes the labels of each window, [B]; None where labels are not doubted."""
        return None

    def __call__(self, forward: Forward, batch: Batch, totals: Totals) -> Terms:
        logits = forward()
        taught = self.teach(forward, logits.detach()) if self.steps >= self.begins else None
        belief = self.believe(taught, batch) if taught is not None else None
        terms = self.inner.of_logits(logits, batch, totals, belief)
        if taught is None:
            return {**terms, "distillation": torch.zeros((), device=logits.device)}
        term = self._distance(logits, taught, batch, totals)
        loss = self.labels * terms["loss"] + self.weight * term
        return {**terms, "loss": loss, "distillation": term.detach()}

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
            return torch.stack([_divergence(*pair) for pair in pairs]).sum() / (len(pairs) * totals.windows)
        candidates = totals.windows * task.outputs if task.at_cls else totals.tokens
        return torch.stack([_squares(*pair) for pair in pairs]).sum() / (len(pairs) * candidates)


class OwnPast(Distilled):
    """What the two kinds of self-distillation share: a ring of the last k students, one every so many steps.

    A student is kept as its trained tensors and statistics alone, so with adapters or a frozen encoder the ring is
    small. It is taken after its step: at `every = 1` the newest is what the next step starts from, seen without
    dropout. There is no teacher before the ring is full.
    """

    averaged: bool  # one teacher with the mean of the weights, or k teachers that vote

    def __init__(
        self,
        inner: TaskLoss,
        model: ReaderModel,
        facts: PassFacts,
        *,
        k: Count = 5,
        every: Count = 1,
        weight: Weight = 1.0,
        measure: Measure = "mse",
        over: Over = "all",
        warmup: Share = 0.0,
    ) -> None:
        super().__init__(inner, facts.total_steps, weight=weight, measure=measure, over=over, warmup=warmup)
        self.model, self.k, self.every = model, k, every
        self.ring: list[State] = []  # the oldest first
        self.teachers: list[State] = []
        if model.encoder.trainable:
            self.more_forwards = 1 if self.averaged else k

    def teach(self, forward: Forward, own: Tensor) -> Tensor | None:
        if not self.teachers:
            return None
        return torch.stack([forward(teacher) for teacher in self.teachers]).mean(0)

    def stepped(self) -> None:
        super().stepped()
        if self.steps % self.every == 0:
            now = {name: tensor.detach().clone() for name, tensor in trained_tensors(self.model).items()}
            self._keep([*self.ring, now][-self.k :])

    def state(self) -> dict[str, Any]:
        return {**super().state(), "ring": self.ring}

    def put_state(self, state: Mapping[str, Any]) -> None:
        super().put_state(state)
        device = self.model.device
        self._keep([{name: tensor.to(device) for name, tensor in student.items()} for student in state["ring"]])

    def _keep(self, ring: list[State]) -> None:
        self.ring = ring
        full = len(ring) == self.k
        self.teachers = [] if not full else [_mean(ring)] if self.averaged else ring


@register("distiller", "sda")
class AveragedStudents(OwnPast):
    """Self-distillation averaged: the teacher has the mean of the weights of the last k students (Xu et al., 2020).

    θ̄ = (θ_1 + … + θ_k) / k, and one forward more. The Korean paper's code set the teacher to the scaled *difference* of
    two students instead and taught start logits alone; this is the definition it names.
    """

    averaged = True


@register("distiller", "sdv")
class VotingStudents(OwnPast):
    """Self-distillation voted: the teacher's logits are the mean of those of the last k students (Xu et al., 2020).

    k forwards more. The Korean paper's code left dropout on in the teachers and taught start logits alone.
    """

    averaged = False


@register("distiller", "teacher")
class Teacher(Distilled):
    """One or more saved models teach: the mean of their logits. This makes one small student of an ensemble.

    They must tokenise as the student does and have its task. Teachers with the same frozen encoder share it; where it
    is the student's own, and frozen there too, they read the layers that are computed already.
    """

    def __init__(
        self,
        inner: TaskLoss,
        model: ReaderModel,
        facts: PassFacts,
        *,
        models: Annotated[Sequence[str], Field(min_length=1)],
        weight: Weight = 1.0,
        measure: Measure = "mse",
        over: Over = "all",
        warmup: Share = 0.0,
    ) -> None:
        super().__init__(inner, facts.total_steps, weight=weight, measure=measure, over=over, warmup=warmup)
        self.models: list[ReaderModel] = []
        problems = []
        for name in models:
            teacher = ReaderModel.from_pretrained(name).requires_grad_(False)
            problems += [f"{name}: {problem}" for problem in _misfits(teacher, model)]
            for one in (model, *self.models):
                if _same_layers(one, teacher):
                    teacher.encoder = one.encoder
                    break
            teacher.precision = model.precision
            self.models.append(teacher.to(model.device))
        if problems:
            raise ConfigError("learner.distil.models", problems)
        shared = [teacher for teacher in self.models if teacher.encoder is model.encoder]
        self.layers = tuple(sorted({layer for teacher in shared for layer in teacher.head.layers}))
        self.folders = tuple(folder for teacher in self.models for folder in teacher.folders)
        self.taught_by = [
            TeacherFacts(model=short_model_name(name), sha256=weights_sha256(teacher.folders[0]))
            for name, teacher in zip(models, self.models, strict=True)
        ]
        self.more_forwards = len({teacher.encoder for teacher in self.models} - {model.encoder})
        self.steady = self.begins == 0

    def teach(self, forward: Forward, own: Tensor) -> Tensor | None:
        return forward.of(self.models).mean(0)


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
        facts: PassFacts,
        *,
        weight: Weight = 1.0,
        measure: Measure = "mse",
        over: Over = "all",
        warmup: Share = 0.0,
    ) -> None:
        super().__init__(inner, facts.total_steps, weight=weight, measure=measure, over=over, warmup=warmup)
        task = type(model.head.task)
        self.models = [other for other in facts.models if other is not model and type(other.head.task) is task]
        if not self.models:
            raise ConfigError(
                "learner.distil",
                [
                    "peers: expected other learners of the same task in the pass. There are none; a run file has "
                    "several with [[learner]] or a grid, on a frozen encoder."
                ],
            )

    def teach(self, forward: Forward, own: Tensor) -> Tensor | None:
        said = forward.of(self.models)  # [N, O, B, T]
        # A peer that has diverged must not pull the others after it: it counts as one that agrees.
        return torch.where(said.isfinite(), said, own).mean(0)


def _mean(states: Sequence[State]) -> State:
    """The mean of every tensor. Added up anew each time: a running sum would gather the rounding of all that left."""
    return {
        name: torch.stack([one[name] for one in states]).mean(0) if latest.is_floating_point() else latest
        for name, latest in states[-1].items()
    }


def _misfits(teacher: ReaderModel, student: ReaderModel) -> list[str]:
    """Why a model cannot teach another."""
    problems = []
    task, wanted = (one.head_spec["task"]["name"] for one in (teacher, student))
    if _tokenisation(teacher, student) != _tokenisation(student, student):
        problems.append("expected a teacher with the student's tokens. Its tokenizer differs.")
    if task != wanted:
        problems.append(f"expected a teacher with the student's task, {wanted}. It has {task}.")
    if teacher.windows.max_seq_length < student.windows.max_seq_length:
        problems.append(
            f"expected a teacher for windows of {student.windows.max_seq_length} tokens. It was trained on at most "
            f"{teacher.windows.max_seq_length}; lower windows.max_seq_length."
        )
    return problems


def _tokenisation(model: ReaderModel, student: ReaderModel) -> Any:
    """What a model's tokenizer makes of the student's windows, as far as a few words show."""
    probe = featurise([Example("probe", PROBE, Context(PROBE), ())], model.tokenizer, student.windows)
    return model.tokenizer.get_vocab(), probe.template, probe.input_ids.tolist()


def _same_layers(one: ReaderModel, teacher: ReaderModel) -> bool:
    """Whether the encoder of one model gives all that a teacher reads: both left the same one as it was."""
    frozen = one.keeps_encoder and teacher.keeps_encoder
    pooled = POOLED in one.head.layers or POOLED not in teacher.head.layers  # a pooler is built only where it is read
    return frozen and pooled and one.base_sha256 == teacher.base_sha256


def _squares(mine: Choice, other: Choice) -> Tensor:
    return (mine.scores.float() - other.scores.float()).masked_fill(~_known(mine, other), 0).square().sum()


def _divergence(mine: Choice, other: Choice) -> Tensor:
    known = _known(mine, other)
    log_q, log_p = (
        one.scores.float().masked_fill(~there, float("-inf")).log_softmax(1)
        for one, there in ((mine, mine.real), (other, known))
    )
    # Masked on both sides: a window that is not taught has no log_p, and would still give the gradient 0 · nan.
    return (log_p.exp().masked_fill(~known, 0) * (log_p - log_q).masked_fill(~known, 0)).sum()


def _known(mine: Choice, other: Choice) -> Tensor:
    """The candidates of which the teacher says something."""
    return mine.real & ~other.scores.isneginf()
