"""Load any model that answers, by name: a Lamella model, a transformers checkpoint or an exported graph."""

from __future__ import annotations

import importlib.util
import os
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from lamella.encoder.sources import Source, is_model, named_folder
from lamella.environment import has_amx
from lamella.errors import LamellaError, MissingLibraryError, UnknownNameError, UsageError, shorten, warn
from lamella.graph.support import NoGraphError
from lamella.models.names import find_model
from lamella.models.onnx_model import OnnxModel, is_exported, read_export
from lamella.runs import MODEL, run_state

if TYPE_CHECKING:
    import torch

    from lamella.models.model import ReaderModel
    from lamella.models.shared_encoder import SharedEncoders, SharedReader
    from lamella.models.torch_encoders import TorchEncoders, TorchReader
    from lamella.models.transformers_model import StockModel

Backend = Literal["auto", "torch", "onnx"]
Precision = Literal["auto", "fp32", "bf16", "fp16", "int8"]

# The files that Linux has for the GPUs of NVIDIA and AMD, and under Windows' Linux.
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def load_model(
    name: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    precision: Precision = "auto",
    backend: Backend = "auto",
    threads: int | None = None,
    inference_only: bool = False,
    few_questions: bool = False,
) -> ReaderModel | StockModel | OnnxModel:
    """Load a model folder, a run folder, an exported folder or a question answering checkpoint of transformers.

    `inference_only` merges LoRA and IA³ into the encoder's weights and, in half precision, keeps these weights rounded:
    up to twice as fast as rounding them for every batch, as training does. Scores then equal those of training only up
    to rounding, and the model cannot be saved.

    On a CPU in fp32, `backend="auto"` runs the model on onnxruntime, without torch, as a graph that is made from the
    folder and kept in the user's cache. It uses torch for other devices and half precision, if this machine has a GPU,
    and, with a warning, for a model that has no graph. With `precision="auto"`, it also uses torch, if installed, on a
    CPU with AMX, where bf16 is twice as fast, but not for `few_questions`: importing torch takes longer than it saves.
    `precision="int8"` is for onnxruntime alone: a model without a graph is refused. Pass `backend="torch"` to get a
    ReaderModel or a StockModel always.

    `threads` applies to the session of onnxruntime; for torch, which has one setting per process, it applies to the
    whole process. A model of an unfinished run is loaded with a warning.
    """
    if not isinstance(name, str | os.PathLike):
        raise UsageError(f"model: expected the name or the folder of a model, got {name!r}.")
    for option, value, known in (("backend", backend, Backend), ("precision", precision, Precision)):
        if value not in get_args(known):
            raise UnknownNameError(option, value, get_args(known))
    if threads is not None and (not isinstance(threads, Integral) or threads < 1):
        raise UsageError(f"threads: expected a whole number of at least 1, got {shorten(threads)}.")
    folder = named_folder(os.fspath(name))
    if os.path.isdir(folder) and is_exported(folder):
        return _load_exported(folder, device, precision, backend, threads=threads, few_questions=few_questions)
    source = find_model(os.fspath(name))
    _warn_of_unfinished_run(source.folder)
    if backend == "torch" and precision == "int8":
        raise UsageError(f"{os.fspath(name)}: precision 'int8' needs backend 'onnx' or 'auto', got 'torch'.")
    only_onnx = backend == "onnx" or precision == "int8"
    if only_onnx:
        check_onnx_options(os.fspath(name), device, precision)
    if only_onnx or (backend == "auto" and suits_onnx(device, precision, few_questions)):
        from lamella.models.graph_model import load_as_graph

        try:
            return load_as_graph(
                source,
                precision="int8" if precision == "int8" else "fp32",
                threads=threads,
                few_questions=few_questions,
            )
        except NoGraphError as reason:
            problem = f"{os.fspath(name)}: no ONNX graph can be made from this model: {reason}"
        if precision == "int8":
            raise UsageError(f"{problem}; export it with --onnx and --int8, or choose another precision.")
        if backend == "onnx":
            raise UsageError(f"{problem}; load it with backend 'torch'.")
        if importlib.util.find_spec("torch") is None:
            raise MissingLibraryError(f"{problem}; it", ["torch"])
        model = _load_torch(source, device, precision, threads, inference_only)
        warn(f"{problem}; it runs on torch, which takes longer to start.")  # now: damage has been reported as an error
        return model
    return _load_torch(source, device, precision, threads, inference_only)


