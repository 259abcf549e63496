"""The device that the encoder runs on: which one to use, its number formats, and its out-of-memory errors."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lamella.environment import has_fast_bf16
from lamella.errors import OUT_OF_MEMORY, UsageError, one_line

HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device() -> torch.device:
    """Return the accelerator of this machine, or its CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def find_device(name: Any = None) -> torch.device:
    """Return a device by its name, or the accelerator of this machine; raise UsageError if it cannot be used."""
    try:
        return choose_device() if name is None else torch.empty(0, device=name).device
    except (AssertionError, RuntimeError) as error:  # no such device, or this torch was built without support for it
        raise UsageError(f"device: {str(name)!r} cannot be used here: {one_line(error)}.") from None


def choose_precision(precision: str, device: torch.device) -> str:
    """Resolve `auto`: bf16 where torch is faster in it, on GPUs and CPUs with fast instructions for it, else fp32."""
    if precision == "bf16" and device.type == "cpu" and not has_bf16_products():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # PyTorch's own message, with a C++ stack trace
        message = "precision 'bf16': this processor only emulates it, up to hundreds of times slower than 'fp32'"
        warnings.warn(message, stacklevel=3)
    if precision != "auto":
        return precision
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if device.type == "cpu" and has_fast_bf16() else "fp32"


def has_bf16_products() -> bool:
    """Return whether oneDNN multiplies bf16 on this processor; False if this build of PyTorch cannot report it."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    return bool(supported())


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Run the block in half precision, if that was chosen."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, HALF_TYPES[precision])


def round_parameters(model: nn.Module, precision: str) -> None:
    """Convert the parameters of a model to half precision; its buffers stay as they are.

    Among the buffers are the frequencies of rotary positions. Rounded, they would move the tokens of long windows.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(HALF_TYPES[precision])


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that memory ran out."""
    from accelerate.utils.memory import should_reduce_batch_size

    # accelerate does not know the messages of CUDA's runtime and matrix library, which ask no allocator of PyTorch.
    return should_reduce_batch_size(error) or any(message in str(error) for message in OUT_OF_MEMORY)


def dtype_of_products(x: Tensor) -> torch.dtype:
    """Return the type that a product with x is computed in: the type of x, or the type of autocast."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
