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
from lamella.errors import one_line
from lamella.garbage import paused_garbage_collection

Terms = dict[str, Tensor]
Backward = Callable[[Batch, Tensor | None, Totals], Terms]
Capture = Callable[[Callable[[], Terms]], Callable[[], Terms]]

PAD_TO_MULTIPLE_OF = 16  # every width is captured once: up to 384 tokens there are 24, for 5 % of padding


class GraphedBackward:
    """Does what `backward` does, with CUDA graphs: adds the gradients of a batch, and returns its terms.

    A shape is computed without a graph the first time, which warms up the libraries, and captured the second time.
    Gradients must keep their tensors between steps: they are set to zero, not removed.
    """

    def __init__(self, backward: Backward, capture: Capture | None = None) -> None:
        self.backward, self.capture = backward, capture or _make_capture()
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

    def __init__(self, backward: Backward, capture: Capture, batch: Batch, stored_logits: Tensor | None) -> None:
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


def _make_capture() -> Capture:
    """Return a function that captures graphs into one memory pool.

    Graphs can share a pool because no two run at once, and the outputs of one are read before the next one runs. A
    graph of an earlier learner must not be garbage-collected while another is captured: freeing it is a command to the
    GPU, and would be captured too.
    """
    pool = torch.cuda.graph_pool_handle()
    gc.collect()

    def capture(body: Callable[[], Terms]) -> Callable[[], Terms]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with paused_garbage_collection(), torch.cuda.graph(graph, pool=pool):
                terms = body()
        except RuntimeError:
            if torch.cuda.current_stream() != stream:
                _clean_up_failed_capture(stream, pool)
            raise

        def replay() -> Terms:
            graph.replay()
            return terms

        return replay

    return capture


def _clean_up_failed_capture(stream: torch.cuda.Stream, pool: Any) -> None:
    """Do what PyTorch leaves undone when a value read back breaks a capture: it raises before it cleans up.

    The captured stream is still the current one, the pool still counts as being captured to, and the random generator
    waits for the end of the capture: every draw would raise. A copy of its state gives the same numbers, and waits for
    nothing.
    """
    torch.cuda.set_stream(stream)
    generator = torch.cuda.default_generators[stream.device_index]
    generator.graphsafe_set_state(generator.clone_state())
    torch._C._cuda_endAllocateToPool(stream.device_index, pool)
    torch._C._cuda_releasePool(stream.device_index, pool)
