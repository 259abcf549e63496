"""The number of threads that torch trains with on a CPU: fewer where other programs use the cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lamella.cores import CoreMeter
from lamella.errors import counted
from lamella.progress import Log

VARIABLE = "OMP_NUM_THREADS"  # by which a user, torchrun and Ray choose


@contextmanager
def sharing_cores(meter: CoreMeter, log: Log, *, before: int | None = None) -> Iterator[None]:
    """Train with as many threads as cores are free, unless the user has set their number.

    Threads of torch wait actively for one another after every operation. If one of them has no core, the others spin,
    and small operations take ten times as long as on one thread (docs/decisions/0058-shared-machine.md). The number is
    chosen once: it decides the order of sums, so changing it would change the last digits of the result. For the same
    reason a resumed run takes `before`, the number that it began with.
    """
    default = torch.get_num_threads()
    if VARIABLE in os.environ or default == 1:
        yield
        return
    threads = min(default, before or meter.free_cores())
    if threads < default:
        why = "as the run began" if before else "as other programs use the cores"
        log(f"training with {counted(threads, 'thread')} instead of {default}, {why}; {VARIABLE} sets another number")
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(default)
