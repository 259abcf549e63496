"""What an ensemble is made of: models that are to be run, and what earlier runs left in their folders."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamella import runs
from lamella.config import DecodingOptions
from lamella.encoder.sources import is_saved_model, model_folder
from lamella.errors import RunError, UnreadableError, UsageError
from lamella.files import read_json
from lamella.inference.decode import Candidate, Prediction
from lamella.inference.logits import KeptLogits, has_logits
from lamella.inference.predict import Answering
from lamella.models.loading import Precision, load_model


@dataclass(frozen=True)
class Answered:
    """What a member answered: its n-best lists, and the texts that it settled on at its own threshold."""

    predictions: Mapping[str, Prediction]
    texts: Mapping[str, str]

    @classmethod
    def by(cls, decoding: DecodingOptions, predictions: Mapping[str, Prediction]) -> Answered:
        """Predictions, and what a model says to them."""
        threshold = decoding.null_score_diff_threshold
        return cls(predictions, {id: one.text(threshold) for id, one in predictions.items()})


@dataclass(frozen=True)
class Member:
    """One of those that answer together: a `model` to be run, or what a run has `answered` and perhaps `kept`."""

    name: str
    folders: tuple[Path, ...]
    model: Answering | None = None
    answered: Answered | None = None
    kept: KeptLogits | None = None

    @property
    def logits(self) -> Answering | KeptLogits | None:
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
        kept = KeptLogits(folder) if has_logits(folder) else None
        return Member(short, (folder,), answered=read_answered(folder), kept=kept)
    if (folder / runs.NULL_ODDS).is_file() and not has_model:
        raise UsageError(f"{name}: tells whether there is an answer, not where: it has no texts to combine.")
    if not run:
        raise UsageError(f"{name}: expected a run with predictions, or --data, the questions to ask this model.")
    model = load_model(name, precision=precision)
    if not model.gives_text:
        raise UsageError(f"{name}: tells whether there is an answer, not where: it has no texts to combine.")
    return Member(short, model.folders, model=model)


def read_answered(folder: Path) -> Answered:
    """The predictions of a run folder."""
    best, texts = read_json(folder / runs.NBEST), read_json(folder / runs.PREDICTIONS)
    try:
        predictions = {id: _prediction(candidates) for id, candidates in best.items()}
        return Answered(predictions, {id: str(texts[id]) for id in predictions})
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UnreadableError(
            f"{folder}: expected {runs.NBEST} with text, probability, score, start and end of every candidate, and a "
            f"text for each question in {runs.PREDICTIONS}."
        ) from None


def _prediction(found: Sequence[Mapping[str, Any]]) -> Prediction:
    candidates = tuple(
        Candidate(str(one["text"]), int(one["start"]), int(one["end"]), float(one["score"]), float(one["probability"]))
        for one in found
    )
    bare = Prediction(candidates, null_odds=0.0)
    return Prediction(candidates, null_odds=bare.null.score - bare.best_span.score)


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


def _share(models: Sequence[Answering | None]) -> None:
    if not any(models):
        return
    from lamella.inference.one_pass import share_encoders
    from lamella.models.model import ReaderModel

    share_encoders([model for model in models if isinstance(model, ReaderModel)])
