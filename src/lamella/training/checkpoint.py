"""A checkpoint: all that a pass needs to go on as if it had never stopped, in one file."""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lamella.errors import RunError
from lamella.files import TEMPORARY
from lamella.training.learner import Learner
from lamella.training.processes import Processes
from lamella.training.steps import Position

FORMAT = 3  # 2 had no seconds of the pass


def save_checkpoint(
    path: Path,
    learners: Sequence[Learner],
    position: Position,
    processes: Processes,
    *,
    pieces: int,
    histories: Mapping[str, int],
    made_from: Mapping[str, str],
    seconds: float,
) -> None:
    """Write the file under another name first: a kill leaves the last checkpoint or the new one, never a part.

    Weights are the same in all processes, random states are not. `histories` are the lengths of the learners' history
    files: what is logged after a checkpoint happens again after it is loaded, and must not stand there twice.
    `made_from` says what the run learns from, so that it does not go on with something else; `seconds` is how long the
    pass has taken until here.
    """
    random = processes.gather([[learner.randomness.state for learner in learners]])
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
        "made_from": dict(made_from),
        "seconds": seconds,
    }
    fresh = path.parent / f".{path.name}.{uuid.uuid4().hex}{TEMPORARY}"
    try:
        try:
            with fresh.open("xb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:  # torch tells of a full disk with a RuntimeError
        raise RunError(f"{path}: the checkpoint cannot be written ({error}); is the disk full?") from None


def load_checkpoint(
    path: Path, names: Sequence[str], processes: Processes, made_from: Mapping[str, str]
) -> dict[str, Any] | None:
    """The content of the file; None where there is none, or where it is of another pass of the same run."""
    if not path.is_file():
        return None
    content: dict[str, Any] | None = None
    with suppress(RuntimeError, OSError, EOFError, pickle.UnpicklingError, KeyError, ValueError):
        content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RunError(f"{path}: is damaged, or of another lamella; start the run anew with --overwrite.")
    if list(content["learners"]) != list(names):
        return None
    other = [key for key, value in made_from.items() if content["made_from"].get(key) != value]
    if other:
        raise RunError(
            f"{path}: the run began with other {' and other '.join(other)} than there are now; resume it with what it "
            "began with, or start anew with --overwrite."
        )
    if content["processes"] != processes.count:
        raise RunError(
            f"{path}: was written by {content['processes']} processes; resume it with as many. Got {processes.count}."
        )
    return content


def put_checkpoint(content: Mapping[str, Any], learners: Sequence[Learner], processes: Processes) -> Position:
    """Bring the learners to where they were."""
    for learner, random in zip(learners, content["random"][processes.rank], strict=True):
        learner.put_state(content["learners"][learner.name])
        learner.randomness.state = random
    return Position(*content["position"])
