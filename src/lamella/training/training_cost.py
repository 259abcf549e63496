"""What the training of each learner of a pass cost, into its run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lamella import runs
from lamella.scoring.cost import answering_time, model_bytes, model_cost, peak_memory, sample_window, write_cost
from lamella.training.bookkeeping import PassWatcher
from lamella.training.learner import Learner, layers_of
from lamella.training.prepare import Prepared
from lamella.training.processes import Processes


def write_costs(
    run: Prepared, folders: Mapping[str, Path], processes: Processes, watcher: PassWatcher, *, pass_seconds: float
) -> None:
    """Write `cost.json` for every learner that did not fail."""
    learners = [learner for learner in run.learners if not learner.failed]
    if not learners:
        return
    window = None  # hidden states from a cache: the encoder is not run, not even to be counted
    if run.made_from["hidden states"] == "live":
        window = sample_window(learners[0].model, run.dev if len(run.dev) else run.feed(0), layers_of(learners))
    for learner in learners:
        answered = watcher.answering.get(learner.name)
        cost = {
            **model_cost(learner.model, window),
            "model_bytes": model_bytes([folders[learner.name] / runs.MODEL]),
            "peak_memory_bytes": peak_memory(processes.device),
            **_times(learner, run, processes, pass_seconds),
            **(
                answering_time(answered, len(run.dev.examples), run.any_config.training.eval_batch_size)
                if answered is not None
                else {}
            ),
        }
        write_cost(folders[learner.name], cost, f1=learner.best.get("f1"))


def _times(learner: Learner, run: Prepared, processes: Processes, pass_seconds: float) -> dict[str, Any]:
    """Training as if this learner were alone: the encoder's passes, which it may share, and its own steps.

    A GPU works on while Python waits for nothing, so that on one only the time of the whole pass can be told.
    """
    apart: dict[str, Any] = {"train_seconds": pass_seconds}
    if processes.device.type == "cpu":
        seconds = learner.encoder_seconds + learner.head_seconds
        apart = {"train_seconds": seconds}
        if run.encode is not None:
            apart |= {"encoder_seconds": learner.encoder_seconds, "head_seconds": learner.head_seconds}
    windows = learner.windows * processes.count
    return {
        **apart,
        "windows_per_second": windows / apart["train_seconds"] if apart["train_seconds"] else None,
        "pass_seconds": pass_seconds,
        "learners_in_pass": len(run.learners),
        "processes": processes.count,
        "hidden_states": run.made_from["hidden states"],
    }
