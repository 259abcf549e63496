"""Load any model that answers, by name: a Lamella model, a transformers checkpoint or an exported graph."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from lamella.encoder.sources import is_model, named_folder
from lamella.errors import MissingLibraryError, UnknownNameError, UsageError, one_line, warn
from lamella.models.names import find_model
from lamella.models.onnx_model import OnnxModel, is_exported
from lamella.runs import MODEL, run_state

if TYPE_CHECKING:
    import torch

    from lamella.models.model import ReaderModel
    from lamella.models.transformers_model import StockModel

Backend = Literal["auto", "torch", "onnx"]
Precision = Literal["auto", "fp32", "bf16", "fp16"]


def load_model(
    name: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    precision: Precision = "auto",
    backend: Backend = "auto",
    threads: int | None = None,
    inference_only: bool = False,
) -> ReaderModel | StockModel | OnnxModel:
    """Load a model folder, a run folder, an exported folder or a question answering checkpoint of transformers.

    `inference_only` merges LoRA and IA³ into the encoder's weights and, in half precision, keeps these weights rounded:
    a quarter faster than rounding them for every batch, as training does. Scores then equal those of training only up
    to rounding, and the model cannot be saved.

    An exported folder runs on onnxruntime and needs no torch. `threads` applies to its own session; for torch, which
    has one setting per process, it applies to the whole process. A model of an unfinished run is loaded with a warning.
    """
    for option, value, known in (("backend", backend, Backend), ("precision", precision, Precision)):
        if value not in get_args(known):
            raise UnknownNameError(option, value, get_args(known))
    if threads is not None and threads < 1:
        raise UsageError(f"threads: expected at least 1, got {threads}.")
    folder = named_folder(os.fspath(name))
    if os.path.isdir(folder) and is_exported(folder):
        return _load_exported(folder, device, precision, backend, threads)
    if backend == "onnx":
        raise UsageError(
            f"{os.fspath(name)}: backend 'onnx' expects an exported model, found none; create one with: "
            f"lamella export {os.fspath(name)} --onnx DIR"
        )
    return _load_torch(os.fspath(name), device, precision, threads, inference_only)


def _load_exported(folder: Path, device: Any, precision: str, backend: str, threads: int | None) -> OnnxModel:
    if backend == "torch":
        raise UsageError(
            f"{folder}: an ONNX export cannot run on backend 'torch'; load the model it was exported from."
        )
    if device is not None and str(device) != "cpu":
        raise UsageError(f"{folder}: an ONNX export runs on the CPU only, got device {str(device)!r}.")
    if precision not in ("auto", "fp32"):
        raise UsageError(f"{folder}: an ONNX export has the precision of its file, got precision {precision!r}.")
    return OnnxModel.load(folder, threads=threads)


def _load_torch(
    name: str, device: Any, precision: Precision, threads: int | None, inference_only: bool
) -> ReaderModel | StockModel:
    if importlib.util.find_spec("torch") is None:
        advice = "; a model exported with `lamella export --onnx` runs without it"
        raise MissingLibraryError("this model", ["torch"], advice=advice)

    import torch

    from lamella.encoder.device import choose_device, choose_precision
    from lamella.models.model import ReaderModel
    from lamella.models.transformers_model import StockModel

    if threads is not None:
        torch.set_num_threads(threads)
    try:
        place = choose_device() if device is None else torch.empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:  # no such device, or this torch was built without support for it
        raise UsageError(f"device: {str(device)!r} cannot be used here: {one_line(error)}.") from None
    source = find_model(name)
    _warn_of_unfinished_run(source.folder)
    saved = is_model(source.folder)
    model = (ReaderModel.load(source.folder) if saved else StockModel.load(source)).to(place)
    model.precision = choose_precision(precision, place)
    if inference_only:
        _prepare_for_inference(model)
    return model


def _warn_of_unfinished_run(folder: Path) -> None:
    run = folder.parent
    state = run_state(run) if folder.name == MODEL else None
    if state not in (None, "finished"):
        warn(
            f"{run}: the training run is {state}, so this is its best model so far, not its last; continue it with "
            "lamella train … --resume."
        )


def _prepare_for_inference(model: ReaderModel | StockModel) -> None:
    import torch

    from lamella.encoder.device import HALF_TYPES
    from lamella.encoder.fused_linear import fuse_products
    from lamella.encoder.tuning import merge
    from lamella.models.model import ReaderModel

    encoder = model.encoder.model if isinstance(model, ReaderModel) else model.model
    if isinstance(model, ReaderModel):
        model.inference_only = bool(merge(model.encoder)) or model.precision in HALF_TYPES
    if model.precision in HALF_TYPES:
        torch.nn.Module.to(encoder, HALF_TYPES[model.precision])  # the method of transformers has no types
        if model.device.type == "cpu":
            fuse_products(encoder)
        model.precision = "fp32"  # the weights are rounded already
    if encoder.config.model_type == "deberta-v2":
        from lamella.encoder.fast_deberta import keep_positions

        keep_positions(encoder)
