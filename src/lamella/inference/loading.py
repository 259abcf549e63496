"""Models that answer, found by name: our own, those of transformers, and exported ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lamella.encoder.sources import find_encoder, is_saved_model, model_folder
from lamella.errors import EncoderError, UsageError
from lamella.runs import run_state

if TYPE_CHECKING:
    import torch

    from lamella.inference.model import ReaderModel
    from lamella.inference.stock import StockModel

Precision = Literal["auto", "fp32", "bf16", "fp16"]


def load_model(
    name: str | os.PathLike[str], *, device: str | torch.device | None = None, precision: Precision = "auto"
) -> ReaderModel | StockModel:
    """A model folder or a run folder of ours, or a folder or hub id of a question answering model of transformers."""
    import torch

    from lamella.encoder.precision import choose_device, choose_precision

    place = choose_device() if device is None else torch.device(device)
    model = _load(os.fspath(name)).to(place)
    model.precision = choose_precision(precision, place)
    return model


def _load(name: str) -> ReaderModel | StockModel:
    from lamella.inference.model import ReaderModel
    from lamella.inference.stock import StockModel

    folder = Path(os.path.expanduser(name))
    if os.path.isdir(folder) and is_saved_model(model_folder(folder)):
        return ReaderModel.load(folder)
    state = run_state(folder) if os.path.isdir(folder) else None
    if state:
        raise UsageError(f"{name}: expected a model folder, or a run folder with one. Found a run that is {state}.")
    try:
        source = find_encoder(name)
    except EncoderError as error:
        raise UsageError(
            f"model {name!r}: is neither a model folder nor a run folder that holds one; {error}"
        ) from None
    return ReaderModel.load(source.folder) if is_saved_model(source.folder) else StockModel.load(source)
