"""Measure what the training of each learner of a pass cost, and write it into its run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lamella import runs
from lamella.scoring.cost import answering_time, model_bytes, model_cost, peak_memory, sample_window, write_cost
from lamella.training.fitting.bookkeeping import Bookkeeper
from lamella.training.fitting.learner import Learner, layers_read_by
from lamella.training.fitting.processes import Processes
from lamella.training.prepare import PreparedPass


def write_costs(
    prepared: PreparedPass,
    folders: Mapping[str, Path],
    processes: Processes,
    books: Bookkeeper,
    *,
    pass_seconds: float,
) -> None:
    """Write `cost.json` for every learner that did not fail."""
    learners = [learner for learner in prepared.learners if not learner.failed]
    if not learners:
        return
    dev, window = prepared.windows.dev, None  # with a cache the encoder does not run, not even to be measured
    if prepared.hidden_states.storage == "live":
        sampled = dev if len(dev) else prepared.windows.feed(0)
        window = sample_window(learners[0].model, sampled, layers_read_by(learners))
    for learner in learners:
        answered = books.answer_seconds.get(learner.name)
        cost = {
            **model_cost(learner.model, window),
            "model_bytes": model_bytes([folders[learner.name] / runs.MODEL]),
            "peak_memory_bytes": peak_memory(processes.device),
            **_times(learner, prepared, processes, pass_seconds),
            **(
                answering_time(answered, len(dev.examples), prepared.any_config.training.eval_batch_size)
                if answered is not None
                else {}
            ),
        }
        write_cost(folders[learner.name], cost, f1=learner.kept.get("f1"))


def _times(learner: Learner, prepared: PreparedPass, processes: Processes, pass_seconds: float) -> dict[str, Any]:
    """Return the training times; on the CPU also those of a shared encoder and of the learner's own steps."""
    times: dict[str, Any] = {"train_seconds": learner.training_seconds(pass_seconds)}
    if processes.device.type == "cpu" and prepared.hidden_states.encode is not None:
        times |= {"encoder_seconds": learner.encoder_seconds, "head_seconds": learner.head_seconds}
    return {
        **times,
        "windows_per_second": learner.windows / times["train_seconds"] if times["train_seconds"] else None,
        "pass_seconds": pass_seconds,
        "learners_in_pass": len(prepared.learners),
        "processes": processes.count,
        "hidden_states": prepared.hidden_states.storage,
    }
