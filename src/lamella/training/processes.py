"""The processes that train together: started by torchrun or accelerate, or one alone.

Every process sees the whole data and takes its share of each batch. Gradients are added up by hand, in one message a
step: a loss is divided by what the whole step holds, so sums are what is wanted, where DistributedDataParallel gives
means over processes. A process whose share of a small batch is empty adds nothing, and does not stop the others.
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

from lamella.data.batches import Totals
from lamella.data.padding import Indices
from lamella.errors import MissingExtraError, RunError


def make_accelerator(trackers: Sequence[str] = (), folder: Path | None = None) -> Accelerator:
    """The device and the processes of this run; refuses a launcher that did not bring its processes together."""
    for tracker in trackers:
        if importlib.util.find_spec(tracker) is None:
            raise MissingExtraError(f"the tracker {tracker!r}", "trackers")
    wanted = int(os.environ.get("WORLD_SIZE", "1"))
    # Without an accelerator to be found, Accelerate takes each of several processes for the only one.
    on_cpu = wanted > 1 and not torch.accelerator.is_available()
    accelerator = Accelerator(
        cpu=on_cpu, log_with=list(trackers) or None, project_config=ProjectConfiguration(logging_dir=str(folder or "."))
    )
    if accelerator.num_processes != wanted:
        raise RunError(
            f"{wanted} processes were started and {accelerator.num_processes} found each other; start them with: "
            "torchrun --nproc_per_node N -m lamella train …"
        )
    return accelerator


class Processes:
    """What a process does with the others; alone, all of it is nothing."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.rank: int = accelerator.process_index
        self.count: int = accelerator.num_processes
        self.is_main: bool = accelerator.is_main_process
        self.device: torch.device = accelerator.device

    def share(self, windows: Indices) -> Indices:
        """This process's part of a batch: windows of a batch are sorted by length, and so all parts are alike."""
        return windows[self.rank :: self.count]

    def add_up(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.count == 1:
            return values
        return self.accelerator.reduce(values, "sum")  # type: ignore[no-any-return]

    def add_up_totals(self, totals: Totals) -> Totals:
        if self.count == 1:
            return totals
        mine = torch.tensor([totals.answerable, totals.unanswerable, totals.tokens], device=self.device)
        return Totals(*self.add_up(mine).tolist())

    def add_up_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """One message for all of them; a parameter without a gradient here may have one elsewhere."""
        if self.count == 1:
            return
        mine = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
        sums = self.add_up(torch.cat([one.flatten() for one in mine]))
        for parameter, total in zip(parameters, torch.split(sums, [one.numel() for one in mine]), strict=True):
            parameter.grad = total.view_as(parameter)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Make tensors that follow each process's own batches the same in all."""
        if self.count > 1:
            for one in tensors:
                one.copy_(self.add_up(one.clone()) / self.count)

    def gather(self, found: list[Any]) -> list[Any]:
        """What all processes found, in all of them."""
        return found if self.count == 1 else list(gather_object(found))

    def from_main(self, value: Any) -> Any:
        """What the main process has found, in all of them; the others wait for it."""
        return value if self.count == 1 else broadcast_object_list([value])[0]
