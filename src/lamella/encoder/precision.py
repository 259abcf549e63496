"""On which device, and in which number format, the encoder computes."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def choose_device() -> torch.device:
    """The accelerator of this machine, or its CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def choose_precision(wanted: str, device: torch.device) -> str:
    """`auto` is bf16 where the hardware computes it (emulated, it is slower than fp32)."""
    if wanted == "bf16" and device.type == "cpu" and not has_bf16_products():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # PyTorch's own words, with its stack
        told = "precision 'bf16': this processor only imitates it, up to hundreds of times slower than 'fp32'"
        warnings.warn(told, stacklevel=3)
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    has_bf16 = device.type == "cpu" and getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return "bf16" if has_bf16 else "fp32"


def has_bf16_products() -> bool:
    """Whether oneDNN multiplies bf16 on this processor; what tells so may be missing from a build."""
    told = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    return bool(told())


HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Run what is inside in half precision, where that was chosen."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, HALVES[precision])
