"""Write a model with its trained tensors in half precision."""

from __future__ import annotations

import os
from pathlib import Path

from lamella.files import check_output_folder
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel


def halve(name: str | os.PathLike[str], folder: Path) -> ReaderModel:
    """Write a model with its trained tensors rounded to fp16; add the hash of its base encoder if it has none."""
    check_output_folder(folder)
    model = ReaderModel.from_pretrained(name)
    if model.base_tensors_sha256 is None:  # hash the base itself: the model's encoder is tuned
        model.base_tensors_sha256 = load_encoder(model.base_name).tensors_sha256
    model.save(folder, half=True)
    return model