def load_shared(name: str | os.PathLike[str], encoders: SharedEncoders | TorchEncoders) -> SharedReader | TorchReader:
    """Load a model that shares its base encoder with others; raise NoGraphError, with the reason, if it cannot."""
    folder = named_folder(os.fspath(name))
    if os.path.isdir(folder) and is_exported(folder):
        raise NoGraphError("it is an exported graph")
    source = find_model(os.fspath(name))
    _warn_of_unfinished_run(source.folder)
    return encoders.reader(source)


def torch_if_installed(name: str | os.PathLike[str], precision: Precision) -> Backend:
    """Return the backend for callers that prefer torch: to share an encoder, or to repeat a result up to rounding."""
    folder = named_folder(os.fspath(name))
    only_onnx = precision == "int8" or (os.path.isdir(folder) and is_exported(folder))
    return "auto" if only_onnx or importlib.util.find_spec("torch") is None else "torch"


def _load_exported(folder: Path, device: Any, precision: str, backend: str, **options: Any) -> OnnxModel:
    if backend == "torch":
        raise UsageError(
            f"{folder}: an ONNX export cannot run on backend 'torch'; load the model it was exported from."
        )
    config = read_export(folder)
    if precision not in ("auto", config.precision):
        raise UsageError(f"{folder}: this ONNX export is in {config.precision}, got precision {precision!r}.")
    check_onnx_options(str(folder), device, precision)
    return OnnxModel.open(folder, config, **options)


def check_onnx_options(name: str, device: Any, precision: str) -> None:
    """Raise UsageError if a model cannot run on onnxruntime as requested."""
    if device is not None and str(device) != "cpu":
        raise UsageError(f"{name}: an ONNX graph runs on the CPU only, got device {str(device)!r}.")
    if precision not in ("auto", "fp32", "int8"):
        raise UsageError(f"{name}: backend 'onnx' computes in fp32 or int8, got precision {precision!r}.")


def suits_onnx(device: Any, precision: str, few_questions: bool = False) -> bool:
    """Return whether a model that may run anywhere should run on onnxruntime."""
    if precision not in ("auto", "fp32") or importlib.util.find_spec("onnxruntime") is None:
        return False
    if device is not None and str(device) != "cpu":
        return False
    if precision == "auto" and not few_questions and _torch_is_faster():
        return False
    return device is not None or not _has_gpu()


def _torch_is_faster() -> bool:
    """Return whether torch answers many questions faster than onnxruntime on this machine's CPU: in bf16 with AMX."""
    return has_amx() and importlib.util.find_spec("torch") is not None


def _has_gpu() -> bool:
    """Return whether torch would use a GPU of this machine; torch is only imported if the system knows of one."""
    if not any(map(os.path.exists, GPU_DEVICES)) or importlib.util.find_spec("torch") is None:
        return False
    from lamella.encoder.device import choose_device

    return choose_device().type != "cpu"


def _has_graph(source: Source) -> bool:
    from lamella.models.graph_model import read_recipe

    try:
        read_recipe(source)
    except (NoGraphError, LamellaError):
        return False
    return True


def _load_torch(
    source: Source, device: Any, precision: Precision, threads: int | None, inference_only: bool
) -> ReaderModel | StockModel:
    if importlib.util.find_spec("torch") is None:
        advice = "; on a CPU in fp32 this model needs none" if _has_graph(source) else ""
        raise MissingLibraryError(f"{source.name}: backend 'torch'", ["torch"], advice=advice)

    import torch

    from lamella.encoder.device import choose_precision, find_device
    from lamella.models.model import ReaderModel
    from lamella.models.transformers_model import StockModel

    if threads is not None:
        torch.set_num_threads(threads)
    place = find_device(device)
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
            f"{run}: the training run is {state}, so this is not its final model; continue it with "
            "lamella train … --resume."
        )


def _prepare_for_inference(model: ReaderModel | StockModel) -> None:

    from lamella.encoder.device import HALF_TYPES, round_parameters
    from lamella.encoder.families import FAMILIES
    from lamella.encoder.fused_linear import fuse_products
    from lamella.encoder.tuning import merge
    from lamella.models.model import ReaderModel

    encoder = model.encoder.model if isinstance(model, ReaderModel) else model.model
    if isinstance(model, ReaderModel):
        model.counted = model.count_parameters()
        model.inference_only = bool(merge(model.encoder)) or model.precision in HALF_TYPES
    if model.precision in HALF_TYPES and encoder.config.model_type in FAMILIES:  # others may need fp32 somewhere
        round_parameters(encoder, model.precision)
        if model.device.type == "cpu":
            fuse_products(encoder)
        model.rounded = True
    if encoder.config.model_type == "deberta-v2":
        from lamella.encoder.fast_deberta import keep_positions

        keep_positions(encoder)
