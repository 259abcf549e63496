"""The training loop, in the order in which things happen."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from lamella.config import TrainingOptions
from lamella.data.batches import BucketOrder, collate
from lamella.data.features import Features
from lamella.errors import RunError
from lamella.progress import progress
from lamella.training.learner import Learner

Record = dict[str, Any]
LOG_STEPS = 20  # reading a loss waits for the device, so losses are read in groups


def fit(
    learner: Learner,
    train: Features,
    options: TrainingOptions,
    accelerator: Accelerator,
    *,
    log: Callable[[Record], None],
    evaluate: Callable[[int, float], None],
    save: Callable[[float], None],
) -> None:
    """Train. `log` gets a record for every step; `evaluate(step, epoch)` is called on schedule and at the end;
    `save(epoch)` at each epoch of `save_at`, 0 being the untrained model.
    """
    order = BucketOrder(train.lengths, options.batch_size, seed=options.order_seed)
    total = total_steps(options, len(order))
    every = options.evaluate_every * steps_per_epoch(options, len(order))  # steps, not always a whole number
    # The schedule is not given to Accelerate: it would step it once for every process.
    model, optimiser = accelerator.prepare(learner.model, learner.optimiser)

    milestones = sorted(options.save_at)
    while milestones and milestones[0] == 0:
        save(milestones.pop(0))
    model.train()
    pending: list[tuple[int, float, float, dict[str, Tensor]]] = []
    began, windows = time.perf_counter(), 0
    with progress("training", total) as advance:
        for step, (epoch, group) in enumerate(_steps(order, options.accumulate, total), start=1):
            terms: dict[str, Tensor] = {}
            of_step = sum(map(len, group))
            for indices in group:
                batch = collate(train, indices).to(accelerator.device)
                found = learner.loss(learner.model.head.task.choices(model(batch), batch), batch)
                share = len(indices) / of_step  # the last batch of an epoch may be short: each window counts alike
                accelerator.backward(found["loss"] * share)
                for name, value in found.items():
                    terms[name] = terms.get(name, 0.0) + value.detach() * share
                windows += len(indices)
            accelerator.clip_grad_norm_(model.parameters(), learner.max_grad_norm)
            rate = float(learner.schedule.get_last_lr()[0])
            optimiser.step()
            learner.schedule.step()
            optimiser.zero_grad()

            pending.append((step, epoch, rate, terms))
            due = _passes(step, every) or step == total
            note = None
            if due or len(pending) == LOG_STEPS:
                speed = windows / (time.perf_counter() - began)
                note = f"loss {_flush(pending, log):.3f}  lr {rate:.1e}  {speed:.0f} windows/s"
            advance(note=note)
            while milestones and milestones[0] <= epoch + 1e-9:
                save(milestones.pop(0))
            if due:
                evaluate(step, epoch)
                model.train()
    if total == 0:
        evaluate(0, 0.0)


def steps_per_epoch(options: TrainingOptions, batches: int) -> int:
    """Optimiser steps in one pass over the data."""
    return math.ceil(batches / options.accumulate)


def total_steps(options: TrainingOptions, batches: int) -> int:
    """Optimiser steps of the whole run: `max_steps` where it is given, else the epochs."""
    if options.max_steps is not None:
        return options.max_steps
    return max(1, round(options.epochs * steps_per_epoch(options, batches))) if options.epochs else 0


def _passes(step: int, every: float) -> bool:
    """Whether a multiple of `every` lies behind the last step and not behind this one; a step may pass several."""
    return math.floor(step / every + 1e-9) > math.floor((step - 1) / every + 1e-9)


def _steps(order: BucketOrder, accumulate: int, total: int) -> Iterator[tuple[float, list[Any]]]:
    """The batches of every optimiser step, with the epochs done after it."""
    done, epoch = 0, 0
    while done < total:
        batches = list(order.epoch(epoch))
        for begin in range(0, len(batches), accumulate):
            if done == total:
                return
            group = batches[begin : begin + accumulate]
            done += 1
            yield epoch + (begin + len(group)) / len(batches), group
        epoch += 1


def _flush(pending: list[tuple[int, float, float, dict[str, Tensor]]], log: Callable[[Record], None]) -> float:
    """Log the steps since the last time; the last loss."""
    loss = math.nan
    for step, epoch, rate, terms in pending:
        values = {name: float(value) for name, value in terms.items()}
        loss = values["loss"]
        if not math.isfinite(loss):
            raise RunError(f"the loss at step {step} is {loss}: training has diverged; lower learner.learning_rate.")
        log({"step": step, "epoch": round(epoch, 6), **values, "learning_rate": rate})
    pending.clear()
    return loss
