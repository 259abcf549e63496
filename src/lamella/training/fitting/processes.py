"""The processes that train together: started by torchrun or accelerate, or a single one.

Every process sees the whole data and takes its share of each batch. Gradients are summed by hand, in one message per
step: a loss is divided by the counts of the whole step, so sums are needed, where DistributedDataParallel gives means
over processes. A process whose share of a small batch is empty adds nothing, and does not block the others.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, broadcast_object_list, gather_object
from torch import Tensor, nn

from lamella.data.windows.batches import Totals
from lamella.data.windows.padding import Indices
from lamella.errors import MissingLibraryError, RunError


def make_accelerator(trackers: Sequence[str] = (), folder: Path | None = None) -> Accelerator:
    """Return the device and the processes of this run; raise if the launcher did not connect its processes."""
    for tracker in trackers:
        if importlib.util.find_spec(tracker) is None:
            raise MissingLibraryError(f"the tracker {tracker!r}", [tracker])
    started = int(os.environ.get("WORLD_SIZE", "1"))
    # Without a GPU, Accelerate takes each of several processes for the only one, unless `cpu` is set.
    on_cpu = started > 1 and not torch.accelerator.is_available()
    accelerator = Accelerator(
        cpu=on_cpu, log_with=list(trackers) or None, project_config=ProjectConfiguration(logging_dir=str(folder or "."))
    )
    if accelerator.num_processes != started:
        raise RunError(
            f"expected {started} connected processes, got {accelerator.num_processes}; start them with: "
            "torchrun --nproc_per_node N -m lamella train …"
        )
    return accelerator


class Processes:
    """What a process exchanges with the others; with a single process, nothing."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.rank: int = accelerator.process_index
        self.count: int = accelerator.num_processes
        self.is_main: bool = accelerator.is_main_process
        self.device: torch.device = accelerator.device

    def share(self, windows: Indices) -> Indices:
        """Return this process's part of a batch; windows are sorted by length, so all parts are alike."""
        return windows[self.rank :: self.count]

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over all processes."""
        if self.count == 1:
            return values
        return self.accelerator.reduce(values, "sum")  # type: ignore[no-any-return]

    def sum_totals(self, totals: Totals) -> Totals:
        """Sum the counts of a step over all processes."""
        if self.count == 1:
            return totals
        own = torch.tensor([totals.answerable, totals.unanswerable, totals.tokens], device=self.device)
        return Totals(*self.sum(own).tolist())

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum gradients in one message; a parameter without a gradient here may have one elsewhere.

        One that has none anywhere stays without, so that weight decay does not shrink it. The message ends with how
        many processes have a gradient of each.
        """
        if self.count == 1:
            return
        own = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
        present = own[0].new_tensor([parameter.grad is not None for parameter in parameters])
        sums = self.sum(torch.cat([*(gradient.flatten() for gradient in own), present]))
        *totals, counts = torch.split(sums, [*(gradient.numel() for gradient in own), len(own)])
        for parameter, total, count in zip(parameters, totals, counts.tolist(), strict=True):
            parameter.grad = total.view_as(parameter) if count else None

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process; all of them get the same answer."""
        if self.count == 1:
            return flag
        return self.sum(torch.tensor(float(flag), device=self.device)).item() > 0

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors that follow each process's own batches by their mean over all processes."""
        if self.count > 1:
            for tensor in tensors:
                tensor.copy_(self.sum(tensor.clone()) / self.count)

    def gather(self, items: list[Any]) -> list[Any]:
        """Return the items of all processes, in all of them."""
        return items if self.count == 1 else list(gather_object(items))

    def broadcast(self, value: Any) -> Any:
        """Return the main process's value in all of them; the others wait for it."""
        return value if self.count == 1 else broadcast_object_list([value])[0]
