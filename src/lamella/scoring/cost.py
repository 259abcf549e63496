"""What a reader costs: parameters, size, time, memory and floating-point operations; `cost.json` of a run folder."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lamella import runs
from lamella.data.examples import Example
from lamella.data.features import Features, featurise
from lamella.data.padding import pad
from lamella.files import write_json

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

    from lamella.data.batches import Batch
    from lamella.encoder.encoder import HiddenStates
    from lamella.inference.protocols import QAModel
    from lamella.models.model import ReaderModel

SAMPLE = 200  # questions whose mean length stands for that of all
WEIGHTS = (".safetensors", ".onnx", ".data", ".bin")  # how files end that hold a model's numbers


def write_cost(folder: Path, cost: dict[str, Any], *, f1: float | None) -> None:
    """Write what is known of a run's cost, with the efficiency of its F1."""
    write_json(folder / runs.COST, {**cost, "efficiency": efficiency(f1, cost.get("trainable_parameters"))})


def efficiency(f1: float | None, trained: int | None) -> float | None:
    """(F1 - 50) / log10(N): what N trained parameters buy, over what a coin would give; after Hulburd's measure."""
    if f1 is None or trained is None or trained < 2:
        return None
    return (f1 - 50) / math.log10(trained)


@dataclass(frozen=True)
class SampleWindow:
    """A window to count operations with, and what the encoder made of it."""

    batch: Batch
    tokens: int
    hidden: HiddenStates
    encoder_flops: int


def model_cost(model: ReaderModel, window: SampleWindow | None, *, training: bool = True) -> dict[str, Any]:
    """What can be told of a torch model itself, and its operations for a window.

    The model is left as it was: nothing is drawn at random, and no gradient stays.
    """
    from lamella.encoder.tuning import count_parameters

    trained, total = count_parameters(model)
    encoder = model.base_parameters  # without what the tuning put into it
    cost: dict[str, Any] = {
        "trainable_parameters": trained,
        "total_parameters": total,
        "encoder_parameters": encoder,
        "trainable_percent_of_encoder": 100 * trained / encoder,
        "device": device_name(model.device),
        "precision": model.precision,
    }
    if window is not None:
        cost |= _operations(model, window, training=training)
    return cost


def cost_of_answers(model: QAModel, examples: Sequence[Example], seconds: float, batch_size: int) -> dict[str, Any]:
    """What answering with a model of any kind cost, and what can be told of the model."""
    device: Any = getattr(model, "device", None)  # onnxruntime's model has none
    cost: dict[str, Any] = {"device": "cpu"}
    if device is not None:
        from lamella.models.model import ReaderModel

        cost = {"device": device_name(device)}
        if isinstance(model, ReaderModel):
            some = featurise(examples[:SAMPLE], model.tokenizer, model.windows)
            cost = model_cost(model, sample_window(model, some) if len(some) else None, training=False)
    return {
        **cost,
        "model_bytes": model_bytes(model.folders),
        "peak_memory_bytes": peak_memory(device),
        **answering_time(seconds, len(examples), batch_size),
    }


def answering_time(seconds: float, questions: int, batch_size: int) -> dict[str, Any]:
    """From windows to logits: without cutting texts into windows, and without decoding."""
    return {"inference_seconds_per_1000": 1000 * seconds / max(1, questions), "inference_batch_size": batch_size}


def model_bytes(folders: Sequence[Path]) -> int | None:
    """The size of the files with the numbers of a saved model: what was trained, without its base encoder."""
    sizes = [
        path.stat().st_size for folder in folders[:1] if folder.is_dir() for path in folder.iterdir()
        if path.name.endswith(WEIGHTS)
    ]  # fmt: skip
    return sum(sizes) if sizes else None


def peak_memory(device: Any = None) -> int | None:
    """The most bytes that this process has held until now: on its GPU, where `device` is one, else in memory."""
    if device is not None and device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def device_name(device: Any) -> str:
    """The GPU by its name, or `cpu` with the number of threads that torch uses there."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"cpu, {threads} thread{'s' if threads > 1 else ''}" if device.type == "cpu" else str(device.type)


def sample_window(model: ReaderModel, features: Features, layers: Sequence[int] | None = None) -> SampleWindow:
    """A window of about the mean length, run through the encoder. `layers` are those that all heads read which it is
    for: heads on one frozen encoder can share it.
    """
    import torch

    from lamella.data.batches import Batch

    place = int(np.argmin(np.abs(features.lengths - features.lengths.mean())))
    padded, length = Batch.of(pad(features, np.array([place]))), int(features.lengths[place])
    unpadded = {name: getattr(padded, name)[:, :length] for name in ("input_ids", "mask", "token_types", "is_context")}
    batch = replace(padded, **unpadded).to(model.device)
    with torch.no_grad(), _counting(model) as counter:
        hidden = model.encode(batch, layers or model.head.layers)
    return SampleWindow(batch, length, hidden, counter.get_total_flops())


def _operations(model: ReaderModel, window: SampleWindow, *, training: bool) -> dict[str, Any]:
    """Floating-point operations of one window, a multiplication and an addition being two.

    Training is forward and backward, without the optimiser, whose work is the same for any number of windows.
    """
    import torch

    with torch.no_grad(), _counting(model) as counter:
        model(window.batch, window.hidden)
    counted = {
        "flops_tokens": window.tokens,
        "inference_flops_per_window": window.encoder_flops + counter.get_total_flops(),
    }
    if training and any(parameter.requires_grad for parameter in model.parameters()):
        learns = model.encoder.trainable
        with _counting(model) as counter:
            torch.autograd.backward(model(window.batch, None if learns else window.hidden).float().sum())
        model.zero_grad(set_to_none=True)
        forward_alone = 0 if learns else window.encoder_flops
        counted["training_flops_per_window"] = forward_alone + counter.get_total_flops()
    return counted


@contextmanager
def _counting(model: ReaderModel) -> Iterator[FlopCounterMode]:
    """Torch's counter, of matrix products and convolutions. It does not see into fused attention on a CPU, so attention
    is computed in plain products meanwhile. Without dropout: nothing is drawn, and running means stay as they are.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    was_training = model.training
    model.eval()
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            yield counter
    finally:
        model.train(was_training)
