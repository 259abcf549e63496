"""What a reader feeds to the graphs that it shares: kept in half precision where nothing is lost, fed in fp32."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from mmap import mmap
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    from onnxruntime import OrtValue

ALIGNMENT = 16  # elements, so that tensors begin where vector instructions want them

Shapes = Mapping[str, tuple[int, ...]]
OrtFeeds = dict[str, "OrtValue"]


class FedTensors:
    """The tensors that a reader feeds to one graph, which takes them in fp32.

    A tensor is kept in fp16 if all its values are numbers of fp16, as in the files of readers in half precision: half
    the memory, and no value changes. `WideTensors` makes it fp32 again.
    """

    def __init__(self, tensors: Mapping[str, NDArray[np.float32]]) -> None:
        halves = {name: _as_half(tensor) for name, tensor in tensors.items()}
        narrow = {name: half for name, half in halves.items() if half is not None}
        wide = {name: tensor for name, tensor in tensors.items() if name not in narrow}
        self.shapes: Shapes = {name: tensor.shape for name, tensor in narrow.items()}  # of those in fp16
        self.half = _pack(narrow, np.float16)
        packed = _pack(wide, np.float32)
        self.full = as_values(_divide(packed, {name: tensor.shape for name, tensor in wide.items()}))
        self.nbytes = self.half.nbytes + packed.nbytes


@dataclass(eq=False)
class _Block:
    """Memory for the fp32 values of one reader at a time."""

    values: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    shapes: Shapes | None = None
    feeds: OrtFeeds = field(default_factory=dict)
    tensors: ref[FedTensors] | None = None  # whose values it holds
    users: int = 0

    def holds(self, tensors: FedTensors) -> bool:
        return self.tensors is not None and self.tensors() is tensors

    def fill(self, tensors: FedTensors) -> None:
        if len(self.values) < len(tensors.half):
            self.values, self.shapes = _allocate(len(tensors.half), np.float32), None
        if self.shapes != tensors.shapes:
            self.shapes, self.feeds = tensors.shapes, as_values(_divide(self.values, tensors.shapes))
        np.copyto(self.values[: len(tensors.half)], tensors.half)


class WideTensors:
    """Lends the tensors of readers in fp32, while a window runs. Threads may share it.

    There are as many blocks of memory as different readers had windows at the same time: at most one per thread. They
    are used again: new pages would take ten times as long as the 0.25 ms in which `default` is widened.
    """

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, tensors: FedTensors) -> Iterator[OrtFeeds]:
        """Lend the tensors of a reader, as onnxruntime takes them."""
        if not tensors.shapes:
            yield tensors.full
            return
        with self._lock:
            block = next((block for block in self._blocks if block.holds(tensors)), None)
            if block is None:
                block = next((block for block in self._blocks if not block.users), None) or _Block()
                self._blocks = [other for other in self._blocks if other is not block] + [block]
                block.tensors = None
            block.users += 1
        try:
            if block.tensors is None:  # nobody else uses it
                block.fill(tensors)
                block.tensors = ref(tensors)
            yield {**tensors.full, **block.feeds}
        finally:
            with self._lock:
                block.users -= 1


def as_values(arrays: Mapping[str, NDArray[Any]]) -> OrtFeeds:
    """Return arrays as onnxruntime takes them; they share their memory."""
    from onnxruntime import OrtValue

    return {name: OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def _as_half(tensor: NDArray[Any]) -> NDArray[np.float16] | None:
    """Return a tensor in fp16; None if that changes a value."""
    with np.errstate(over="ignore"):
        half = tensor.astype(np.float16)
    return half if np.array_equal(half, tensor) else None


def _pack(tensors: Mapping[str, NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    """Copy tensors into one block."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    block = _allocate(_starts(shapes)[-1], dtype)
    for name, part in _divide(block, shapes).items():
        part[...] = tensors[name]
    return block


def _allocate(size: int, dtype: DTypeLike) -> NDArray[Any]:
    """Return memory that the system gets back as soon as nobody uses it.

    Freed pieces of the heap would stay with the process, in the heaps of the threads that loaded them.
    """
    return np.frombuffer(mmap(-1, max(size, 1) * np.dtype(dtype).itemsize), dtype, size)


def _divide(block: NDArray[Any], shapes: Shapes) -> dict[str, NDArray[Any]]:
    """Return the tensors in a block."""
    starts = _starts(shapes)
    return {
        name: block[start : start + math.prod(shape)].reshape(shape)
        for (name, shape), start in zip(shapes.items(), starts, strict=False)
    }


def _starts(shapes: Shapes) -> list[int]:
    """Return where each tensor begins in a block, and the size of the block."""
    return [0, *accumulate(-(-math.prod(shape) // ALIGNMENT) * ALIGNMENT for shape in shapes.values())]
