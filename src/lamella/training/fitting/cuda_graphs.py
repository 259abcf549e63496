"""CUDA graphs of a learner's forward and backward: captured once for every shape of batch, then replayed.

A training step of a small encoder is a thousand kernels of a few microseconds each, and a host that launches them one
by one takes several times as long as the GPU takes to run them. A CUDA graph launches them all at once. It repeats
exactly what was captured, on the tensors it was captured with, so a batch is copied into those, and everything that
varies from step to step must be in them, including the counts that a loss divides by. Random numbers continue as they
would without it, and so does the run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from lamella.data.windows.batches import Batch, Totals
from lamella.encoder.capture import Capture, make_capture
from lamella.errors import one_line

Terms = dict[str, Tensor]
Backward = Callable[[Batch, Tensor | None, Totals], Terms]

PAD_TO_MULTIPLE_OF = 16  # every width is captured once: up to 384 tokens there are 24, for 5 % of padding


class GraphedBackward:
    """Does what `backward` does, with CUDA graphs: adds the gradients of a batch, and returns its terms.

    A shape is computed without a graph the first time, which warms up the libraries, and captured the second time.
    Gradients must keep their tensors between steps: they are set to zero, not removed.
    """

    def __init__(self, backward: Backward, capture: Capture[Terms] | None = None) -> None:
        self.backward, self.capture = backward, capture or make_capture()
        self.problem: str | None = None  # why nothing can be captured; every step is then computed without a graph
        self.seen: set[tuple[Any, ...]] = set()
        self.graphs: dict[tuple[Any, ...], _CapturedGraph] = {}

    def __call__(self, batch: Batch, stored_logits: Tensor | None, totals: Totals) -> Terms:
        shape = (*batch.input_ids.shape, None if stored_logits is None else stored_logits.shape)
        if self.problem or shape not in self.seen:
            self.seen.add(shape)
            return self.backward(batch, stored_logits, totals)
        if shape not in self.graphs:
            try:
                self.graphs[shape] = _CapturedGraph(self.backward, self.capture, batch, stored_logits)
            except RuntimeError as error:  # from a part that reads values back, or from a full memory
                # The cause came first; at the end of a capture PyTorch reports only that something failed.
                self.problem, self.graphs = one_line(error.__context__ or error), {}
            if self.problem:  # not above: the error holds what was captured, which must be gone by the next step
                gc.collect()
        if self.problem:
            return self.backward(batch, stored_logits, totals)
        return self.graphs[shape](batch, stored_logits, totals)


class _CapturedGraph:
    """The graph of one shape, with the tensors that it reads."""

    def __init__(self, backward: Backward, capture: Capture[Terms], batch: Batch, stored_logits: Tensor | None) -> None:
        self.inputs = {name: tensor.clone() for name, tensor in _tensors(batch).items()}
        self.stored_logits = None if stored_logits is None else stored_logits.clone()
        self.counts = torch.ones(3, device=batch.input_ids.device)
        inputs: dict[str, Any] = dict(self.inputs)
        static_batch, counts = replace(batch, **inputs), Totals(*self.counts.unbind())
        self.replay = capture(lambda: backward(static_batch, self.stored_logits, counts))

    def __call__(self, batch: Batch, stored_logits: Tensor | None, totals: Totals) -> Terms:
        for name, tensor in _tensors(batch).items():
            self.inputs[name].copy_(tensor)
        if self.stored_logits is not None and stored_logits is not None:
            self.stored_logits.copy_(stored_logits)
        counts = torch.tensor([totals.answerable, totals.unanswerable, totals.tokens])
        self.counts.copy_(counts, non_blocking=True)  # else the host would wait here for the device
        return self.replay()


def _tensors(batch: Batch) -> dict[str, Tensor]:
    return {field.name: value for field in fields(batch) if isinstance(value := getattr(batch, field.name), Tensor)}
