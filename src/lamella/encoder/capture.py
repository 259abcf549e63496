"""Capture what a function does on a GPU as a CUDA graph, which repeats it on the same tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch

from lamella.garbage import paused_garbage_collection

Result = TypeVar("Result")
Capture = Callable[[Callable[[], Result]], Callable[[], Result]]


def make_capture(errors: Literal["global", "thread_local"] = "global") -> Capture[Any]:
    """Return a function that captures graphs into one memory pool.

    Graphs can share a pool because no two run at once, and the outputs of one are read before the next one runs. A
    graph of an earlier owner must not be garbage-collected while another is captured: freeing it is a command to the
    GPU, and would be captured too. With `errors="thread_local"`, other threads may use the GPU during a capture.
    """
    pool = torch.cuda.graph_pool_handle()
    gc.collect()

    def capture(body: Callable[[], Result]) -> Callable[[], Result]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with paused_garbage_collection(), torch.cuda.graph(graph, pool=pool, capture_error_mode=errors):
                result = body()
        except RuntimeError:
            if torch.cuda.current_stream() != stream:
                _clean_up_failed_capture(stream, pool)
            raise

        def replay() -> Result:
            graph.replay()
            return result

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
