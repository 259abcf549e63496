"""What an ensemble is made of: models that are to be run, and what earlier runs left in their folders."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lamella import runs
from lamella.config import DecodingOptions
from lamella.encoder.sources import is_saved_model, model_folder
from lamella.errors import RunError, UsageError
from lamella.inference.prediction_files import AnswerSet, read_answers
from lamella.inference.protocols import QAModel
from lamella.inference.stored_logits import StoredLogits, has_logits
from lamella.models.loading import Precision, load_model


@dataclass(frozen=True)
class Member:
    """One of those that answer together: a `model` to be run, or what a run has `answered` and perhaps `kept`."""

    name: str
    folders: tuple[Path, ...]
    model: QAModel | None = None
    answered: AnswerSet | None = None
    kept: StoredLogits | None = None

    @property
    def logits(self) -> QAModel | StoredLogits | None:
        """Where its logits come from."""
        return self.model or self.kept

    @property
    def decoding(self) -> DecodingOptions:
        """How it decodes; a run that kept nothing of it is taken to do what everyone does."""
        return DecodingOptions() if self.logits is None else self.logits.decoding


def open_members(names: Sequence[str], *, run: bool, precision: Precision = "auto") -> list[Member]:
    """Open everything that was named. A run with a model is run if there is something to `run` it on; else, and where
    there is no model, its predictions are taken. A folder with several runs means all of them.
    """
    names = [one for name in names for one in runs_in(name)]
    if len(names) < 2:
        raise UsageError(f"ensemble: expected at least two runs or models. Got {len(names)}.")
    members: list[Member] = []
    for name, short in zip(names, short_names(names), strict=True):
        members.append(_open(name, short, run, precision))
        _share([member.model for member in members])  # at once: two encoders of a kind are never held for long
    return members


def runs_in(name: str) -> list[str]:
    folder = Path(os.path.expanduser(name))
    _, within = (folder.is_dir() and runs.kind_of_run(folder)) or ("", [])
    return [str(folder / one) for one in within] or [name]


def _open(name: str, short: str, run: bool, precision: Precision) -> Member:
    folder = Path(os.path.expanduser(name))
    has_model = folder.is_dir() and is_saved_model(model_folder(folder))
    if (folder / runs.NBEST).is_file() and not (has_model and run):
        if (state := runs.run_state(folder)) not in ("finished", None):
            raise RunError(f"{name}: expected a run that is finished. Found one that is {state}.")
        kept = StoredLogits(folder) if has_logits(folder) else None
        return Member(short, (folder,), answered=read_answers(folder), kept=kept)
    if (folder / runs.NULL_ODDS).is_file() and not has_model:
        raise UsageError(f"{name}: tells whether there is an answer, not where: it has no texts to combine.")
    if not run:
        raise UsageError(f"{name}: expected a run with predictions, or --data, the questions to ask this model.")
    model = load_model(name, precision=precision)
    if not model.gives_text:
        raise UsageError(f"{name}: tells whether there is an answer, not where: it has no texts to combine.")
    return Member(short, model.folders, model=model)


def short_names(names: Sequence[str]) -> list[str]:
    """The last part of each path, where that tells them apart; the same one given twice is numbered."""
    last = [Path(name).name or name for name in names]
    chosen = last if len(set(last)) == len(set(names)) else list(names)
    seen: Counter[str] = Counter()
    unique = []
    for name in chosen:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return unique


def _share(models: Sequence[QAModel | None]) -> None:
    if not any(models):
        return
    from lamella.inference.one_pass import share_encoders
    from lamella.models.model import ReaderModel

    share_encoders([model for model in models if isinstance(model, ReaderModel)])
