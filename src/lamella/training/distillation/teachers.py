"""Objectives with a teacher: the student's own past, its neighbours in the pass, or models trained before.

All of them add one term to the loss of the task,

    loss = task + weight · distance(student's logits, teacher's logits),

and differ in who the teacher is. A teacher runs in evaluation mode and gets no gradient. On a frozen encoder, live or
from a cache, it costs a few heads; if the student trains its encoder, it costs another forward of the encoder.

A distiller that reads folders declares them as its trait `reads`, by the option that names them, so that runs are
scheduled, protected from overwriting and checked for changes without knowing the distiller.

The options of a part are its signature, so every class with options of its own repeats the four that all share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from lamella.config import POOLED
from lamella.data.examples import Context, Example
from lamella.data.windows.batches import Batch, Totals
from lamella.data.windows.features import featurise
from lamella.encoder.tensors import trained_tensors
from lamella.errors import ConfigError
from lamella.heads.losses import Weight
from lamella.heads.tasks import Choice
from lamella.models.facts import TeacherFacts
from lamella.models.model import ReaderModel
from lamella.models.names import short_model_name
from lamella.models.saved import weights_sha256
from lamella.registry import register
from lamella.section import Share
from lamella.training.fitting.objective import Forward, PassFacts, TaskLoss, Terms

Count = Annotated[int, Field(ge=1)]
Measure = Literal["mse", "kl"]
Over = Literal["all", "start"]
State = dict[str, Tensor]
PROBE = "Zoë's CAFÉ, 3.5°C: 서울, 東京"  # distinguishes tokenizers with the same vocabulary


class DistillationLoss:
    """The loss of the task plus a teacher's term; a kind of teacher defines `teacher_logits`.

    `measure = "mse"` is the mean squared difference of the logits over real tokens and outputs; `"kl"` is the
    divergence KL(teacher ‖ student) of the softmaxes over real tokens, a mean over windows and outputs. With
    `over = "start"` the end logits get no teacher, as in the code of the Korean paper. In the first `warmup` share of
    the steps there is no teacher. A teacher's logit of -inf means unknown: it counts in neither measure, and a window
    with no other logits is not taught.
    """

    layers: tuple[int, ...] = ()
    folders: tuple[Path, ...] = ()
    extra_forwards = 0
    capturable = False
    remark = ""
    source_hashes: Mapping[str, str] = MappingProxyType({})
    teacher_facts: Sequence[TeacherFacts] = ()
    labels = 1.0  # the weight of the loss of the task, once there is a teacher

    def __init__(
        self, inner: TaskLoss, total_steps: int, *, weight: float, measure: Measure, over: Over, warmup: float
    ) -> None:
        self.inner = inner
        self.names = (*inner.names, "distillation")
        self.weight, self.measure, self.over = weight, measure, over
        self.first_taught_step = round(warmup * total_steps)
        self.steps = 0

    def stored_logits(self, batch: Batch) -> Tensor | None:
        return None

    def teacher_logits(self, forward: Forward, own: Tensor) -> Tensor | None:
        """Return the teacher's logits, like the student's `own` [O, B, T]; None where there is no teacher yet."""
        raise NotImplementedError

    def label_weights(self, taught: Tensor, batch: Batch) -> Tensor | None:
        """Return how far the teacher trusts the labels of each window, [B]; None to count all labels fully."""
        return None

    def __call__(self, forward: Forward, batch: Batch, totals: Totals) -> Terms:
        logits = forward()
        taught = self.teacher_logits(forward, logits.detach()) if self.steps >= self.first_taught_step else None
        belief = self.label_weights(taught, batch) if taught is not None else None
        terms = self.inner.from_logits(logits, batch, totals, belief)
        if taught is None:
            return {**terms, "distillation": torch.zeros((), device=logits.device)}
        term = self._distance(logits, taught, batch, totals)
        loss = self.labels * terms["loss"] + self.weight * term
        return {**terms, "loss": loss, "distillation": term.detach()}

    def after_step(self) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]

    def _distance(self, logits: Tensor, taught: Tensor, batch: Batch, totals: Totals) -> Tensor:
        task = self.inner.task
        pairs = [
            (student, teacher)
            for student, teacher in zip(task.choices(logits, batch), task.choices(taught, batch), strict=True)
            if self.over == "all" or student.name in ("start", "answerability")
        ]
        if self.measure == "kl":
            return torch.stack([_divergence(*pair) for pair in pairs]).sum() / (len(pairs) * totals.windows)
        candidates = totals.windows * task.outputs if task.at_cls else totals.tokens
        return torch.stack([_squares(*pair) for pair in pairs]).sum() / (len(pairs) * candidates)


class PastStudents(DistillationLoss):
    """What the two kinds of self-distillation share: a ring of the last k students, taken once every `every` steps.

    Only the trained tensors and statistics of a student are kept, so with adapters or a frozen encoder the ring is
    small. A student is taken after its step, and teaches from the step after the next: the student does not teach
    itself (θ_{t-k}, k ≥ 1). With `include_current` it teaches from the next step, which starts from it. There is no
    teacher before the ring is full.

    The teachers have dropout, as in the code of the Korean paper. A network without dropout gives larger logits than
    with it. So with `dropout` off, the student enlarges its logits to reach those of its past, and the next teacher's
    are larger again: nothing but the labels holds them back, and training may diverge.
    """

    averaged: bool  # one teacher with the mean of the weights, or k teachers whose logits are averaged

    def __init__(
        self,
        inner: TaskLoss,
        model: ReaderModel,
        facts: PassFacts,
        *,
        k: Count = 5,
        every: Count = 1,
        include_current: bool = False,
        dropout: bool = True,
        weight: Weight = 1.0,
        measure: Measure = "mse",
        over: Over = "all",
        warmup: Share = 0.0,
    ) -> None:
        super().__init__(inner, facts.total_steps, weight=weight, measure=measure, over=over, warmup=warmup)
        self.model, self.k, self.every, self.include_current = model, k, every, include_current
        self.dropout = dropout
        self.ring: list[State] = []  # the oldest first
        self.current: list[State] = []  # the student that enters the ring after the next step, if any
        self.teacher_states: list[State] = []
        if model.encoder.trainable:
            self.extra_forwards = 1 if self.averaged else k

    def teacher_logits(self, forward: Forward, own: Tensor) -> Tensor | None:
        if not self.teacher_states:
            return None
        return torch.stack([forward(state, dropout=self.dropout) for state in self.teacher_states]).mean(0)

    def after_step(self) -> None:
        super().after_step()
        taken = []
        if self.steps % self.every == 0:
            taken = [{name: tensor.detach().clone() for name, tensor in trained_tensors(self.model).items()}]
        entering, self.current = (taken, []) if self.include_current else (self.current, taken)
        if entering:
            self._set_ring([*self.ring, *entering][-self.k :])

    def state(self) -> dict[str, Any]:
        return {**super().state(), "ring": self.ring, "current": self.current}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        device = self.model.device
        ring, self.current = (
            [{name: tensor.to(device) for name, tensor in student.items()} for student in state[key]]
            for key in ("ring", "current")
        )
        self._set_ring(ring)

    def _set_ring(self, ring: list[State]) -> None:
        self.ring = ring
        full = len(ring) == self.k
        self.teacher_states = [] if not full else [_mean(ring)] if self.averaged else ring


@register("distiller", "sda")
class AveragedStudents(PastStudents):
    """Self-distillation averaged: the teacher has the mean of the weights of the last k students (Xu et al., 2020).

    θ̄ = (θ_1 + … + θ_k) / k, at the cost of one more forward. The Korean paper's code set the teacher to the scaled
    *difference* of two students instead and taught only start logits; this is the definition it names.
    """

    averaged = True


@register("distiller", "sdv")
class VotingStudents(PastStudents):
    """Self-distillation voted: the teacher's logits are the mean logits of the last k students (Xu et al., 2020).

    This costs k more forwards. The Korean paper's code taught only start logits, with dropout in the teachers.
    """

    averaged = False


@register("distiller", "teacher", reads={"models": "model"})
class Teacher(DistillationLoss):
    """One or more saved models teach with the mean of their logits. This distils an ensemble into one small student.

    They must have the student's tokenizer and task. Teachers with the same frozen encoder share it; if it is the
    student's own, and frozen there too, they read the layers that are computed already.
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
            for candidate in (model, *self.models):
                if _can_share_encoder(candidate, teacher):
                    teacher.encoder = candidate.encoder
                    break
            teacher.precision = model.precision
            self.models.append(teacher.to(model.device))
        if problems:
            raise ConfigError("learner.distil.models", problems)
        shared = [teacher for teacher in self.models if teacher.encoder is model.encoder]
        self.layers = tuple(sorted({layer for teacher in shared for layer in teacher.head.layers}))
        self.folders = tuple(folder for teacher in self.models for folder in teacher.folders)
        self.teacher_facts = [
            TeacherFacts(model=short_model_name(name), sha256=weights_sha256(teacher.folders[0]))
            for name, teacher in zip(models, self.models, strict=True)
        ]
        self.source_hashes = {
            f"teacher {name}": str(facts.sha256) for name, facts in zip(models, self.teacher_facts, strict=True)
        }
        self.extra_forwards = len({teacher.encoder for teacher in self.models} - {model.encoder})
        self.capturable = self.first_taught_step == 0

    def teacher_logits(self, forward: Forward, own: Tensor) -> Tensor | None:
        return forward.logits_of(self.models).mean(0)


