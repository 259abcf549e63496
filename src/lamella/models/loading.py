"""Models that answer, found by name: our own, those of transformers, and exported ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from lamella.encoder.sources import find_encoder, is_saved_model, model_folder, named_folder
from lamella.errors import EncoderError, UnknownNameError, UsageError, one_line
from lamella.models.onnx_model import OnnxModel, is_exported
from lamella.runs import kind_of_run, run_state

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
    lean: bool = False,
) -> ReaderModel | StockModel | OnnxModel:
    """A model folder, a run folder or an exported one of ours, or a question answering model of transformers.

    A `lean` model is for answers alone. What LoRA or IA³ learnt is merged into its encoder's weights, and in half
    precision it holds these rounded, a quarter faster than to round them for every batch, as training does. What
    training scored is then met only but for rounding, and it cannot be saved.

    An exported folder is run by onnxruntime and needs no torch. `threads` are those of its own; of torch, which has one
    number for the whole process, those of everything.
    """
    for what, value, known in (("backend", backend, Backend), ("precision", precision, Precision)):
        if value not in get_args(known):
            raise UnknownNameError(what, value, get_args(known))
    if threads is not None and threads < 1:
        raise UsageError(f"threads: expected at least 1. Got {threads}.")
    folder = named_folder(os.fspath(name))
    if os.path.isdir(folder) and is_exported(folder):
        return _load_exported(folder, device, precision, backend, threads)
    if backend == "onnx":
        raise UsageError(
            f"{os.fspath(name)}: expected an exported model for backend 'onnx'. Found none; make one with: "
            f"lamella export {os.fspath(name)} --onnx DIR"
        )
    import torch

    from lamella.encoder.fused_linear import fuse_products
    from lamella.encoder.precision import HALVES, choose_device, choose_precision
    from lamella.encoder.tuning import merge
    from lamella.models.model import ReaderModel

    if threads is not None:
        torch.set_num_threads(threads)
    try:
        place = choose_device() if device is None else torch.empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:  # no such device, or none that this torch was built for
        raise UsageError(f"device: {str(device)!r} cannot be used here: {one_line(error)}.") from None
    model = _load(os.fspath(name)).to(place)
    model.precision = choose_precision(precision, place)
    if lean and isinstance(model, ReaderModel):
        model.lean = bool(merge(model.encoder)) or model.precision in HALVES
    if lean and model.precision in HALVES:
        encoder = model.encoder if isinstance(model, ReaderModel) else model.model
        torch.nn.Module.to(encoder, HALVES[model.precision])  # transformers' own is not typed
        if place.type == "cpu":
            fuse_products(encoder)
        model.precision = "fp32"  # nothing is left to be rounded
    return model


def _load_exported(folder: Path, device: Any, precision: str, backend: str, threads: int | None) -> OnnxModel:
    if backend == "torch":
        raise UsageError(f"{folder}: was exported to ONNX, which torch does not run; load the model it was made from.")
    if device is not None and str(device) != "cpu":
        raise UsageError(f"{folder}: was exported to ONNX and runs on the CPU. Got device {str(device)!r}.")
    if precision not in ("auto", "fp32"):
        raise UsageError(f"{folder}: was exported to ONNX and keeps the precision of its file. Got {precision!r}.")
    return OnnxModel.load(folder, threads=threads)


def _load(name: str) -> ReaderModel | StockModel:
    from lamella.models.model import ReaderModel
    from lamella.models.transformers_model import StockModel

    folder = named_folder(name)
    if os.path.isdir(folder) and is_saved_model(model_folder(folder)):
        return ReaderModel.load(folder)
    state = run_state(folder) if os.path.isdir(folder) else None
    if state:
        _, within = kind_of_run(folder) or ("", [])
        found = f"several runs; name one of them: {', '.join(within)}" if within else f"a run that is {state}"
        raise UsageError(f"{name}: expected a model folder, or a run folder with one. Found {found}.")
    try:
        source = find_encoder(name)
    except EncoderError as error:
        raise UsageError(
            f"model {name!r}: is neither a model folder nor a run folder that holds one; {error}"
        ) from None
    return ReaderModel.load(source.folder) if is_saved_model(source.folder) else StockModel.load(source)
