"""Read the tensors of safetensors files as numpy arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize, safe_open

from lamella.errors import ModelError, one_line
from lamella.graph.support import NoGraphError

FLOATS = ("F16", "BF16", "F32", "F64")
TYPES = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I64": "<i8", "I32": "<i4", "BOOL": "?"}


class Tensors(dict[str, NDArray[Any]]):
    """Tensors by name. Without one that a graph needs there is no graph."""

    prefix = ""  # of the names in the graph

    def __missing__(self, name: str) -> NDArray[Any]:
        raise NoGraphError(f"the weights lack {self.prefix}{name}")

    def under(self, prefix: str) -> Tensors:
        """Return the tensors whose names start with a prefix, without it."""
        inner = Tensors({name.removeprefix(prefix): value for name, value in self.items() if name.startswith(prefix)})
        inner.prefix = self.prefix + prefix
        return inner


def read_tensor_files(paths: Sequence[Path]) -> Tensors:
    """Read all tensors of some files; every floating-point tensor becomes fp32."""
    tensors = Tensors()
    for path in paths:
        if not path.is_file():
            raise ModelError(f"{path}: no such file; the model folder is incomplete.")
        try:
            found = _read(path)
        except SafetensorError as error:
            raise ModelError(f"{path}: expected a safetensors file, found a damaged one ({one_line(error)}).") from None
        if twice := sorted(tensors.keys() & found.keys()):
            raise ModelError(
                f"{path}: expected other tensors than the files before it, got {', '.join(twice[:3])} again."
            )
        tensors.update(found)
    return tensors


def read_outline(paths: Sequence[Path], is_read: Callable[[str, Sequence[int]], bool]) -> Tensors:
    """Read the tensors whose name and shape `is_read` accepts; the others have their shape, but no values."""
    outline = Tensors()
    for path in paths:
        with cast(Any, safe_open(path, "numpy")) as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
            if any(part.get_dtype() == "BF16" for part in slices.values()):  # numpy does not know it
                outline |= read_tensor_files([path])
                continue
            for name, part in slices.items():
                read = part.get_dtype() not in FLOATS or is_read(name, part.get_shape())
                empty = np.broadcast_to(np.float32(0), part.get_shape())
                outline[name] = _as_fp32(file.get_tensor(name)) if read else empty
    return outline


def read_sizes(paths: Sequence[Path]) -> dict[str, int]:
    """Return how many numbers each tensor of some files has, without reading them; integers do not count."""
    sizes = {}
    for path in paths:
        with cast(Any, safe_open(path, "numpy")) as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                tensor = file.get_slice(name)
                if tensor.get_dtype() in FLOATS:
                    sizes[name] = math.prod(tensor.get_shape())
    return sizes


def _read(path: Path) -> dict[str, NDArray[Any]]:
    with cast(Any, safe_open(path, "numpy")) as file:
        names = list(file.keys())
        if all(file.get_slice(name).get_dtype() != "BF16" for name in names):
            return {name: _as_fp32(file.get_tensor(name)) for name in names}
    return {name: _decode(entry) for name, entry in cast(Any, deserialize)(path.read_bytes())}


def _as_fp32(tensor: NDArray[Any]) -> NDArray[Any]:
    return tensor.astype(np.float32) if tensor.dtype in (np.float16, np.float64) else tensor


def _decode(entry: Any) -> NDArray[Any]:
    """Return a tensor of a file with bf16, which numpy does not know: the upper half of an fp32 number."""
    if entry["dtype"] == "BF16":
        upper = np.frombuffer(entry["data"], "<u2").astype(np.uint32)
        return (upper << 16).view(np.float32).reshape(entry["shape"])
    return _as_fp32(np.frombuffer(entry["data"], TYPES[entry["dtype"]]).reshape(entry["shape"]))
