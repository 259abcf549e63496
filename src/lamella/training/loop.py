"""The training loop, in the order in which things happen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from lamella.config import TrainingOptions
from lamella.data.batches import Totals, collate
from lamella.data.padding import PAD_TO_MULTIPLE_OF
from lamella.errors import DivergedError
from lamella.inference.one_pass import Encode
from lamella.progress import progress
from lamella.stopwatch import Stopwatch
from lamella.training import cuda_graphs
from lamella.training.batch_splitting import Splitter
from lamella.training.learner import Learner, Record, layers_of
from lamella.training.processes import Processes
from lamella.training.steps import BEGINNING, Position, Step, Steps, passes, steps_between

LOG_STEPS = 20  # reading a loss waits for the device, so losses are read in groups


class Watcher(Protocol):
    """What becomes of a pass: the loop says when, the watcher does it."""

    def log(self, learner: Learner, records: Sequence[Record]) -> None: ...

    def evaluate(self, learners: Sequence[Learner], step: int, epoch: float) -> None:
        """Score the learners; ends those that have learnt enough."""

    def keep(self, learners: Sequence[Learner], epoch: float) -> None:
        """Save the models of an epoch of `save_at`, 0 being the untrained ones."""

    def checkpoint(self, position: Position) -> None: ...


def fit(
    learners: Sequence[Learner],
    steps: Steps,
    options: TrainingOptions,
    processes: Processes,
    watcher: Watcher,
    *,
    encode: Encode | None = None,
    start: Position = BEGINNING,
    split: Splitter | None = None,
) -> None:
    """Train all learners in one pass.

    `encode` gives the hidden layers of a batch once for all learners: a frozen encoder, or a cache. Without it there is
    one learner, and its model runs its own encoder, which it trains.
    """
    layers = layers_of(learners)
    evaluate_every = steps_between(options.evaluate_every, steps.per_epoch)
    checkpoint_every = steps_between(options.checkpoint_every, steps.per_epoch)
    split = split or Splitter()
    width = cuda_graphs.PAD_TO_MULTIPLE_OF if any(one.recorded for one in learners) else PAD_TO_MULTIPLE_OF
    done = steps.epochs_done(start)
    milestones = [epoch for epoch in sorted(options.save_at) if start.step == 0 or epoch > done + 1e-9]

    def train_step(step: Step, active: Sequence[Learner]) -> None:
        shares = [processes.share(part) for windows in step.batches for part in split(windows)]
        batches = [collate(step.features, mine, multiple_of=width) for mine in shares if len(mine)]
        totals = processes.add_up_totals(Totals.of(batches))
        for batch in batches:
            batch = batch.to(processes.device)
            with Stopwatch() as encoding:
                hidden = encode(batch, layers) if encode else None
            for learner in active:
                learner.encoder_seconds += encoding.seconds
                learner.learn(batch, hidden, totals)

    if start.step == 0:
        while milestones and milestones[0] == 0:
            watcher.keep(learners, milestones.pop(0))
    for learner in learners:
        learner.model.train()
    began, windows = time.perf_counter(), 0
    with progress("training", steps.total) as advance:
        advance(start.step)
        for step in steps.after(start):
            active = [learner for learner in learners if learner.takes(step)]
            if active:
                split.retry(train_step, step, active)
            for learner in active:
                processes.add_up_gradients(learner.parameters)
                processes.average(learner.statistics if processes.count > 1 else ())
                learner.step(step.epoch)
            windows += sum(map(len, step.batches))

            last = step.number == steps.total
            due = passes(step.number, evaluate_every) or last
            safe = passes(step.number, checkpoint_every) and not last
            note = None
            if due or safe or step.number % LOG_STEPS == 0:
                note = _tell(learners, processes, watcher)
                note += f"  {windows / (time.perf_counter() - began):.0f} windows/s"
            advance(note=note)
            running = [learner for learner in learners if learner.ended is None]
            while milestones and milestones[0] <= step.epoch + 1e-9:
                watcher.keep(running, milestones.pop(0))
            if due and running:
                watcher.evaluate(running, step.number, step.epoch)
            if all(learner.ended for learner in learners):
                return
            if safe:
                watcher.checkpoint(step.position)
    if steps.total == 0:
        watcher.evaluate(learners, 0, 0.0)


def _tell(learners: Sequence[Learner], processes: Processes, watcher: Watcher) -> str:
    """Log what happened since the last time. A learner that diverged ends, and the others go on without it."""
    note = ""
    for learner in learners:
        records, problem = learner.records(processes.add_up)
        watcher.log(learner, records)
        if problem and len(learners) == 1:
            raise DivergedError(problem)
        if problem:
            learner.ended = learner.failed = problem
        if records and not note:
            note = f"loss {records[-1]['loss']:.3f}  lr {records[-1]['learning_rate']:.1e}"
    return note
