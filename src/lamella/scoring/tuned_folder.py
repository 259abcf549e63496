"""The model folder that a tuned threshold is stored in: the model's own, or a new copy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lamella.encoder.sources import READERS, is_saved_model, named_folder
from lamella.errors import UsageError
from lamella.files import locked, new_folder, read_text, same_file
from lamella.models.card import with_threshold
from lamella.models.names import find_model, saved_model
from lamella.models.onnx_model import is_exported
from lamella.models.saved import CARD, check_new_model, read_saved, write_measured
from lamella.run_file import load_config
from lamella.runs import CONFIG, run_state
from lamella.scoring.calibrate import Tuned
from lamella.validation import THRESHOLD_OVERLAP


def folder_to_tune(name: str, data: Sequence[str], *, out: Path | None = None, overwrite: bool = False) -> Path:
    """Return the folder to store a threshold in: `out` if given, for a copy of the model, else the model's own.

    Call it before the work starts. A model that must not or cannot be changed is refused with the way that is open,
    and so are data files that the model was trained on: its threshold would not fit new questions.
    """
    source = _source(name)
    for file in data:
        _check_not_trained_on(source, file)
    if out is not None:
        check_new_model(out, [source], overwrite=overwrite)
        return out
    advice = "write a copy of it with the new threshold: --out FOLDER"
    if READERS in source.parents:
        raise UsageError(f"{name}: comes with the package and is never changed; {advice}.")
    if saved_model(name) is None:
        raise UsageError(f"{name}: is a downloaded model, which is never changed; {advice}.")
    if not os.access(source, os.W_OK):
        raise UsageError(f"{source}: cannot be written; {advice}.")
    return source


def store_tuned(source: Path, tuned: Tuned, folder: Path, *, overwrite: bool = False) -> None:
    """Store a threshold in the folder of the model, `source`, and on its card; another folder becomes a copy of it.

    A folder that another process has written in the meantime is refused without `overwrite`.
    """
    if folder.resolve() == source.resolve():
        with locked(folder, advice="wait for it, or write a copy of the model: --out FOLDER"):
            _write(source, tuned, os.path.abspath(folder))
        return
    with new_folder(folder, replace=overwrite) as fresh:
        for path in source.iterdir():
            if path.is_file() and not path.name.startswith("."):
                shutil.copyfile(path, fresh / path.name)
        _write(fresh, tuned, os.path.abspath(folder))


def _write(folder: Path, tuned: Tuned, name: str) -> None:
    saved = read_saved(folder, check_parts=False)
    saved = replace(
        saved,
        config=saved.config.model_copy(update={"decoding": tuned.decoding}),
        facts=saved.facts.model_copy(update={"calibrated": tuned.report}),
    )
    card = read_text(folder / CARD) if (folder / CARD).is_file() else ""
    write_measured(folder, saved, card=with_threshold(card, saved, name))


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
        trained_on = load_config(config, check_parts=False).data.files("train")
        if any(same_file(data, path) for path in trained_on):
            raise UsageError(f"{data}: {source.parent} was trained on this file; {THRESHOLD_OVERLAP['train']}")