@register("distiller", "peers")
class Peers(DistillationLoss):
    """The other learners of the pass teach with the mean of their current logits.

    The Korean paper's closing idea: students of different seeds learn from one another. On a frozen encoder it costs
    only their heads.
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
                    "peers: expected other learners of the same task in the pass, got none; add [[learner]] tables or "
                    "a grid, on a frozen encoder."
                ],
            )

    def teacher_logits(self, forward: Forward, own: Tensor) -> Tensor | None:
        logits = forward.logits_of(self.models)  # [N, O, B, T]
        # A peer that has diverged must not spoil the others: it counts as one that agrees.
        return torch.where(logits.isfinite(), logits, own).mean(0)


def _mean(states: Sequence[State]) -> State:
    """Average every tensor. Summed again each time: a running sum would accumulate rounding errors."""
    return {
        name: torch.stack([state[name] for state in states]).mean(0) if latest.is_floating_point() else latest
        for name, latest in states[-1].items()
    }


def _misfits(teacher: ReaderModel, student: ReaderModel) -> list[str]:
    """Return the reasons why a model cannot teach another."""
    problems = []
    task, student_task = (model.head_spec["task"]["name"] for model in (teacher, student))
    if _tokenisation(teacher, student) != _tokenisation(student, student):
        problems.append(
            "expected a teacher with the student's tokenizer, got another one; the distiller stored takes any."
        )
    if task != student_task:
        problems.append(f"expected a teacher with the student's task, {student_task}, got {task}.")
    if teacher.windows.max_seq_length < student.windows.max_seq_length:
        problems.append(
            f"expected a teacher trained on windows of {student.windows.max_seq_length} tokens, got "
            f"{teacher.windows.max_seq_length}; lower windows.max_seq_length."
        )
    return problems


def _tokenisation(model: ReaderModel, student: ReaderModel) -> Any:
    """Return what a model's tokenizer makes of a few words, in the student's windows."""
    probe = featurise([Example("probe", PROBE, Context(PROBE), ())], model.tokenizer, student.windows)
    return model.tokenizer.get_vocab(), probe.template, probe.input_ids.tolist()


def _can_share_encoder(model: ReaderModel, teacher: ReaderModel) -> bool:
    """Whether a model's encoder gives all that a teacher reads: both left the same base encoder unchanged."""
    frozen = model.keeps_encoder and teacher.keeps_encoder
    pooled = POOLED in model.head.layers or POOLED not in teacher.head.layers  # a pooler is built only where it is read
    return frozen and pooled and model.loaded_sha256 == teacher.loaded_sha256


def _squares(student: Choice, teacher: Choice) -> Tensor:
    known = _known(student, teacher)
    return (student.scores.float() - teacher.scores.float()).masked_fill(~known, 0).square().sum()


def _divergence(student: Choice, teacher: Choice) -> Tensor:
    known = _known(student, teacher)
    log_q, log_p = (
        choice.scores.float().masked_fill(~candidates, float("-inf")).log_softmax(1)
        for choice, candidates in ((student, student.real), (teacher, known))
    )
    # Masked on both sides: a window that is not taught has no log_p, and would still give the gradient 0 · nan.
    return (log_p.exp().masked_fill(~known, 0) * (log_p - log_q).masked_fill(~known, 0)).sum()


def _known(student: Choice, teacher: Choice) -> Tensor:
    """Return the candidates for which the teacher has a logit."""
    return student.real & ~teacher.scores.isneginf()
