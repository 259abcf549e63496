"""A checkpoint: everything a pass needs to continue as if it had never stopped, in one file."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lamella.atomic import new_file
from lamella.errors import RunError, counted
from lamella.training.fitting.learner import Learner
from lamella.training.fitting.processes import Processes
from lamella.training.fitting.steps import BEGINNING, Position

FORMAT = 6  # 5 had the layer weights of `scalar_mix` among the decayed parameters


@dataclass(frozen=True)
class Checkpoint:
    """Where a pass continues; by default at its beginning."""

    position: Position = BEGINNING
    pieces: int = 1  # into which a batch was split to fit into memory
    histories: Mapping[str, int] = field(default_factory=dict)  # by learner: the bytes of its history file
    seconds: float = 0.0  # that the pass had trained
    learners: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # the state of each
    random: Sequence[Any] = ()  # by process, then by learner: the state of its random numbers
    threads: int | None = None  # of torch, on a CPU; they decide the order of sums

    def restore(self, learners: Sequence[Learner], processes: Processes) -> None:
        """Bring the learners to the state they had."""
        for learner, random in zip(learners, self.random[processes.rank], strict=True):
            learner.load_state(self.learners[learner.name])
            learner.random_stream.state = random


def save_checkpoint(
    path: Path,
    learners: Sequence[Learner],
    position: Position,
    processes: Processes,
    *,
    pieces: int,
    histories: Mapping[str, int],
    source_hashes: Mapping[str, str],
    seconds: float,
) -> None:
    """Write the file under another name first: a kill leaves the last checkpoint or the new one, never a part.

    Weights are the same in all processes, random states are not. `histories` are the lengths of the learners' history
    files: what is logged after a checkpoint happens again after it is loaded, and must not be logged twice.
    `source_hashes` identify what the run learns from, so that it cannot continue with something else.
    """
    random = processes.gather([[learner.random_stream.state for learner in learners]])
    if not processes.is_main:
        return
    content = {
        "format": FORMAT,
        "position": [position.step, position.epoch, position.place],
        "processes": processes.count,
        "pieces": pieces,
        "learners": {learner.name: learner.state() for learner in learners},
        "random": random,
        "histories": dict(histories),
        "made_from": dict(source_hashes),
        "seconds": seconds,
        "threads": torch.get_num_threads(),
    }
    try:
        with new_file(path) as file:
            torch.save(content, file)
    except (OSError, RuntimeError) as error:
        raise RunError(f"{path}: the checkpoint cannot be written ({_reason(error)}).") from None


def _reason(error: BaseException | None) -> str:
    """Return the error of the system behind an error: on a full disk, torch raises a RuntimeError about positions."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return (error and error.strerror) or "is the disk full?"


def load_checkpoint(
    path: Path, names: Sequence[str], processes: Processes, source_hashes: Mapping[str, str]
) -> Checkpoint | None:
    """Read the file; None where there is none, or where it belongs to another pass of the same run."""
    if not path.is_file():
        return None
    content: dict[str, Any] | None = None
    with suppress(RuntimeError, OSError, EOFError, pickle.UnpicklingError, KeyError, ValueError):
        content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RunError(
            f"{path}: is damaged, or was written by another version of lamella; start again from scratch with "
            "--overwrite."
        )
    if list(content["learners"]) != list(names):
        return None
    changed = [source for source, sha256 in source_hashes.items() if content["made_from"].get(source) != sha256]
    if changed:
        raise RunError(
            f"{path}: expected the {' and the '.join(changed)} that the run began with, got another version; resume "
            "it with the original, or start again from scratch with --overwrite."
        )
    if content["processes"] != processes.count:
        raise RunError(
            f"{path}: expected {counted(content['processes'], 'process', 'processes')}, as the run began with, got "
            f"{processes.count}; resume it with {content['processes']}."
        )
    return Checkpoint(
        position=Position(*content["position"]),
        pieces=content["pieces"],
        histories=content["histories"],
        seconds=content["seconds"],
        learners=content["learners"],
        random=content["random"],
        threads=content.get("threads"),
    )
