"""A learner's forward and backward, recorded on a GPU once for every shape of batch and replayed from then on.

A training step of a small encoder is a thousand kernels of a few microseconds each, and a host that launches them one
by one takes several times as long as the GPU takes to run them. A CUDA graph launches them all at once. It repeats to
the letter what it has recorded, on the tensors it has recorded it on, so a batch is copied into those, and whatever
varies from step to step must be in them: also the counts that a loss divides by. Random numbers go on as they would
without it, and so does the run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from lamella.data.batches import Batch, Totals
from lamella.errors import one_line
from lamella.garbage import paused_garbage_collection

Terms = dict[str, Tensor]
Backward = Callable[[Batch, Tensor | None, Totals], Terms]
Record = Callable[[Callable[[], Terms]], Callable[[], Terms]]

PAD_TO_MULTIPLE_OF = 16  # every width is recorded once: of 384 tokens there are 24, for a padding of 5 %


class Recorded:
    """Does what `backward` does: adds the gradients of a batch to those that are there, and gives its terms.

    A shape is computed plainly the first time, which leaves the libraries warm, and recorded the second. Gradients must
    stay where they are between steps: set to zero, and not taken away.
    """

    def __init__(self, backward: Backward, record: Record | None = None) -> None:
        self.backward, self.record = backward, record or _cuda_graphs()
        self.problem: str | None = None  # why nothing can be recorded; it is computed plainly then
        self.seen: set[tuple[Any, ...]] = set()
        self.recordings: dict[tuple[Any, ...], _Recording] = {}

    def __call__(self, batch: Batch, beside: Tensor | None, totals: Totals) -> Terms:
        shape = (*batch.input_ids.shape, None if beside is None else beside.shape)
        if self.problem or shape not in self.seen:
            self.seen.add(shape)
            return self.backward(batch, beside, totals)
        if shape not in self.recordings:
            try:
                self.recordings[shape] = _Recording(self.backward, self.record, batch, beside)
            except RuntimeError as error:  # of a part that reads values back, or of a full memory
                # What spoilt a recording came first; at its end PyTorch says no more than that something did.
                self.problem, self.recordings = one_line(error.__context__ or error), {}
            if self.problem:  # and not above: the error holds what was recorded, which must be gone by the next step
                gc.collect()
        if self.problem:
            return self.backward(batch, beside, totals)
        return self.recordings[shape](batch, beside, totals)


class _Recording:
    """What was recorded for one shape, with the tensors that it reads."""

    def __init__(self, backward: Backward, record: Record, batch: Batch, beside: Tensor | None) -> None:
        self.inputs = {name: tensor.clone() for name, tensor in _tensors(batch).items()}
        self.beside = None if beside is None else beside.clone()
        self.counts = torch.ones(3, device=batch.input_ids.device)
        inputs: dict[str, Any] = dict(self.inputs)
        standing, counts = replace(batch, **inputs), Totals(*self.counts.unbind())
        self.replay = record(lambda: backward(standing, self.beside, counts))

    def __call__(self, batch: Batch, beside: Tensor | None, totals: Totals) -> Terms:
        for name, tensor in _tensors(batch).items():
            self.inputs[name].copy_(tensor)
        if self.beside is not None and beside is not None:
            self.beside.copy_(beside)
        counts = torch.tensor([totals.answerable, totals.unanswerable, totals.tokens])
        self.counts.copy_(counts, non_blocking=True)  # else the host would wait here for the device
        return self.replay()


def _tensors(batch: Batch) -> dict[str, Tensor]:
    return {one.name: value for one in fields(batch) if isinstance(value := getattr(batch, one.name), Tensor)}


def _cuda_graphs() -> Record:
    """Graphs in one pool of memory: no two run at once, and what one gives is read before the next one runs.

    A graph of an earlier learner must not be found to be garbage while another is recorded: to let it go is a command
    to the GPU, and would be recorded too.
    """
    pool = torch.cuda.graph_pool_handle()
    gc.collect()

    def record(body: Callable[[], Terms]) -> Callable[[], Terms]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with paused_garbage_collection(), torch.cuda.graph(graph, pool=pool):
                terms = body()
        except RuntimeError:
            if torch.cuda.current_stream() != stream:
                _end_failed(stream, pool)
            raise

        def replay() -> Terms:
            graph.replay()
            return terms

        return replay

    return record


def _end_failed(stream: torch.cuda.Stream, pool: Any) -> None:
    """Do what PyTorch leaves undone where a recording was spoilt, by a value read back: it raises before it tidies up.

    The stream that was recorded is still the current one, the pool still counts as being recorded to, and the random
    numbers wait for the end of the recording: every draw would raise. A copy of their state gives the same numbers, and
    waits for nothing.
    """
    torch.cuda.set_stream(stream)
    generator = torch.cuda.default_generators[stream.device_index]
    generator.graphsafe_set_state(generator.clone_state())
    torch._C._cuda_endAllocateToPool(stream.device_index, pool)
    torch._C._cuda_releasePool(stream.device_index, pool)
