"""Answer on a GPU with CUDA graphs: a pass is recorded for every shape of batch, then replayed.

A host takes several times as long to launch the kernels of a small encoder, one by one, as the GPU takes to run them. A
replayed graph is launched at once. Batches are padded to few shapes, so that few graphs are needed. While the GPU
computes a batch, the host can prepare the next one: the logits are waited for only when they are read.
"""

from __future__ import annotations

import gc
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamella.data.windows.batches import send
from lamella.data.windows.padding import Padded
from lamella.encoder.capture import Capture, make_capture

Inputs = Mapping[str, Tensor]
Forward = Callable[[Inputs], Tensor]
Logits = NDArray[np.float32]

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
WIDTHS = 32  # tokens; up to 384 there are 12 widths
MOST_GRAPHS = 256


def encoder_inputs(padded: Padded) -> dict[str, Tensor]:
    """Return what an encoder and a head read of a padded batch."""
    return {
        name: torch.from_numpy(getattr(padded, name)) for name in ("input_ids", "mask", "token_types", "is_context")
    }


def enlarge_inputs(inputs: Inputs, positions: int, pad_id: int) -> dict[str, Tensor]:
    """Pad the inputs of an encoder to one of few shapes: windows with padding, the batch with copies of the first.

    A window that is nothing but padding would have no token to attend to.
    """
    rows, width = recorded_shape(len(inputs["mask"]), inputs["mask"].shape[1], positions)
    larger = {}
    for name, tensor in inputs.items():
        larger[name] = tensor.new_full((rows, width), pad_id if name == "input_ids" else 0)
        larger[name][: len(tensor), : tensor.shape[1]] = tensor
        larger[name][len(tensor) :] = larger[name][0]
    return larger


def recorded_shape(rows: int, width: int, positions: int) -> tuple[int, int]:
    """Return the shape to which a batch of windows is padded, so that few shapes occur."""
    at = bisect_left(ROWS, rows)
    return ROWS[at] if at < len(ROWS) else rows, max(width, min(-(-width // WIDTHS) * WIDTHS, positions))


@dataclass(frozen=True)
class _Recorded:
    """A graph, with the tensors that it reads."""

    inputs: Inputs
    replay: Callable[[], Tensor]


class RecordedPasses:
    """Runs passes one at a time; on a GPU, each is recorded the second time that its key and shapes occur.

    The first time, a pass warms up the libraries. If one cannot be recorded, because it reads values back, all run
    without graphs. Threads may share it.
    """

    def __init__(self, device: torch.device, capture: Capture[Tensor] | None = None) -> None:
        self.device, self._given = device, capture
        self._capture = capture  # made with the first graph
        self._records = device.type == "cuda" or capture is not None
        self.problem: str | None = None  # why nothing can be recorded
        self._seen: set[Hashable] = set()
        self._graphs: OrderedDict[Hashable, _Recorded] = OrderedDict()  # the least recently used first
        self._tensors: Hashable = None  # identifies what the graphs read besides their inputs
        self._running = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a copy of a model record its own passes."""
        return type(self), (self.device, self._given)

    def __len__(self) -> int:
        """Return the number of graphs."""
        return len(self._graphs)

    def begin(
        self, forward: Forward, inputs: Inputs, *, key: Hashable = None, tensors: Hashable = None
    ) -> PendingLogits:
        """Begin a pass over inputs on the CPU; return its result as it will be.

        `key` identifies what `forward` does. `tensors` identifies the tensors that it reads besides its inputs: if they
        have been replaced, all graphs are dropped.
        """
        with self._running:
            if self._records and tensors != self._tensors:
                self._tensors = tensors
                self._forget()
            return PendingLogits(self._run(forward, inputs, key))

    def _run(self, forward: Forward, inputs: Inputs, key: Hashable) -> Tensor:
        key = (key, *((name, tensor.shape) for name, tensor in inputs.items()))
        recorded = self._graphs.get(key)
        if recorded is None and key in self._seen and not self.problem:
            recorded = self._record(forward, inputs, key)
        if recorded is None:
            if self._records:
                self._seen.add(key)
            return forward({name: send(tensor, self.device) for name, tensor in inputs.items()})
        self._graphs.move_to_end(key)
        for name, tensor in inputs.items():
            source = tensor.pin_memory() if self.device.type == "cuda" else tensor
            recorded.inputs[name].copy_(source, non_blocking=True)
        return recorded.replay()

    def _record(self, forward: Forward, inputs: Inputs, key: Hashable) -> _Recorded | None:
        """Record a pass; return None, and record nothing from now on, if that is impossible."""
        if self._capture is None:
            self._capture = make_capture("thread_local")
        own = {name: send(tensor, self.device).clone() for name, tensor in inputs.items()}
        try:
            recorded = _Recorded(own, self._capture(lambda: forward(own)))
        except RuntimeError as error:
            self.problem = str(error.__context__ or error)
        else:
            self._graphs[key] = recorded
            if len(self._graphs) > MOST_GRAPHS:
                self._graphs.popitem(last=False)
            return recorded
        self._forget()  # not above: the error holds what was captured
        return None

    def _forget(self) -> None:
        if self._graphs:
            self._graphs.clear()
            gc.collect()
        self._capture = self._given  # the memory pool of the graphs is gone with the last of them
        self._seen.clear()


class PendingLogits:
    """Logits that a GPU computes, on their way to the CPU."""

    def __init__(self, logits: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if logits.device.type == "cuda":
            self._logits = torch.empty(logits.shape, dtype=torch.float32, pin_memory=True)
            self._logits.copy_(logits, non_blocking=True)  # the next pass, which overwrites them, waits for this
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._logits = logits.float().clone()

    def get(self) -> Logits:
        """Wait for the logits."""
        if self._event is not None:
            self._event.synchronize()
        logits: Logits = self._logits.numpy()
        return logits
