"""A teacher whose logits were stored when it answered the training questions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from lamella import runs as run_folders
from lamella.data.windows.batches import Batch, Totals, send
from lamella.errors import ConfigError, counted
from lamella.heads.losses import Weight
from lamella.heads.tasks import Span
from lamella.inference.stored_logits import has_logits
from lamella.models.facts import TeacherFacts
from lamella.models.model import ReaderModel
from lamella.models.names import saved_model, short_model_name
from lamella.registry import register
from lamella.section import Share
from lamella.training.distillation.logit_alignment import align
from lamella.training.distillation.teachers import DistillationLoss, Measure, Over
from lamella.training.fitting.objective import Forward, PassFacts, TaskLoss


@register("distiller", "stored", reads={"runs": "logits"})
class Stored(DistillationLoss):
    """Models teach with the logits they stored when they answered the training questions; any tokenizer will do.

    loss = labels · task + weight · distance, and during `warmup` only the task. `runs` are folders of
    `lamella predict TRAIN --keep-logits`. Tokens are matched by their characters (logit_alignment.py), once, before
    training; a step then costs a lookup in memory and no forward.

    For `kl` several runs teach with the mean of their *probabilities*, not of their logits as `teacher` does: a token
    that has no counterpart in one teacher, or lies outside its window, would have a mean logit of -inf, and so be
    ruled out by the teacher that knows nothing about it. `temperature` T applies to every softmax, z / T, and the term
    is multiplied by T², so that its gradient keeps its size (Hinton et al., 2015). For `mse` they teach with the mean
    of their logits, over the tokens that have any; the others count as right.

    With `doubt` a label is weighted by the probability that the teachers give it, (p(start) p(end))^½: an improbable
    one, for example of a question spoilt by translation, hardly counts.

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
        self.capturable = self.first_taught_step == 0
        self.folders = tuple(Path(os.path.expanduser(path)) for path in runs)
        problems = [f"runs: {problem}" for folder in self.folders if (problem := _unusable(folder))]
        if not isinstance(inner.task, Span):
            problems.append("stored: expected the task span, as stored logits are of starts and ends.")
        if not labels and not weight:
            problems.append("labels and weight: expected at least one above 0, got 0 for both.")
        if measure == "mse" and temperature != 1:
            problems.append(f"temperature: expected the measure kl, which has a softmax, got mse with {temperature:g}.")
        if doubt and measure == "mse":
            problems.append("doubt: expected the measure kl, whose teachers give probabilities, got mse.")
        if doubt and temperature != 1:
            problems.append(
                f"doubt: expected temperature 1, as a softer softmax makes every label improbable, got {temperature:g}."
            )
        if doubt and not labels:
            problems.append("doubt: expected labels above 0, as doubt weighs the labels, got 0.")
        if facts.train is None:
            problems.append(
                "stored: expected training texts that do not change, got data.augment, which changes them every epoch; "
                "leave it out, or use the distiller teacher."
            )
        if problems or facts.train is None:
            raise ConfigError("learner.distil", problems)
        self.aligned = align(self.folders, facts.train, temperature=temperature if measure == "kl" else None)
        taught, windows = int(self.aligned.taught.sum()), len(facts.train)
        self.remark = f"{taught} of {counted(windows, 'window')} taught by the stored logits of {_count(len(runs))}"
        self.source_hashes = {"kept logits": self.aligned.sha256}
        self.teacher_facts = _teachers(self.folders, self.aligned.models)

    def stored_logits(self, batch: Batch) -> Tensor:
        """Return the teachers' logits for these windows, [O, B, T]; -inf where they have none."""
        logits = self.aligned.padded(batch.windows, batch.input_ids.shape[1])
        return send(torch.from_numpy(logits), batch.input_ids.device)

    def teacher_logits(self, forward: Forward, own: Tensor) -> Tensor | None:
        return forward.stored_logits

    def label_weights(self, taught: Tensor, batch: Batch) -> Tensor | None:
        if not self.doubt:
            return None
        of_labels = [
            choice.scores.gather(1, choice.target[:, None])[:, 0] for choice in self.inner.task.choices(taught, batch)
        ]
        log_p = torch.stack(of_labels).float()  # [O, B]
        return log_p.masked_fill(log_p.isneginf(), 0).mean(0).exp()  # a label that they do not know counts fully

    def _distance(self, logits: Tensor, taught: Tensor, batch: Batch, totals: Totals) -> Tensor:
        """Apply the temperature to the student; the teachers' softmaxes have it already."""
        return super()._distance(logits / self.temperature, taught, batch, totals) * self.temperature**2


def _unusable(folder: Path) -> str | None:
    """Return why a folder cannot teach, if it cannot."""
    if not has_logits(folder):
        in_use = folder.is_dir() and any(folder.iterdir())  # for example the teacher's own training run
        teacher = folder if saved_model(str(folder)) else "TEACHER"
        return (
            f"{folder}: expected a run with stored logits, found none; create it with: lamella predict TRAIN "
            f"--model {teacher} --keep-logits --out {folder}{'-logits' if in_use else ''}"
        )
    if (state := run_folders.run_state(folder)) not in ("finished", None):
        return f"{folder}: expected a finished run, found one that is {state}."
    return None


def _teachers(folders: Sequence[Path], models: Sequence[Mapping[str, str]]) -> list[TeacherFacts]:
    """Return the teachers' facts; none where no run recorded its model, as older runs do not."""
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
