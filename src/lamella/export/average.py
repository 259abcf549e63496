"""Write the mean of several models as one model."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lamella import registry
from lamella.decoding_options import DecodingOptions
from lamella.encoder.sources import is_model
from lamella.encoder.tensors import trained_tensors
from lamella.errors import UsageError
from lamella.files import same_file
from lamella.models.base_tokenizer import hash_tokenizer
from lamella.models.facts import AveragedFacts, Facts
from lamella.models.model import ReaderModel
from lamella.models.names import find_model, saved_model, short_model_name
from lamella.models.saved import SavedModel, check_new_model, read_saved, weights_sha256

TUNED = {"null_score_diff_threshold", "window_penalty", "calibration", "tuned_on"}  # by `lamella calibrate`
DATA = ("train", "mixture", "fraction")  # facts about the training data, which belong together
SHARED = DATA, ("dev",), ("start",)  # facts that are kept if all models have the same


def average(
    names: Sequence[str | os.PathLike[str]], folder: Path, *, half: bool = False, overwrite: bool = False
) -> ReaderModel:
    """Write a model whose trained tensors are the means of those of several models ("model soup").

    The models must be alike but for their tensors: base encoder, tuning, head and windows. The means are useful if all
    continued the training of one model. Otherwise their hidden units, and the factors of LoRA, do not correspond.

    Decoding options are those of the first model, but threshold, window penalty and calibration have their defaults:
    tuned values do not fit the mean. `half` rounds the means to fp16. `overwrite` replaces an earlier model.
    """
    paths = [os.fspath(name) for name in names]
    if len(paths) < 2:
        raise UsageError(f"average: expected at least two models, got {len(paths)}.")
    sources = [_find(path) for path in paths]
    for (first, source), (second, other) in itertools.combinations(zip(paths, sources, strict=True), 2):
        if same_file(str(source), str(other)):
            raise UsageError(f"average: expected different models, got one of them twice: {first} and {second}.")
    saved = [read_saved(source) for source in sources]
    for path, each in zip(paths[1:], saved[1:], strict=True):
        _check_fits(path, each, paths[0], saved[0])
    check_new_model(folder, sources, overwrite=overwrite)
    model = ReaderModel.load(sources[0])
    tensors = trained_tensors(model)
    totals = {name: value.detach().double() for name, value in tensors.items() if _is_averaged(name, value)}
    for path, source in zip(paths[1:], sources[1:], strict=True):
        _add(totals, path, ReaderModel.load(source), paths[0], model)
    with torch.no_grad():
        for name, total in totals.items():
            tensors[name].copy_(total / len(paths))
    model.decoding = DecodingOptions(**model.decoding.model_dump(exclude=TUNED))
    models = [
        AveragedFacts(
            model=short_model_name(path),
            sha256=weights_sha256(source),
            **{key: getattr(each.facts, key) for key in (*DATA, "mean_of")},
        )
        for path, source, each in zip(paths, sources, saved, strict=True)
    ]
    model.facts = _common_facts([each.facts for each in saved], models)
    model.save(folder, half=half, replace=overwrite)
    return model


def _find(name: str) -> Path:
    folder = find_model(name).folder
    if not is_model(folder):
        raise UsageError(
            f"average: {name}: expected a model folder of Lamella, or a run folder with a model; found another kind."
        )
    return folder


def _check_fits(name: str, saved: SavedModel, first_name: str, first: SavedModel) -> None:
    """Check that a model differs from the first one in nothing but its tensors."""
    expected, found = _base_hashes(first, saved)
    if expected != found:
        flatten = " flatten them first (lamella export MODEL --flatten DIR), or"
        on_models = any(saved_model(each.base_name) for each in (first, saved))
        raise UsageError(
            f"average: {name}: expected the base encoder of {first_name}, {first.base_name} (sha256 {expected[:12]}…), "
            f"found {saved.base_name} (sha256 {found[:12]}…);{flatten if on_models else ''} average models on one base."
        )
    own = _options(saved)
    for option, value in _options(first).items():
        if own[option] != value:
            raise UsageError(
                f"average: {name}: expected {option} = {json.dumps(value)}, as in {first_name}, found "
                f"{json.dumps(own[option])}; average models that were trained with the same options."
            )


def _base_hashes(first: SavedModel, other: SavedModel) -> tuple[str, str]:
    """Return hashes that identify the base encoders of two models: of the tensors if both are known, else of the files.

    The hash of the tensors excludes the pooler, so it does not identify the base of a head that reads it.
    """
    tensors = first.base_tensors_sha256, other.base_tensors_sha256
    if tensors[0] is None or tensors[1] is None or first.config.learner.reads_pooled:
        return first.base_sha256, other.base_sha256
    return tensors[0], tensors[1]


def _options(saved: SavedModel) -> dict[str, Any]:
    """Return the options that the models must have in common, with every default filled in."""
    tunings = [registry.complete("tuning", tuning) for tuning in saved.tunings]
    return {
        "tuning": tunings if saved.tuned_before else tunings[0],
        **{f"head.{option}": value for option, value in saved.head.items()},
        **{f"windows.{option}": value for option, value in saved.config.windows.model_dump().items()},
    }


def _is_averaged(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor can be averaged: no integers, and nothing that trained ones are relative to (PiSSA)."""
    trained = isinstance(tensor, torch.nn.Parameter) or not name.startswith("encoder.")
    return tensor.is_floating_point() and trained


def _add(totals: Mapping[str, Tensor], name: str, model: ReaderModel, first_name: str, first: ReaderModel) -> None:
    """Add the tensors of a model to the totals; check that it has the tokenizer and the fixed tensors of the first."""
    if hash_tokenizer(model.tokenizer) != hash_tokenizer(first.tokenizer):
        raise UsageError(
            f"average: {name}: expected the tokenizer of {first_name}, found another one; average models that split "
            "texts into the same tokens."
        )
    own = trained_tensors(first)
    for tensor_name, value in trained_tensors(model).items():
        if tensor_name in totals:
            totals[tensor_name].add_(value.detach())
        elif not torch.equal(value, own[tensor_name]):
            raise UsageError(
                f"average: {name}: expected {tensor_name}, which cannot be averaged, to equal that of {first_name}, "
                "found other values; average models that continued the training of one model."
            )


def _common_facts(facts: Sequence[Facts], models: Sequence[AveragedFacts]) -> Facts:
    """Return the facts that are true of the mean: data and warm start if all models share them, and all teachers."""
    shared = [keys for keys in SHARED if all(_values(each, keys) == _values(facts[0], keys) for each in facts)]
    kept = {key: getattr(facts[0], key) for keys in shared for key in keys}
    teachers = [teacher for each in facts for teacher in each.teachers]
    unique = [teacher for number, teacher in enumerate(teachers) if teacher not in teachers[:number]]
    return Facts().model_copy(update={**kept, "teachers": unique, "mean_of": list(models)})


def _values(facts: Facts, keys: Sequence[str]) -> list[Any]:
    return [getattr(facts, key) for key in keys]
