"""Pareto fronts: the readers that no other reader of the same cost or less equals.

Times depend on the device that they were measured on, so a front of times holds the readers of one device only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lamella.study.compared_readers import TIME_COSTS, ComparedReader

UNKNOWN_DEVICE = "a device that is not recorded"


@dataclass(frozen=True)
class ParetoFront:
    """The best readers by F1 for a kind of cost."""

    cost: str  # as cost.json names it
    device: str | None  # of a time, the device that it was measured on; None for costs that depend on none
    readers: tuple[str, ...]  # names, cheapest first

    def to_dict(self) -> dict[str, Any]:
        """Return the front as plain values."""
        return {"cost": self.cost, "device": self.device, "readers": list(self.readers)}


def pareto_fronts(readers: Sequence[ComparedReader], cost: str) -> list[ParetoFront]:
    """Return the front of a cost; for a time, one front per device. Readers whose cost is unknown take no part."""
    known = [reader for reader in readers if reader.mean_cost(cost) is not None]
    if cost not in TIME_COSTS:
        return [ParetoFront(cost, None, _front(known, cost))] if known else []
    devices = dict.fromkeys(reader.device for reader in known)
    return [
        ParetoFront(
            cost, device or UNKNOWN_DEVICE, _front([reader for reader in known if reader.device == device], cost)
        )
        for device in devices
    ]


def unranked(readers: Sequence[ComparedReader], cost: str) -> list[str]:
    """Return the names of the readers without this cost: not recorded, or times from several devices."""
    return [reader.name for reader in readers if reader.mean_cost(cost) is None]


def timing_devices(readers: Sequence[ComparedReader]) -> list[str]:
    """Return the devices that the readers' times were measured on, in order of appearance."""
    timed = [run for reader in readers for run in reader.runs if any(key in run.cost for key in TIME_COSTS)]
    return list(dict.fromkeys(run.device or UNKNOWN_DEVICE for run in timed))


def _front(readers: Sequence[ComparedReader], cost: str) -> tuple[str, ...]:
    front: list[ComparedReader] = []
    for reader in sorted(readers, key=lambda reader: (reader.mean_cost(cost) or 0.0, -reader.mean_f1)):
        if not front or reader.mean_f1 > front[-1].mean_f1 + 1e-9:
            front.append(reader)
    return tuple(reader.name for reader in front)
