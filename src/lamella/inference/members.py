"""The members of an ensemble: models to run, and the answers of earlier runs."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lamella import runs
from lamella.decoding_options import DecodingOptions
from lamella.encoder.sources import is_saved_model, model_folder
from lamella.errors import RunError, UsageError
from lamella.files import same_file
from lamella.inference.model_record import model_record
from lamella.inference.prediction_files import AnswerSet, read_answers, read_decisions
from lamella.inference.protocols import QAModel
from lamella.inference.stored_logits import StoredLogits, has_logits
from lamella.models.loading import Precision, load_model, torch_if_installed
from lamella.models.onnx_model import OnnxModel


@dataclass(frozen=True)
class Member:
    """A member of an ensemble: a `model` to run, or the `answers` of a run, perhaps with its `stored_logits`."""

    name: str
    folders: tuple[Path, ...]
    model: QAModel | None = None
    answers: AnswerSet | None = None
    stored_logits: StoredLogits | None = None
    gives_text: bool = True  # False if it only decides whether there is an answer

    @property
    def logits(self) -> QAModel | StoredLogits | None:
        """The source of its logits."""
        return self.model or self.stored_logits

    @property
    def decoding(self) -> DecodingOptions:
        """Its decoding options; the defaults for a run without logits, which does not record them."""
        return DecodingOptions() if self.logits is None else self.logits.decoding


def open_members(names: Sequence[str], *, run: bool, precision: Precision = "auto") -> list[Member]:
    """Open runs and models by name.

    With `run`, the model of a run folder is loaded, to be run; otherwise, or without a model, its predictions are
    read. A folder that holds several runs means all of them. The same member twice, also as a copy of a model, is
    refused: it would count double.
    """
    names = [path for name in names for path in _expand_runs(name)]
    if len(names) < 2:
        raise UsageError(f"ensemble: expected at least two runs or models, got {len(names)}.")
    for first, second in itertools.combinations(names, 2):
        if same_file(first, second):
            raise UsageError(f"ensemble: {first} and {second} are the same reader; name each member once.")
    members: list[Member] = []
    opened: dict[str, str] = {}  # the names of the models, by their hashes
    for name, short in zip(names, short_names(names), strict=True):
        members.append(_open(name, short, run, precision))
        _check_new(members[-1].model, name, opened)
        _check_one_kind(members)
        _share_encoders([member.model for member in members])  # at once, so that memory never holds many encoders
    return members


def short_names(names: Sequence[str]) -> list[str]:
    """Return the last part of each path if that is unambiguous."""
    last = [Path(name).name or name for name in names]
    return last if len(set(last)) == len(names) else list(names)


def _check_new(model: QAModel | None, name: str, opened: dict[str, str]) -> None:
    if model is None:
        return
    record = model_record(name, model)
    identity = json.dumps([record.get("sha256", name), record.get("base"), record.get("tuning")])
    if identity in opened:
        raise UsageError(f"ensemble: {opened[identity]} and {name} hold the same model; name each member once.")
    opened[identity] = name


def _expand_runs(name: str) -> list[str]:
    folder = Path(os.path.expanduser(name))
    _, inner = (folder.is_dir() and runs.kind_of_run(folder)) or ("", [])
    return [str(folder / run) for run in inner] or [name]


def _open(name: str, short: str, run: bool, precision: Precision) -> Member:
    folder = Path(os.path.expanduser(name))
    has_model = folder.is_dir() and is_saved_model(model_folder(folder))
    if (folder / runs.NBEST).is_file() and not (has_model and run):
        _check_finished(folder, name)
        logits = StoredLogits(folder) if has_logits(folder) else None
        return Member(short, (folder,), answers=read_answers(folder), stored_logits=logits)
    if (folder / runs.NULL_ODDS).is_file() and not (has_model and run):
        _check_finished(folder, name)
        return Member(short, (folder,), answers=read_decisions(folder), gives_text=False)
    if not run:
        raise UsageError(f"{name}: expected a run with predictions; to run this model, pass the questions with --data.")
    backend = torch_if_installed(name, precision)  # in torch, members share an encoder
    model = load_model(name, precision=precision, backend=backend)
    return Member(short, model.folders, model=model, gives_text=model.gives_text)


def _check_finished(folder: Path, name: str) -> None:
    if (state := runs.run_state(folder)) not in ("finished", None):
        raise RunError(f"{name}: expected a finished run, got one that is {state}.")


def _check_one_kind(members: Sequence[Member]) -> None:
    """Check that all members find answers, or all only decide whether there is one."""
    finding, deciding = ([member.name for member in members if member.gives_text is gives] for gives in (True, False))
    if finding and deciding:
        raise UsageError(
            f"ensemble: expected members of one kind, got {', '.join(deciding)}, which only "
            f"{'decides' if len(deciding) == 1 else 'decide'} whether there is an answer, and {', '.join(finding)}, "
            f"which {'finds' if len(finding) == 1 else 'find'} it; combine each kind alone."
        )


def _share_encoders(models: Sequence[QAModel | None]) -> None:
    if all(model is None or isinstance(model, OnnxModel) for model in models):
        return
    from lamella.inference.one_pass import share_encoders
    from lamella.models.model import ReaderModel

    share_encoders([model for model in models if isinstance(model, ReaderModel)])
