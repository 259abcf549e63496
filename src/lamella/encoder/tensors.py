"""The tensors that training changes, the file that holds them, and a hash of those that it starts from."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lamella.errors import ModelError, one_line


def trained_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What training changes: the trained parameters, and the statistics of a normalisation (no encoder has any)."""
    return {
        name: tensor
        for name, tensor in module.state_dict(keep_vars=True).items()
        if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter)
    }


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file; a damaged file is said to be one."""
    if not path.is_file():
        raise ModelError(f"{path}: no such file; the model folder is incomplete.")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ModelError(f"{path}: expected a safetensors file; it is damaged ({one_line(error)}).") from None


def round_to_half(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same in fp16, but for whole numbers; one that is too large for it is refused."""
    rounded = {name: value.half() if value.is_floating_point() else value for name, value in tensors.items()}
    for name, value in rounded.items():
        if not value.isfinite().all():
            largest = tensors[name].abs().max().item()
            raise ModelError(f"{name}: holds {largest:g}, beyond the numbers of fp16; keep this model in fp32.")
    return rounded


def hash_parameters(model: torch.nn.Module) -> str:
    """sha256 of the parameters of an encoder as it was loaded, whatever file they came from, and of their names.

    The pooler is left out: most files have one, most heads read none, and converters drop it.
    """
    digest = hashlib.sha256()
    for name, value in sorted(model.named_parameters()):
        if not name.startswith("pooler."):
            array = value.detach().numpy()
            digest.update(f"{name} {array.dtype} {list(array.shape)}\n".encode())  # as: embeddings.x float32 [512, 384]
            digest.update(array.ravel().data)
    return digest.hexdigest()


def put_tensors(module: torch.nn.Module, tensors: dict[str, torch.Tensor], where: str) -> None:
    """Set exactly the trained tensors of a module: a missing, an extra or a misshapen one is an error that names it."""
    expected = trained_tensors(module)
    wrong = [f"{name} is missing" for name in expected.keys() - tensors.keys()]
    wrong += [f"{name} is not expected" for name in tensors.keys() - expected.keys()]
    wrong += [
        f"{name} has shape {list(tensors[name].shape)} instead of {list(own.shape)}"
        for name, own in expected.items()
        if name in tensors and tensors[name].shape != own.shape
    ]
    if wrong:
        raise ModelError(f"{where}: does not fit its configuration: {'; '.join(sorted(wrong)[:3])}.")
    with torch.no_grad():
        for name, own in expected.items():
            own.copy_(tensors[name])
