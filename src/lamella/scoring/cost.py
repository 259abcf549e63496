"""The cost of a reader, `cost.json` of a run folder: parameters, size, time, memory, floating-point operations."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lamella import runs
from lamella.data.examples import Example
from lamella.data.windows.features import Features, featurise
from lamella.data.windows.padding import pad
from lamella.errors import counted
from lamella.files import write_json
from lamella.graph.tuned_tensors import ParameterCounts
from lamella.models.onnx_model import OnnxModel

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

    from lamella.data.windows.batches import Batch
    from lamella.encoder.encoder import HiddenStates
    from lamella.inference.protocols import QAModel
    from lamella.models.model import ReaderModel

STATUS = Path("/proc/self/status")  # where Linux has the peak memory of this process
SAMPLE = 200  # fewest questions whose windows estimate the mean length of all; of fewer questions, all count
WEIGHTS = (".safetensors", ".onnx", ".data", ".bin")  # suffixes of files with a model's weights


def write_cost(folder: Path, cost: dict[str, Any], *, f1: float | None) -> None:
    """Write the cost of a run, with the efficiency of its F1."""
    write_json(folder / runs.COST, {**cost, "efficiency": efficiency(f1, cost.get("trainable_parameters"))})


def efficiency(f1: float | None, trained: int | None) -> float | None:
    """Return (F1 - 50) / log10(N) for N trained parameters, after Hulburd: the F1 above chance that they buy."""
    if f1 is None or trained is None or trained < 2:
        return None
    return (f1 - 50) / math.log10(trained)


@dataclass(frozen=True)
class SampleWindow:
    """A window to count operations with, and its hidden states."""

    batch: Batch
    tokens: int
    hidden: HiddenStates
    encoder_flops: int


def model_cost(model: ReaderModel, window: SampleWindow | None, *, training: bool = True) -> dict[str, Any]:
    """Return the parameters, device and precision of a torch model, and with a `window` its operations.

    The model is left unchanged: no random number is drawn, and no gradient remains.
    """
    cost: dict[str, Any] = {
        **_parameters(model.count_parameters()),
        "device": device_name(model.device),
        "precision": model.precision,
    }
    if window is not None:
        cost |= _operations(model, window, training=training)
    return cost


def cost_of_answers(model: QAModel, examples: Sequence[Example], seconds: float, batch_size: int) -> dict[str, Any]:
    """Return the cost of answering with any kind of model, and of the model itself as far as it is known."""
    device: Any = getattr(model, "device", None)  # an ONNX graph has none
    cost: dict[str, Any] = {"device": "cpu"}
    if isinstance(model, OnnxModel):
        cost = {
            **_parameters(model.count_parameters()),
            "device": _cpu(model.threads),
            "precision": model.precision,
        }
    elif device is not None:
        from lamella.models.model import ReaderModel

        cost = {"device": device_name(device)}
        if isinstance(model, ReaderModel):
            sample = examples[:: max(1, len(examples) // SAMPLE)]  # evenly spaced: paragraphs of an article are alike
            features = featurise(sample, model.tokenizer, model.windows)
            cost = model_cost(model, sample_window(model, features) if len(features) else None, training=False)
    return {
        **cost,
        "model_bytes": model_bytes(model.folders),
        "peak_memory_bytes": peak_memory(device),
        **answering_time(seconds, len(examples), batch_size),
    }


def answering_time(seconds: float, questions: int, batch_size: int) -> dict[str, Any]:
    """Return the time from windows to logits: without making windows, and without decoding."""
    return {"inference_seconds_per_1000": 1000 * seconds / max(1, questions), "inference_batch_size": batch_size}


def model_bytes(folders: Sequence[Path]) -> int | None:
    """Return the size of a saved model's weight files: the trained weights, without the base encoder."""
    sizes = [
        path.stat().st_size for folder in folders[:1] if folder.is_dir() for path in folder.iterdir()
        if path.name.endswith(WEIGHTS)
    ]  # fmt: skip
    return sum(sizes) if sizes else None


def peak_memory(device: Any = None) -> int | None:
    """Return the peak memory of this process in bytes: on its GPU if `device` is one, otherwise in main memory."""
    if device is not None and device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    with suppress(OSError, IndexError, ValueError):  # Linux; `ru_maxrss` counts the process that started this one, too
        return 1024 * int(STATUS.read_text(encoding="utf-8").partition("VmHWM:")[2].split()[0])
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def device_name(device: Any) -> str:
    """Return the name of the GPU, or `cpu` with the number of threads that torch uses."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpu(torch.get_num_threads()) if device.type == "cpu" else str(device.type)


def _cpu(threads: int) -> str:
    return f"cpu, {counted(threads, 'thread')}"


def _parameters(counts: ParameterCounts | None) -> dict[str, Any]:
    if counts is None:
        return {}
    return {
        "trainable_parameters": counts.trained,
        "total_parameters": counts.total,
        "encoder_parameters": counts.encoder,
        "trainable_percent_of_encoder": 100 * counts.trained / counts.encoder,
    }


def sample_window(model: ReaderModel, features: Features, layers: Sequence[int] | None = None) -> SampleWindow:
    """Run a window of about the mean length through the encoder.

    Heads on one frozen encoder can share it; `layers` are then the layers that any of them reads.
    """
    import torch

    from lamella.data.windows.batches import Batch

    index = int(np.argmin(np.abs(features.lengths - features.lengths.mean())))
    padded, length = Batch.of(pad(features, np.array([index]))), int(features.lengths[index])
    unpadded = {name: getattr(padded, name)[:, :length] for name in ("input_ids", "mask", "token_types", "is_context")}
    batch = replace(padded, **unpadded).to(model.device)
    with torch.no_grad(), _counting(model) as counter:
        hidden = model.encode(batch, layers or model.head.layers)
    return SampleWindow(batch, length, hidden, counter.get_total_flops())


def _operations(model: ReaderModel, window: SampleWindow, *, training: bool) -> dict[str, Any]:
    """Return the floating-point operations of one window; a multiply-add counts as two.

    Training counts forward and backward, not the optimiser, whose work does not depend on the number of windows.
    """
    import torch

    with torch.no_grad(), _counting(model) as counter:
        model(window.batch, window.hidden)
    operations = {
        "flops_tokens": window.tokens,
        "inference_flops_per_window": window.encoder_flops + counter.get_total_flops(),
    }
    if training and any(parameter.requires_grad for parameter in model.parameters()):
        encoder_trains = model.encoder.trainable
        with _counting(model) as counter:
            torch.autograd.backward(model(window.batch, None if encoder_trains else window.hidden).float().sum())
        model.zero_grad(set_to_none=True)
        forward_only = 0 if encoder_trains else window.encoder_flops
        operations["training_flops_per_window"] = forward_only + counter.get_total_flops()
    return operations


@contextmanager
def _counting(model: ReaderModel) -> Iterator[FlopCounterMode]:
    """Count matrix products and convolutions with torch's counter, in eval mode.

    The counter cannot see into fused attention on a CPU, so attention is computed as plain matrix products meanwhile.
    It does not know linear layers that are fused with their activation either.
    Eval mode draws no random numbers and leaves running means unchanged.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from lamella.encoder.fused_linear import operation_counts

    was_training = model.training
    model.eval()
    try:
        counter = FlopCounterMode(display=False, custom_mapping=operation_counts())
        with sdpa_kernel(SDPBackend.MATH), counter:
            yield counter
    finally:
        model.train(was_training)
