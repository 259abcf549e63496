"""A teacher that is only remembered: the logits that models kept when they answered the training questions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from lamella import runs as run_folders
from lamella.config import Share
from lamella.data.batches import Batch, Totals, send
from lamella.errors import ConfigError
from lamella.heads.losses import Weight
from lamella.heads.tasks import Span
from lamella.inference.stored_logits import has_logits
from lamella.models.facts import TeacherFacts
from lamella.models.model import ReaderModel
from lamella.models.names import saved_model, short_model_name
from lamella.registry import register
from lamella.training.logit_alignment import align
from lamella.training.objective import Forward, PassFacts, TaskLoss
from lamella.training.teachers import Distilled, Measure, Over


@register("distiller", "stored")
class Stored(Distilled):
    """Models that answered the training questions before teach, by the logits they kept; their tokens may be others.

    loss = labels · task + weight · distance, and while `warmup` lasts the task alone. `runs` are folders of
    `lamella predict TRAIN --keep-logits`. Tokens are matched by their characters (logit_alignment.py), once, before
    training; a step then costs a look into memory and no forward.

    For `kl` several runs teach with the mean of their *probabilities*, not of their logits as `teacher` does: a token
    that one teacher has no counterpart of, or does not see in its window, would have a mean logit of -inf, and so be
    ruled out by the one that knows nothing of it. `temperature` T is that of every softmax, z / T, and the term is
    times T², so that its gradient keeps its size (Hinton et al., 2015). For `mse` they teach with the mean of their
    logits, over the tokens that have any; the others count as right.

    With `doubt` a label counts as far as the teachers believe it, (p(start) p(end))^½: one they find improbable, as of
    a question spoilt by translation, hardly counts.

    A window whose question no run answers has no such term; means are over all windows, so that it does not make the
    others count more.
    """

    def __init__(
        self,
        inner: TaskLoss,
        model: ReaderModel,
        facts: PassFacts,
        *,
        runs: Annotated[Sequence[str], Field(min_length=1)],
        labels: Weight = 1.0,
        weight: Weight = 1.0,
        measure: Measure = "kl",
        over: Over = "all",
        temperature: Annotated[float, Field(gt=0)] = 1.0,
        warmup: Share = 0.0,
        doubt: bool = False,
    ) -> None:
        super().__init__(inner, facts.total_steps, weight=weight, measure=measure, over=over, warmup=warmup)
        self.labels, self.temperature, self.doubt = labels, temperature, doubt
        self.steady = self.begins == 0
        self.folders = tuple(Path(os.path.expanduser(path)) for path in runs)
        problems = [f"runs: {problem}" for folder in self.folders if (problem := _unusable(folder))]
        if not isinstance(inner.task, Span):
            problems.append("stored: expected the task span: what is kept are logits of starts and ends.")
        if not labels and not weight:
            problems.append("labels and weight: expected one of them above 0. Got 0 for both.")
        if measure == "mse" and temperature != 1:
            problems.append(f"temperature: is for the measure kl, which has a softmax. Got {temperature:g} for mse.")
        if doubt and measure == "mse":
            problems.append("doubt: is for the measure kl, whose teachers give probabilities. Got mse.")
        if doubt and temperature != 1:
            problems.append(f"doubt: expected temperature 1; at another no label is believed. Got {temperature:g}.")
        if doubt and not labels:
            problems.append("doubt: is of the labels, which count nothing at labels = 0.")
        if facts.train is None:
            problems.append(
                "stored: expected training texts that stay as they are. data.augment changes them in every epoch, and "
                "no run has answered those; leave it out, or take the distiller teacher."
            )
        if problems or facts.train is None:
            raise ConfigError("learner.distil", problems)
        self.aligned = align(self.folders, facts.train, temperature=temperature if measure == "kl" else None)
        taught, windows = int(self.aligned.taught.sum()), len(facts.train)
        self.remark = f"{taught} of {windows} windows are taught by the logits that {_count(len(runs))} kept"
        self.made_from = {"kept logits": self.aligned.sha256}
        self.taught_by = _teachers(self.folders, self.aligned.models)

    def gather(self, batch: Batch) -> Tensor:
        """What the teachers say of these windows, [O, B, T]; -inf where they say nothing."""
        found = self.aligned.padded(batch.windows, batch.input_ids.shape[1])
        return send(torch.from_numpy(found), batch.input_ids.device)

    def teach(self, forward: Forward, own: Tensor) -> Tensor | None:
        return forward.beside

    def believe(self, taught: Tensor, batch: Batch) -> Tensor | None:
        if not self.doubt:
            return None
        said = [
            choice.scores.gather(1, choice.target[:, None])[:, 0] for choice in self.inner.task.choices(taught, batch)
        ]
        log_p = torch.stack(said).float()  # [O, B]
        return log_p.masked_fill(log_p.isneginf(), 0).mean(0).exp()  # of what they say nothing, they do not doubt

    def _distance(self, logits: Tensor, taught: Tensor, batch: Batch, totals: Totals) -> Tensor:
        """The teachers' softmaxes have their temperature already; the student's is given it here."""
        return super()._distance(logits / self.temperature, taught, batch, totals) * self.temperature**2


def _unusable(folder: Path) -> str | None:
    """Why a folder cannot teach."""
    if not has_logits(folder):
        holds = folder.is_dir() and any(folder.iterdir())  # such as the teacher's own training: that is to stay
        teacher = folder if saved_model(str(folder)) else "TEACHER"
        return (
            f"{folder}: expected a run with kept logits. Found none; make it with: lamella predict TRAIN "
            f"--model {teacher} --keep-logits --out {folder}{'-logits' if holds else ''}"
        )
    if (state := run_folders.run_state(folder)) not in ("finished", None):
        return f"{folder}: expected a run that is finished. Found one that is {state}."
    return None


def _teachers(folders: Sequence[Path], models: Sequence[Mapping[str, str]]) -> list[TeacherFacts]:
    """Who taught; nothing where no run tells of its model, as those made before."""
    if not any(models):
        return []
    return [
        TeacherFacts(
            run=folder.resolve().name,
            model=short_model_name(model["name"]) if model else None,
            sha256=model.get("sha256"),
        )
        for folder, model in zip(folders, models, strict=True)
    ]


def _count(runs: int) -> str:
    return "a run" if runs == 1 else f"{runs} runs"
