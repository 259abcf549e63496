"""Resolve names to saved models: a model folder, a run folder, the packaged reader, or a model of the hub."""

from __future__ import annotations

import os
from pathlib import Path, PurePath

from lamella.config import RunConfig
from lamella.encoder.sources import Source, find_encoder, is_model, is_saved_model, model_folder, named_folder
from lamella.errors import EncoderError, UsageError, nearest_beside
from lamella.runs import MODEL, MODELS, describe_run_without_model


def find_model(name: str) -> Source:
    """Resolve a name to the folder of a model, downloading from the hub only if this machine does not have it."""
    folder = named_folder(name)
    if saved := saved_model(name):
        return Source(name, saved, "folder")
    if os.path.isdir(folder) and (found := describe_run_without_model(folder)):
        raise UsageError(f"{name}: expected a model folder, or a run folder with a model; found {found}.")
    try:
        return find_encoder(name)
    except EncoderError as error:
        raise UsageError(
            f"model {name!r}: neither a model folder nor a run folder with a model; {error}{_nearest(folder)}"
        ) from None


def _nearest(folder: Path) -> str:
    """Return the end of a message about a model that does not exist: the one beside it with the nearest name."""
    if not os.path.isdir(folder.parent):  # False for a name that is too long, where pathlib raises
        return ""
    return nearest_beside(folder, [path.name for path in folder.parent.glob("*") if saved_model(str(path))])


def saved_model(name: str) -> Path | None:
    """Return the folder of the saved model with this name, if there is one; the hub is not asked."""
    folder = named_folder(name)
    if not os.path.isdir(folder):  # False for a name that is too long, where pathlib raises
        return None
    folder = model_folder(folder)
    return folder if is_model(folder) else None


def short_model_name(name: str) -> str:
    """Remove the folders of this machine from a model's name.

    `/runs/first/model` becomes `first`, `/runs/first/models/0.3` becomes `first@0.3`; a hub id stays as it is.
    """
    path = PurePath(name)
    if not (path.is_absolute() or name[:1] in "~." or os.path.isdir(name)):
        return name
    if path.name == MODEL:
        return path.parent.name
    if path.parent.name == MODELS and path.parent.parent.name:  # not a folder of models beside the runs
        return f"{path.parent.parent.name}@{path.name}"
    return path.name


def resolve_encoder_from(config: RunConfig, runs_folder: Path) -> RunConfig:
    """Replace `encoder.from`, a sibling run such as `"first@0.3"`, with `encoder.name`, the folder of its model."""
    if config.encoder.from_run is None:
        return config
    run, at, epoch = config.encoder.from_run.partition("@")
    folder = runs_folder / run / (f"{MODELS}/{epoch}" if at else MODEL)
    if not is_saved_model(folder):
        epochs = sorted(path.name for path in (runs_folder / run / MODELS).glob("*"))
        found = f"models at epochs {', '.join(epochs)}" if epochs else "no run of that name" if at else "none"
        advice = "train it first, with training.save_at" if at else "train it first"
        raise UsageError(f"encoder.from: expected a model at {folder}, found {found}; {advice}.")
    return config.model_copy(
        update={"encoder": config.encoder.model_copy(update={"name": str(folder), "from_run": None})}
    )
