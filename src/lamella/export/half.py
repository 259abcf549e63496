"""Write a model with its trained tensors in half precision."""

from __future__ import annotations

import os
from pathlib import Path

from lamella.config import POOLED
from lamella.encoder.identity import Rounding
from lamella.encoder.pretrained import LoadedEncoder
from lamella.encoder.sources import is_model
from lamella.encoder.tensors import parameters_of
from lamella.errors import UsageError
from lamella.files import check_output_folder
from lamella.models.base_encoder import load_encoder, stored_tokenizer
from lamella.models.base_tokenizer import hash_tokenizer
from lamella.models.model import ReaderModel


def halve(
    name: str | os.PathLike[str], folder: Path, *, rounded_base: bool = False, base_tokenizer: bool = False
) -> ReaderModel:
    """Write a model with its trained tensors rounded to fp16; add the hash of its base encoder if it has none.

    `rounded_base` records that the base is a rounded copy, so that the model also runs on the original.
    `base_tokenizer` records that the tokenizer is that of the base, and writes no tokenizer files.
    """
    check_output_folder(folder)
    model = ReaderModel.from_pretrained(name)
    if rounded_base:
        _check_rounding_possible(model, os.fspath(name))
    if model.base_tensors_sha256 is None or rounded_base or base_tokenizer:
        base = load_encoder(model.base_name)  # the model's own encoder is tuned
        model.base_tensors_sha256 = model.base_tensors_sha256 or base.tensors_sha256
        if base_tokenizer:
            model.base_tokenizer_sha256 = _hash_common_tokenizer(model, base, os.fspath(name))
        if rounded_base:
            model.base_rounding = Rounding.measure(parameters_of(base.encoder.model), model.base_name)
    model.save(folder, half=True, replace=False)
    return model


def _hash_common_tokenizer(model: ReaderModel, base: LoadedEncoder, name: str) -> str:
    """Hash the tokenizer that a model has in common with its base encoder."""
    sha256 = hash_tokenizer(model.tokenizer)
    if sha256 != hash_tokenizer(stored_tokenizer(base)):
        raise UsageError(
            f"{name}: expected the tokenizer of its base encoder {model.base_name!r}, found another one in the model; "
            "export it without --base-tokenizer."
        )
    return sha256


def _check_rounding_possible(model: ReaderModel, name: str) -> None:
    problem = ""
    if is_model(model.base_folders[0]):
        problem = "its base is a model; flatten it first (lamella export MODEL --flatten DIR)"
    elif model.original_sha256 is not None:
        problem = "its base here is the original already; use the rounded copy that it was trained on"
    elif POOLED in model.head.layers:
        problem = "it reads the pooler of its base, which is not compared with the original's"
    if problem:
        raise UsageError(f"{name}: the rounding of its base encoder cannot be recorded: {problem}.")
