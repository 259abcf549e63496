"""Train the learners of one prepared pass, from its first step to its costs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lamella import runs
from lamella.config import RunConfig
from lamella.errors import DivergedError, counted
from lamella.files import write_json
from lamella.progress import Log
from lamella.stopwatch import Stopwatch
from lamella.training.early_checks import default_metric
from lamella.training.fitting.batch_splitting import Splitter
from lamella.training.fitting.bookkeeping import Bookkeeper, describe_scores
from lamella.training.fitting.checkpoint import Checkpoint
from lamella.training.fitting.interrupts import StopSignals
from lamella.training.fitting.loop import fit
from lamella.training.fitting.processes import Processes
from lamella.training.prepare import PreparedPass
from lamella.training.training_cost import write_costs


def train_pass(
    prepared: PreparedPass,
    folders: Mapping[str, Path],
    checkpoint_path: Path,
    processes: Processes,
    *,
    checkpoint: Checkpoint | None = None,
    auto_batch: bool = False,
    stop: StopSignals,
    log: Log,
) -> None:
    """Train the learners of a pass into their open run folders, from the beginning or from a checkpoint."""
    config, steps, learners = prepared.any_config, prepared.steps, prepared.learners
    begins = checkpoint or Checkpoint()
    if checkpoint:
        checkpoint.restore(learners, processes)
        log(f"resuming after step {checkpoint.position.step} of {steps.total}")
    if processes.is_main:
        for name, folder in folders.items():
            write_json(folder / runs.CONFIG, _resolved_options(prepared.configs[name]))
            _truncate(folder / runs.HISTORY, begins.histories.get(name, 0))
    if config.training.trackers:
        processes.accelerator.init_trackers("lamella", config=_tracker_options(config))
    splitter = Splitter(begins.pieces, automatic=auto_batch, log=log)
    books = Bookkeeper(
        prepared, folders, checkpoint_path, processes, splitter=splitter, earlier_seconds=begins.seconds, log=log
    )
    _log_plan(prepared, processes, log)

    with Stopwatch() as clock, stop.held_back():
        fit(
            learners,
            steps,
            config.training,
            processes,
            books,
            encode=prepared.hidden_states.encode,
            start=begins.position,
            split=splitter,
            stop=stop,
        )
    pass_seconds = books.pass_seconds
    log(f"trained in {clock.seconds:.0f} s")
    for learner in learners:
        if learner.graphed is not None and (problem := learner.graphed.problem):
            log(f"{learner.name}: its steps could not be captured as CUDA graphs, and were slower: {problem}")
        learner.graphed = None  # it holds memory that what follows may need

    if len(prepared.windows.threshold):
        books.tune_thresholds(prepared.windows.threshold, config.data.threshold)
    if processes.is_main:
        write_costs(prepared, folders, processes, books, pass_seconds=pass_seconds)
    _log_results(prepared, log)
    if all(learner.failed for learner in learners):
        raise DivergedError(str(learners[0].failed))


def _log_plan(prepared: PreparedPass, processes: Processes, log: Log) -> None:
    """Report what will be trained, and what may surprise."""
    steps, learners = prepared.steps, prepared.learners
    together = f" for {len(learners)} learners at once" if len(learners) > 1 else ""
    together += f", {processes.count} processes" if processes.count > 1 else ""
    log(
        f"training on {counted(steps.questions, 'question')} in {counted(steps.windows, 'window')}: "
        f"{counted(steps.total, 'step')}{together}, "
        f"{learners[0].model.precision} on {processes.device.type}"
    )
    epochs = steps.total / max(1, steps.per_epoch)
    late = [epoch for epoch in prepared.any_config.training.save_at if epoch > epochs + 1e-9]
    if late:
        log(f"training.save_at: the run ends before epoch {min(late):g}; no model is saved there")
    for learner in learners:
        if times := learner.objective.extra_forwards:
            log(f"{learner.name}: its teacher runs an encoder {times} more times per batch")
        if learner.objective.remark:
            log(f"{learner.name}: {learner.objective.remark}")


def _log_results(prepared: PreparedPass, log: Log) -> None:
    metrics = prepared.any_config.training.metric_names
    for learner in prepared.learners:
        prefix = f"{learner.name}: " if len(prepared.learners) > 1 else ""
        if learner.ended:
            log(f"{prefix}ended at step {learner.steps}: {learner.ended}")
        if learner.kept:
            scores = describe_scores(learner.model, learner.kept, metrics)
            log(f"{prefix}{prepared.any_config.training.keep} at epoch {learner.kept['epoch']:g}: {scores}")


def _tracker_options(config: RunConfig) -> dict[str, Any]:
    """Return the options as trackers take them: flat, and of simple types."""
    simple = (bool, int, float, str)
    return {key: value if isinstance(value, simple) else str(value) for key, value in config.flat().items()}


def _resolved_options(config: RunConfig) -> dict[str, Any]:
    """Return all options, with the metric that selects the best checkpoint also where the task chose it."""
    options = config.model_dump(mode="json")
    options["training"]["metric"] = config.training.metric or default_metric(config.learner.task["name"])
    return options


def _truncate(path: Path, length: int) -> None:
    """Cut off the part of a history that was written after the checkpoint."""
    if path.is_file():
        with path.open("r+b") as file:
            file.truncate(length)
