"""The model folder that a tuned threshold is stored in: the model's own, or a new copy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lamella.encoder.sources import READERS, find_encoder, is_saved_model, named_folder
from lamella.errors import OutputError, UsageError
from lamella.files import is_empty, new_folder, same_file
from lamella.models.names import find_model, saved_model
from lamella.models.onnx_model import is_exported
from lamella.models.saved import read_chain
from lamella.run_file import load_config
from lamella.runs import CONFIG, run_state
from lamella.scoring.calibrate import Tuned
from lamella.validation import THRESHOLD_OVERLAP

if TYPE_CHECKING:
    from lamella.models.model import ReaderModel


def folder_to_tune(name: str, data: Sequence[str], *, out: Path | None = None, overwrite: bool = False) -> Path:
    """Return the folder to store a threshold in: `out` if given, for a copy of the model, else the model's own.

    Call it before the work starts. A model that must not or cannot be changed is refused with the way that is open,
    and so are data files that the model was trained on: its threshold would not fit new questions.
    """
    source = _source(name)
    for file in data:
        _check_not_trained_on(source, file)
    if out is not None:
        _check_copy(out, source, overwrite)
        return out
    advice = "write a copy of it with the new threshold: --out FOLDER"
    if READERS in source.parents:
        raise UsageError(f"{name}: comes with the package and is never changed; {advice}.")
    if saved_model(name) is None:
        raise UsageError(f"{name}: is a downloaded model, which is never changed; {advice}.")
    if not os.access(source, os.W_OK):
        raise UsageError(f"{source}: cannot be written; {advice}.")
    return source


def store_tuned(model: ReaderModel, tuned: Tuned, folder: Path) -> None:
    """Store a threshold in the folder that the model was loaded from; any other folder becomes a copy of it."""
    source = model.folders[0]
    if folder.resolve() == source.resolve():
        model.save_decoding(folder, tuned.decoding, tuned.report)
        return
    with new_folder(folder) as fresh:
        for path in source.iterdir():
            if path.is_file() and not path.name.startswith("."):
                shutil.copyfile(path, fresh / path.name)
        model.save_decoding(fresh, tuned.decoding, tuned.report, name=os.path.abspath(folder))


def _source(name: str) -> Path:
    """Return the folder of the Lamella model with this name."""
    folder = named_folder(name)
    if os.path.isdir(folder) and is_exported(folder):
        raise UsageError(
            f"{name}: expected a Lamella model, got an ONNX export; tune the model that it was exported from, and "
            "export it again."
        )
    source = find_model(name).folder
    if not is_saved_model(source):
        raise UsageError(
            f"{name}: expected a Lamella model folder, or a run folder that holds one, to store or copy the threshold "
            "with; a transformers checkpoint has no place for it. Print it with --dry-run, and pass it to `lamella ask "
            "--threshold`."
        )
    return source


def _check_not_trained_on(source: Path, data: str) -> None:
    config = source.parent / CONFIG
    if run_state(source.parent) is not None and config.is_file():
        trained_on = load_config(config).data.files("train")
        if any(same_file(data, path) for path in trained_on):
            raise UsageError(f"{data}: {source.parent} was trained on this file; {THRESHOLD_OVERLAP['train']}")


def _check_copy(out: Path, source: Path, overwrite: bool) -> None:
    place, taken = out.resolve(), source.resolve()
    if place == taken or place in taken.parents or taken in place.parents:
        raise OutputError(f"{out}: holds the model that is copied, or lies inside it; choose another --out.")
    if any(place == find_encoder(link.base_name).folder.resolve() for link in read_chain(source)):
        raise OutputError(f"{out}: holds the base of the model; choose another --out.")
    if not out.exists() or is_empty(out):
        return
    if not overwrite:
        raise OutputError(f"{out}: exists already; choose another --out, or pass --overwrite.")
    if not (out.is_dir() and is_saved_model(out)):
        raise OutputError(f"{out}: expected a model folder to overwrite, found other files; choose another --out.")
