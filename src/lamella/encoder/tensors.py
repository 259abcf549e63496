"""Trained tensors: select, read, round and set them; hash the parameters of an encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file

from lamella.encoder.identity import hash_arrays
from lamella.errors import ModelError, one_line


def trained_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what a model stores: the trained parameters, and buffers.

    In a head, buffers are normalisation statistics; in an encoder, what trained parameters are relative to (PiSSA).
    """
    return {
        name: tensor
        for name, tensor in module.state_dict(keep_vars=True).items()
        if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter)
    }


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a safetensors file."""
    if not path.is_file():
        raise ModelError(f"{path}: no such file; the model folder is incomplete.")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ModelError(f"{path}: expected a safetensors file, found a damaged one ({one_line(error)}).") from None


def round_to_half(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Round floating-point tensors to fp16; a value that is too large for fp16 is an error."""
    rounded = {name: value.half() if value.is_floating_point() else value for name, value in tensors.items()}
    for name, value in rounded.items():
        if not value.isfinite().all():
            largest = tensors[name].abs().max().item()
            raise ModelError(
                f"{name}: expected values in the range of fp16, found {largest:g}; keep this model in fp32."
            )
    return rounded


def parameters_of(model: torch.nn.Module) -> dict[str, NDArray[Any]]:
    """Return the parameters of an encoder, by which it is identified.

    The pooler is excluded: most files have one, few heads read it, and converters drop it.
    """
    return {name: value.detach().numpy() for name, value in model.named_parameters() if not name.startswith("pooler.")}


def hash_parameters(model: torch.nn.Module) -> str:
    """Return the sha256 of the names and values of an encoder's parameters, independent of the file they came from."""
    return hash_arrays(parameters_of(model))


def put_tensors(module: torch.nn.Module, tensors: dict[str, torch.Tensor], where: str) -> None:
    """Set the trained tensors of a module; the error names tensors that are missing, unexpected or of another shape."""
    expected = trained_tensors(module)
    check_tensors(expected, tensors, where)
    with torch.no_grad():
        for name, own in expected.items():
            own.copy_(tensors[name])


def check_tensors(expected: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor], where: str) -> None:
    """Check the names and shapes of the trained tensors of a module."""
    wrong = [f"{name} is missing" for name in expected.keys() - tensors.keys()]
    wrong += [f"{name} is unexpected" for name in tensors.keys() - expected.keys()]
    wrong += [
        f"{name} has shape {list(tensors[name].shape)} instead of {list(own.shape)}"
        for name, own in expected.items()
        if name in tensors and tensors[name].shape != own.shape
    ]
    if wrong:
        raise ModelError(f"{where}: does not fit its configuration: {'; '.join(sorted(wrong)[:3])}.")
