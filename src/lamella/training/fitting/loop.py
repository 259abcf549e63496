"""The training loop, in the order in which things happen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from lamella.config import TrainingOptions
from lamella.data.windows.batches import Totals, collate
from lamella.data.windows.padding import PAD_TO_MULTIPLE_OF
from lamella.errors import DivergedError
from lamella.inference.one_pass import Encode
from lamella.progress import progress
from lamella.stopwatch import Stopwatch
from lamella.training.fitting import cuda_graphs
from lamella.training.fitting.batch_splitting import Splitter
from lamella.training.fitting.interrupts import StopSignals
from lamella.training.fitting.learner import Learner, Record, layers_read_by
from lamella.training.fitting.processes import Processes
from lamella.training.fitting.steps import BEGINNING, Position, Step, Steps, interval_in_steps, is_due

LOG_STEPS = 20  # reading a loss waits for the device, so losses are read in groups


class Callbacks(Protocol):
    """What is done with a pass: the loop decides when, the callbacks do it."""

    def write_history(self, learner: Learner, records: Sequence[Record]) -> None: ...

    def evaluate(self, learners: Sequence[Learner], step: int, epoch: float) -> None:
        """Score the learners; set `ended` on those that should stop."""

    def save_models(self, learners: Sequence[Learner], epoch: float) -> None:
        """Save the models of an epoch of `save_at`; epoch 0 is before training."""

    def save_checkpoint(self, position: Position) -> None: ...


def fit(
    learners: Sequence[Learner],
    steps: Steps,
    options: TrainingOptions,
    processes: Processes,
    callbacks: Callbacks,
    *,
    encode: Encode | None = None,
    start: Position = BEGINNING,
    split: Splitter | None = None,
    stop: StopSignals | None = None,
) -> None:
    """Train all learners in one pass.

    `encode` gives the hidden layers of a batch once for all learners: a frozen encoder, or a cache. Without it there is
    one learner, whose model runs and trains its own encoder. When `stop` has received a signal, the loop finishes its
    step, writes a checkpoint and raises.
    """
    layers = layers_read_by(learners)
    evaluate_every = interval_in_steps(options.evaluate_every, steps.per_epoch)
    checkpoint_every = interval_in_steps(options.checkpoint_every, steps.per_epoch)
    split, stop = split or Splitter(), stop or StopSignals()
    # CUDA graphs are captured per shape, so widths are padded more coarsely.
    graphed = any(learner.graphed for learner in learners)
    multiple_of = cuda_graphs.PAD_TO_MULTIPLE_OF if graphed else PAD_TO_MULTIPLE_OF
    done = steps.epochs_done(start)
    milestones = [epoch for epoch in sorted(options.save_at) if start.step == 0 or epoch > done + 1e-9]

    def add_gradients(step: Step, active: Sequence[Learner]) -> None:
        """Forward and backward of all batches of one optimiser step."""
        # Each process takes its share of every batch; a batch may be split to fit into memory.
        shares = [processes.share(part) for windows in step.batches for part in split(windows)]
        batches = [collate(step.features, share, multiple_of=multiple_of) for share in shares if len(share)]
        # A loss is divided by the counts of the whole step, so that its gradients add up.
        totals = processes.sum_totals(Totals.of(batches))
        for batch in batches:
            batch = batch.to(processes.device)
            # The encoder runs once, the learners read what it gives.
            with Stopwatch() as encoding:
                hidden = encode(batch, layers) if encode else None
            for learner in active:
                learner.encoder_seconds += encoding.seconds
                learner.add_gradients(batch, hidden, totals)

    # The untrained models, if asked for.
    if start.step == 0:
        while milestones and milestones[0] == 0:
            callbacks.save_models(learners, milestones.pop(0))

    for learner in learners:
        learner.model.train()
    began, windows = time.perf_counter(), 0
    with progress("training", steps.total) as advance:
        advance(start.step)
        for step in steps.after(start):
            # Gradients of this step; on out-of-memory it is split and retried.
            active = [learner for learner in learners if learner.takes(step)]
            if active:
                split.retry(add_gradients, step, active)

            # One optimiser step per learner, with the gradients of all processes.
            trained = sum(map(len, step.batches))
            for learner in active:
                processes.sum_gradients(learner.parameters)
                processes.average(learner.running_statistics if processes.count > 1 else ())
                learner.step(step.epoch)
                learner.windows += trained
            windows += trained

            # What is due after this step. All processes stop together; the last step leaves nothing to resume.
            last = step.number == steps.total
            stopping = processes.any(stop.received is not None) and not last
            evaluation_due = is_due(step.number, evaluate_every) or last
            checkpoint_due = (is_due(step.number, checkpoint_every) and not last) or stopping

            # Losses are read only now and then.
            note = None
            if evaluation_due or checkpoint_due or step.number % LOG_STEPS == 0:
                note = _log_losses(learners, processes, callbacks)
                note += f"  {windows / (time.perf_counter() - began):.0f} windows/s"
            advance(note=note)

            # Models of `save_at`, then scores; these may end learners.
            running = [learner for learner in learners if learner.ended is None]
            while milestones and milestones[0] <= step.epoch + 1e-9:
                callbacks.save_models(running, milestones.pop(0))
            if evaluation_due and running:
                callbacks.evaluate(running, step.number, step.epoch)
            if all(learner.ended for learner in learners):
                return

            # Last, so that a resumed run need not repeat the evaluation.
            if checkpoint_due:
                callbacks.save_checkpoint(step.position)
            if stopping:
                raise stop.interruption(
                    f"training was interrupted after step {step.number} of {steps.total}; a checkpoint was written"
                )
    if steps.total == 0:
        callbacks.evaluate(learners, 0, 0.0)


def _log_losses(learners: Sequence[Learner], processes: Processes, callbacks: Callbacks) -> str:
    """Write the losses since the last time, and return a note for the progress bar.

    A learner that diverged ends, and the others go on without it; a single one raises.
    """
    note = ""
    for learner in learners:
        records, problem = learner.take_records(processes.sum)
        callbacks.write_history(learner, records)
        if problem and len(learners) == 1:
            raise DivergedError(problem)
        if problem:
            learner.ended = learner.failed = problem
        if records and not note:
            note = f"loss {records[-1]['loss']:.3f}  lr {records[-1]['learning_rate']:.1e}"
    return note
