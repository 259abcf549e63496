"""Split batches that do not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from accelerate.utils.memory import clear_device_cache

from lamella.data.windows.padding import Indices
from lamella.encoder.device import is_out_of_memory
from lamella.errors import RunError, counted
from lamella.progress import Log, silent
from lamella.training.fitting.learner import Learner
from lamella.training.fitting.steps import Step


class Splitter:
    """Splits a batch that does not fit into memory: the step stays the same, it is only computed piece by piece."""

    def __init__(self, pieces: int = 1, *, automatic: bool = False, log: Log = silent) -> None:
        self.pieces, self.automatic, self.log = pieces, automatic, log

    def __call__(self, windows: Indices) -> list[Indices]:
        # Every n-th window, not consecutive ones: pieces then have similar lengths, as the shares of processes do.
        return [windows[piece :: self.pieces] for piece in range(min(self.pieces, len(windows)))]

    def retry(
        self, add_gradients: Callable[[Step, Sequence[Learner]], None], step: Step, active: Sequence[Learner]
    ) -> None:
        """Compute a step; on out-of-memory, retry in pieces of half the size, or raise an error with advice."""
        while True:
            random_states = [learner.random_stream.state for learner in active]
            try:
                add_gradients(step, active)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                largest = max(map(len, step.batches))
                longest = max(int(step.features.lengths[windows].max()) for windows in step.batches)
                size = -(-largest // self.pieces)
                if not self.automatic or size == 1:
                    raise RunError(_describe_out_of_memory(size, longest, len(active), self.automatic)) from None
            else:
                return
            self.pieces *= 2
            # Else the memory that the failed step left is divided into blocks of the wrong sizes.
            clear_device_cache(garbage_collection=True)
            for learner, state in zip(active, random_states, strict=True):
                learner.zero_gradients()
                learner.random_stream.state = state
            self.log(
                f"out of memory: {counted(size, 'window')} of {longest} tokens; continuing with "
                f"{-(-largest // self.pieces)} at a time"
            )


def _describe_out_of_memory(size: int, longest: int, learners: int, automatic: bool) -> str:
    fewer = ", fewer learners in a pass" if learners > 1 else ""
    if automatic:
        return f"out of memory on a single window of {longest} tokens: lower windows.max_seq_length{fewer}."
    return (
        f"out of memory on a batch of {counted(size, 'window')} of up to {longest} tokens: lower training.batch_size "
        f"(and raise training.accumulate), lower windows.max_seq_length{fewer}, or pass --auto-batch."
    )
